# %% [markdown]
# # A problem and a rule of your own
#
# A problem is a function, and a rule is a small class. A rule works in `fipa.aggregate`, in a `fipa.Federation`, on
# Flower and, once it has a name, in the experiments of `fipa run`. You need `pip install 'fipa[cli]'`.
#
# ## A problem
#
# Five weather stations measure one curve, each during its own hours. One of them is broken and adds 2 to everything.
# A `Residual` says what should be zero, one number per example.

# %%
import math

import torch

import fipa


def misfit(model, hour, temperature):
    return model(hour)[:, 0] - temperature


def truth(hour):
    return torch.exp(-hour[:, 0]) * torch.sin(2 * math.pi * hour[:, 0])


def stations(seed, broken):
    generator = torch.Generator().manual_seed(seed)
    for k, (start, end) in enumerate([(0.0, 0.5), (0.1, 0.6), (0.2, 0.7), (0.4, 0.9), (0.5, 1.0)]):
        hour = start + (end - start) * torch.rand(60, 1, generator=generator, dtype=torch.float64)
        yield fipa.Residual(misfit, hour, truth(hour) + (2.0 if broken and k == 2 else 0.0))


grid = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]


def problem(seed, broken=False):
    return fipa.Problem(
        model=fipa.models.mlp([1, 12, 12, 1], generator=torch.Generator().manual_seed(seed)),
        clients=list(stations(seed, broken)),
        metric=lambda model: (model(grid)[:, 0] - truth(grid)).square().mean(),
        name="test MSE",
    )


# %% [markdown]
# Put into a file `weather.py`, this runs with `fipa run weather.py`, which also makes the report. Here we go round by
# round instead.


# %%
def run(rule, broken, rounds=12):
    stage = fipa.Stage(rule, fipa.GaussNewton(damping=1e-3), rounds=rounds, plan=fipa.SketchPlan(rank=12))
    with fipa.Executor(lambda seed: problem(seed, broken)) as executor:
        federation = fipa.Federation(fipa.Arm("mine", (stage,)), seed=0, executor=executor)
        return [record.metric for _, record in federation.rounds(federation.start())]


for broken in (False, True):
    error = run(fipa.FIPA(damping=1e-3), broken)[-1]
    print(f"FIPA, {'one station broken' if broken else 'all stations fine'}: test MSE {error:.1e}")

# %% [markdown]
# One broken station spoils the model. FIPA weighs clients by their curvature, not by their honesty.
#
# ## A rule
#
# A rule is a callable that takes a validated `Cohort` and its own state, and returns a `Step`. FIPA's step $d$
# minimises how much the clients disagree, $\sum_m w_m (d - \Delta\theta_m)^\top H_m (d - \Delta\theta_m)$. So each
# client's own term says how unhappy it is with the step. Our rule leaves out a client that disagrees far more than
# most, and lets FIPA aggregate the others.
#
# `needs` says which curvature the rule wants. Clients are then asked for it, in federations and on Flower alike.

# %%
from dataclasses import dataclass


@dataclass(frozen=True)
class WithoutOutliers:
    """FIPA of the clients that do not disagree far more than most."""

    damping: float = 1e-3
    factor: float = 8.0

    needs = fipa.SketchPlan

    def __call__(self, cohort, state):
        rule = fipa.FIPA(damping=self.damping)
        step = rule(cohort, state)
        disagreement = []
        for sketch, delta in zip(cohort.require(fipa.Sketch, "WithoutOutliers"), cohort.deltas):
            seen = sketch.eigenvectors.T @ (step.change - delta)
            disagreement.append(float(sketch.eigenvalues @ seen**2))
        limit = self.factor * sorted(disagreement)[len(disagreement) // 2]
        kept = [w if one <= limit else 0.0 for w, one in zip(cohort.weights, disagreement)]
        return rule(cohort.with_weights(kept), state)


# %%
for broken in (False, True):
    error = run(WithoutOutliers(), broken)[-1]
    print(f"my rule, {'one station broken' if broken else 'all stations fine'}: test MSE {error:.1e}")

# %% [markdown]
# The broken station no longer counts, and nothing is lost where all are fine. This is a tutorial and no defence: a
# client that lies cleverly can also lie about its curvature. [What one hostile client can
# do](../shared-basis.md#what-one-hostile-client-can-do) is measured for a shared basis.
#
# ## The rule in experiments
#
# An experiment runs many arms and seeds, can be resumed, and ends in a report. It knows rules by name, so give yours
# one:

# %%
fipa.register_rule("without-outliers", WithoutOutliers)
clients = {"local": {"name": "gauss-newton", "damping": 1e-3}, "sketch": {"rank": 12}}
results = fipa.run(
    lambda seed: problem(seed, broken=True),
    arms={
        "FIPA": {"rule": {"name": "fipa", "damping": 1e-3}, "step_control": False, **clients},
        "my rule": {"rule": {"name": "without-outliers", "factor": 8.0}, **clients},
    },
    rounds=12,
    quiet=True,
)
for arm in results.arms:
    print(f"{arm}: test MSE {results.metric(arm)[0, -1]:.1e}")

# %% [markdown]
# These are the numbers from above. On the command line, put the problem, the rule, `fipa.register_rule(...)` and a dict
# `arms` like this one into `weather.py`:
#
# ```sh
# fipa run weather.py --seeds 0-4 --workers 2
# ```
#
# A TOML file lists the Python files whose rules it uses. Settings are the fields of the class, and are checked as those
# of our own rules are:
#
# ```toml title="mine.toml"
# base = "fit-sin2"
# files = ["weather.py"]
# control = "FIPA"
#
# [defaults]
# local = { name = "gauss-newton", damping = 1e-3 }
# sketch = { rank = 12 }
#
# [[arms]]
# name = "FIPA"
# rule = { name = "fipa", damping = 1e-3 }
#
# [[arms]]
# name = "my rule"
# rule = { name = "without-outliers", factor = 4.0 }
# ```
#
# ## The same rule elsewhere
#
# In a loop of your own: `fipa.aggregate(theta, updates, WithoutOutliers())`. On Flower:
# `fipa.flower.FIPA(WithoutOutliers())`; its clients then send sketches, because the rule says `needs`. What a rule
# remembers from round to round goes into `Step(..., state=...)`, and comes back as `state`.
#
# ## Where to go from here
#
# - [A curvature of your own](../how-to/guide.md#a-curvature-of-your-own), and
#   [a client rule of your own](../how-to/guide.md#a-client-rule-of-your-own).
# - [Experiments as TOML files](../how-to/experiments.md), with many arms and seeds, and a report.
# - Add it to the library: [contributing](../contributing.md#a-rule).
