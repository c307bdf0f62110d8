"""FedNCM (Legate et al., NeurIPS 2023): the class whose mean is nearest, as a linear head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.once import added
from fipa.aggregation.rule import Step
from fipa.curvature.class_means import ClassSums, ClassSumsPlan
from fipa.errors import UpdateError


@dataclass(frozen=True)
class FedNCM:
    r"""The head with weights $\mu_c$ and biases $-\frac12 |\mu_c|^2$, $\mu_c$ the mean input of class c so far.

    Its largest output belongs to the class whose mean is nearest to the input. A class that no client has shown yet has
    the means' mean as its weight and the mean of their biases: it is never the largest. As with `Fed3R`, each client
    counts once, and its updates not at all.
    """

    needs = ClassSumsPlan
    once = True

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        summaries = cohort.require(ClassSums, "FedNCM")
        if summaries[0].layout.numel == summaries[0].sums.numel():
            raise UpdateError(
                f"{cohort.clients[0]} has a head without bias, but FedNCM needs one: nn.Linear(bias=True)"
            )
        after = added(cohort, state, "FedNCM", (one.tensors() for one in summaries))
        counts = after["counts"][:, None]
        means = after["sums"] / counts.clamp(min=1)
        biases = -means.square().sum(dim=1) / 2
        seen = after["counts"] > 0
        share = (after["counts"] / after["counts"].sum())[None]
        means = torch.where(seen[:, None], means, share @ means)
        biases = torch.where(seen, biases, share[0] @ biases)
        head = torch.cat([means.reshape(-1), biases])
        parts = [torch.cat([(one.sums.double() / counts.clamp(min=1)).reshape(-1), biases * 0]) for one in summaries]
        return Step(
            head.to(cohort.theta) - cohort.theta, float(seen.sum()) * means.shape[1], 1.0,
            [float(part @ head) for part in parts], after,
        )  # fmt: skip
