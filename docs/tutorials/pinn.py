# %% [markdown]
# # An equation whose domain is split
#
# A network that solves an equation is trained on the equation's residual at points of the domain (a PINN). Here, two
# sites have one half of the domain each. Their points stay where they are, and they train one network together. You
# need `pip install 'fipa[cli]'`.
#
# ## The equation
#
# $$-u'' + u^3 = f \quad\text{on } [0, 1], \qquad u(0) = u(1) = 0$$
#
# To know the error, take the solution $u^*(x) = \sin(2 \pi x) \, e^{x}$: `manufactured` finds the $f$ that belongs to
# it. Where no solution is known, use `fipa.pde.PDE` with a source of your own.

# %%
import math

import torch

import fipa
from fipa.pde import Box, Points, federated, grid_split, manufactured


def residual(u, x, f):  # zero where the equation holds
    return -u.dd(0) + u.value**3 - f


def exact(x):
    return torch.sin(2 * math.pi * x[:, 0]) * torch.exp(x[:, 0])


domain = Box.cube(1)
equation = manufactured(domain, residual, exact)
regions = grid_split(domain, cuts=[[0.5]])
for k, region in enumerate(regions):
    print(f"site {k}: from {region.low[0]} to {region.high[0]}")

# %% [markdown]
# ## The problem
#
# Each site draws its own points. The site on the left knows the condition at 0, the other one the condition at 1.
# Neither knows anything about the other half.


# %%
def problem(seed):
    model = fipa.models.mlp([1, 16, 16, 1], generator=torch.Generator().manual_seed(seed))
    return federated(equation, regions, model, Points(interior=60), seed=seed, penalty=10.0)


# %% [markdown]
# ## FedAvg against FIPA
#
# FedAvg with Adam averages two networks that each know half of the solution. FIPA with Gauss-Newton clients solves for
# both halves at once. Step control comes with it on least squares: the sites' own loss decides how far the server goes.

# %%
results = fipa.run(
    problem,
    rounds=25,
    quiet=True,
    arms={
        "FedAvg": {"rule": fipa.FedAvg(), "local": {"name": "adam", "lr": 3e-3, "steps": 20}},
        "FIPA": {"rule": fipa.FIPA(floor=1e-6), "local": {"name": "gauss-newton"}, "sketch": {"rank": 20}},
    },
)
for arm in results.arms:
    error = results.metric(arm)[0]
    print(f"{arm:6} relative error after 10 rounds {error[9]:.1e}, after 25 rounds {error[-1]:.1e}")

# %%
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for arm in results.arms:
    left.semilogy(range(1, 26), results.metric(arm)[0], label=arm)
left.set(xlabel="round", ylabel="relative error")
left.legend(fontsize=7)
x = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
right.plot(x, exact(x), color="black", linewidth=3, alpha=0.3, label="solution")
for arm in results.arms:
    model = problem(0).model
    torch.nn.utils.vector_to_parameters(results.theta(arm), model.parameters())
    right.plot(x, model(x).detach()[:, 0], linestyle="--", label=arm)
right.axvline(0.5, color="grey", linewidth=0.5)
right.set(xlabel="x", ylabel="u")
right.legend(fontsize=7)

# %% [markdown]
# FedAvg could be tuned, and [the measured tables](../pde.md#results) do so: there FedAvg has the best of several
# settings, and the lead at equal rounds is a factor of some thousands. FIPA pays for it in bytes:

# %%
for arm in results.arms:
    print(f"{arm:6} {results.series('uplink_bytes', arm).sum() / 2**20:.2f} MiB sent")

# %% [markdown]
# The run is on disk like any other. `results.report()` writes a page with curves, solutions and errors, and `fipa
# report` does the same from the command line.
#
# ## Where to go from here
#
# - Networks have long, curved valleys. `"step_control": {"acceleration": 0.75}` follows the curve, and pays off in
#   long runs: [what is solved](../how-to/equations.md#what-is-solved).
# - Several dimensions, boxes, overlapping regions, time, unknown coefficients:
#   [equations](../how-to/equations.md).
# - Shipped equations: `fipa list`, then `fipa run pde-bratu` or `fipa run poisson-2d`.
# - Fit data instead of an equation: [a problem of your own](own-rule.md).
