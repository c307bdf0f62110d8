# %% [markdown]
# # FIPA in your own PyTorch loop
#
# You have a model, a training function and clients whose data differ. This page replaces the server's average with
# FIPA. You need `pip install fipa`, and matplotlib for the figure at the end. It runs in seconds.
#
# ## The data
#
# Handwritten digits of 8 x 8 pixels come with the package. They are split between ten clients, and each has only a few
# classes: that is what makes plain averaging slow.

# %%
import torch
from torch import nn

import fipa
from fipa.data import BalancedDirichlet, histogram, load

digits = load("digits")
parts = BalancedDirichlet(alpha=0.1).split(digits.train.labels, 10, torch.Generator().manual_seed(0))
print("clients x classes")
print(histogram(digits.train.labels, parts, classes=10))


def tensors(images):
    return images.pixels.float() / 127.5 - 1, images.labels


x, y = tensors(digits.train)
clients = [(x[part], y[part]) for part in parts]
x_test, y_test = tensors(digits.test)

# %% [markdown]
# ## The model, and training as you know it


# %%
def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def train(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.arange(len(x)).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model):
    return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


# %% [markdown]
# ## A round
#
# Three lines differ from FedAvg: each client makes a **sketch** of its curvature *at the parameters that the server
# sent*, it sends the sketch along with its update, and the server's rule uses both.


# %%
def one_round(model, rule, rank=20):
    theta = fipa.parameters_of(model)  # what the server sends
    updates = []
    for x, y in clients:  # on each client
        model.load_state_dict(theta)
        sketch = fipa.sketch(model, (x, y), loss="cross_entropy", rank=rank) if rank else None
        train(model, x, y)
        delta = {name: p - theta[name] for name, p in fipa.parameters_of(model).items()}
        updates.append(fipa.ClientUpdate(delta, num_examples=len(x), sketch=sketch))
    result = fipa.aggregate(theta, updates, rule)  # on the server
    model.load_state_dict(result.theta)
    return result, updates


# %% [markdown]
# ## FedAvg against FIPA
#
# `CompletedFIPA` is the paper's rule with FedAvg in the directions that no sketch covers. A large damping makes it
# FedAvg; a small one trusts the curvature.


# %%
def federation(rule, rank, rounds=8):
    model, curve = new_model(), []
    for _ in range(rounds):
        result, updates = one_round(model, rule, rank)
        curve.append(accuracy(model))
    return curve, result, updates


curves = {}
for name, rule, rank in [
    ("FedAvg", fipa.FedAvg(), 0),
    ("FIPA, damping 0.1", fipa.CompletedFIPA(damping=0.1), 20),
    ("FIPA, damping 0.01", fipa.CompletedFIPA(damping=0.01), 20),
]:
    curves[name], result, updates = federation(rule, rank)
    print(f"{name:20} after 4 rounds {curves[name][3]:4.1f} %, after 8 rounds {curves[name][-1]:4.1f} %")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
for name, curve in curves.items():
    axes.plot(range(1, 9), curve, marker=".", label=name)
axes.set(xlabel="round", ylabel="test accuracy, %")
axes.legend()

# %% [markdown]
# ## What the server can tell you
#
# `result.diagnostics` describes the step. A share is a client's part of it; a client with a negative share was
# overruled.

# %%
seen = result.diagnostics
print(f"effective rank {seen.effective_rank:.0f} of {sum(u.sketch.rank for u in updates)} eigenpairs")
print(f"cosine with FedAvg's step {seen.cosine_with_fedavg:.2f}")
print("shares", [round(share, 2) for share in seen.shares.values()])

# %% [markdown]
# ## What it costs
#
# A sketch of rank r is r times the size of an update. So at equal rounds FIPA is far ahead, and at equal bytes it may
# not be: FedAvg with more rounds is a strong opponent. Let the spectrum choose the rank, or send fewer eigenpairs:

# %%
size = 4 * sum(p.numel() for p in new_model().parameters())  # bytes of an update
print(f"FedAvg, 8 rounds: {8 * 10 * size / 2**20:.1f} MiB sent by all clients")
for rank in (5, fipa.TraceShare(0.6, max_rank=20)):
    curve, _, updates = federation(fipa.CompletedFIPA(damping=0.01), rank)
    ranks = sum(u.sketch.rank for u in updates) / 10
    sent = 8 * 10 * size * (1 + ranks) / 2**20
    print(f"{rank}: {curve[-1]:.1f} %, mean rank {ranks:.0f} in the last round, about {sent:.1f} MiB")

# %% [markdown]
# If bytes matter, [a shared basis](../shared-basis.md) is as accurate as full sketches, with an uplink near FedAvg's.
# It needs clients that remember things between rounds, so it comes with the engine: see [your Flower app](flower.md).
#
# ## Where to go from here
#
# - Models with BatchNorm have buffers: [how to average them](../how-to/guide.md#buffers).
# - Only a head is trained: [which parameters](../how-to/guide.md#which-parameters).
# - Another loss: [your own residuals](../how-to/guide.md#your-own-residuals).
# - [Which rule?](../which-rule.md)
