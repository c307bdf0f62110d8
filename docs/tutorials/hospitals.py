# %% [markdown]
# # Ten hospitals with different cases
#
# Ten hospitals want one model. Each sees different cases, none may show its data, and none wants to learn from a server
# that makes things worse. This page shows two things for such *silos*, where all clients take part in every round:
#
# 1. **Step control**: the hospitals' own loss decides whether a step is taken.
# 2. **Secure sums**: the server sees sums over all hospitals, and nothing from a single one.
#
# Instead of medical cases we use the digits that come with the package. You need `pip install 'fipa[flower]'`.

# %%
import logging

import torch
from torch import nn

import fipa
from fipa.data import BalancedDirichlet, histogram, load

digits = load("digits")
parts = BalancedDirichlet(alpha=0.05).split(digits.train.labels, 10, torch.Generator().manual_seed(1))
print("classes of each hospital:", (histogram(digits.train.labels, parts, 10) > 5).sum(1).tolist())


def tensors(images):
    return images.pixels.flatten(1).float() / 127.5 - 1, images.labels


x, y = tensors(digits.train)
hospitals = [(x[part], y[part]) for part in parts]
x_test, y_test = tensors(digits.test)


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def accuracy(model):
    return 100 * (model(x_test).argmax(1) == y_test).double().mean()


# %% [markdown]
# ## A problem and two arms
#
# A `Problem` is a model, the clients' data and a metric. An `Arm` is a way to solve it. The first is FedAvg. The second
# has clients that take one Gauss-Newton step with their own sketch, and a server that solves for all of them together.
# `StepControl` proposes a step, asks every hospital for its loss there (one number each), and takes the step only if
# the mean has fallen. If not, it tries a more careful one from the same updates: nobody trains twice.


# %%
def problem(seed):
    return fipa.Problem(new_model(), hospitals, accuracy, loss="cross_entropy", name="accuracy", goal="max")


fedavg = fipa.Stage(fipa.FedAvg(), fipa.SGD(lr=0.1, epochs=2, batch=16), rounds=8)
controlled = fipa.Stage(
    fipa.FIPA(floor=0.01),
    fipa.GaussNewton(),
    rounds=8,
    plan=fipa.SketchPlan(rank=20, sampled_labels=1),
    control=fipa.StepControl(select="best", initial=0.01),
)


def run(name, stage):
    with fipa.Executor(problem) as executor:
        federation = fipa.Federation(fipa.Arm(name, (stage,)), seed=0, executor=executor)
        return [record for _, record in federation.rounds(federation.start())]


records = {name: run(name, stage) for name, stage in [("FedAvg", fedavg), ("FIPA controlled", controlled)]}
for name, rounds in records.items():
    print(f"{name:16}", [round(one.metric) for one in rounds])

# %% [markdown]
# Every round keeps a record. The hospitals' loss never rises, because a step that would raise it is not taken:

# %%
for one in records["FIPA controlled"][:4]:
    print(f"round {one.round}: loss {one.loss:.3f}, {one.trials} steps tried, damping {one.damping:g} taken")
assert all(one.accepted for one in records["FIPA controlled"])

# %% [markdown]
# ## Sums only
#
# So far the server has seen each hospital's update. Under **secure sums** it does not: hospitals add random masks to
# what they send, and the masks cancel in the sum. The rule must need nothing but sums, and [FIPA in a shared
# basis](../shared-basis.md#under-masks) is such a rule. Hospitals are Flower clients with an objective. `LocalGrid`
# runs all of them in this process, with all keys, shares and masks.

# %%
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp

from fipa.flower import FIPA, SecureFIPA, client
from fipa.flower.local import LocalGrid

logging.getLogger("flwr").setLevel(logging.ERROR)  # no progress on this page
app = client(
    ClientApp(),
    objective=lambda context: (new_model(), hospitals[context.node_config["partition-id"]], "cross_entropy"),
)


@torch.no_grad()
def evaluate(round_number, arrays):
    model = new_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": float(accuracy(model))})


curves = {}
for name, strategy in {
    "open": FIPA(fraction_evaluate=0.0),
    "masked": SecureFIPA(local=fipa.FullGradient()),
    "masked, signs=0": SecureFIPA(local=fipa.FullGradient(), signs=0),
}.items():
    start = ArrayRecord(new_model().state_dict())
    result = strategy.start(LocalGrid(app, 10), start, num_rounds=8, evaluate_fn=evaluate)
    curves[name] = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()][1:]
    print(f"{name:16}", [round(value) for value in curves[name]])

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
for name, rounds in records.items():
    axes.plot(range(1, 9), [one.metric for one in rounds], marker=".", label=name)
for name, curve in curves.items():
    axes.plot(range(1, 9), curve, linestyle="--", marker=".", label=f"shared basis, {name}")
axes.set(xlabel="round", ylabel="test accuracy, %")
axes.legend(fontsize=7)

# %% [markdown]
# Masks cost speed. In the open, the basis grows by the gradients of all hospitals; under masks it grows by a few sums
# of them. `signs` is the number of extra sums with random signs. More of them are faster and reveal more: with
# `signs=0` the server learns the mean gradient and nothing else. [What that means in
# numbers](../shared-basis.md#under-masks).
#
# ## What is protected, and what is not
#
# - The server learns sums over all hospitals, who took part, and the total number of examples.
# - Up to `threshold - 1` hospitals may collude with it. Hospitals may leave in the middle of a round: the sum is then
#   that of the others.
# - A *hostile* server that invents clients is not covered, and a sum does not hide everything about its parts. [Secure
#   sums](../how-to/secure-sums.md) has the protocol and its limits, and [differential privacy](../how-to/privacy.md)
#   is the remedy for the second.
