"""Fed3R (Fanì et al., ICML 2024): a linear head by ridge regression, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.once import added
from fipa.aggregation.rule import Step, check_not_negative
from fipa.curvature.head_data import head_shape
from fipa.curvature.ridge import RidgePlan, RidgeStatistics
from fipa.errors import FipaError


@dataclass(frozen=True)
class Fed3R:
    r"""The head is $W = \big(\sum_m A_m + \lambda I\big)^{-1} \sum_m b_m$ over all clients seen so far.

    $A_m$ and $b_m$ are sums over a client's examples: see `fipa.RidgeStatistics`. The server keeps their sums, and each
    client counts once, so the result does not depend on who came when: after all clients have been seen it is the ridge
    regression on all data. It has no use for updates, and its model is no step from the last one.

    Parameters
    ----------
    ridge
        $\lambda > 0$, in the units of the sums: the more examples, the less it counts.
    """

    ridge: float = 1.0

    needs = RidgePlan
    once = True

    def __post_init__(self) -> None:
        check_not_negative(self, ridge=self.ridge)
        if self.ridge == 0:
            raise FipaError("Fed3R(ridge=0): the sums of few examples are singular, use a positive ridge")

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        summaries = cohort.require(RidgeStatistics, "Fed3R")
        after = added(cohort, state, "Fed3R", (one.tensors() for one in summaries))
        _, _, bias = head_shape(summaries[0].layout, "ridge statistics")
        damped = after["gram"] + self.ridge * torch.eye(len(after["gram"]), dtype=torch.float64)
        factor = torch.linalg.cholesky(damped)

        def solved(moments: Tensor) -> Tensor:
            """A head, flat: weights row by row, then the bias."""
            W = torch.cholesky_solve(moments.double(), factor)
            return torch.cat([W[:-1].T.reshape(-1), W[-1]]) if bias else W.T.reshape(-1)

        head = solved(after["moments"])
        projections = [float(solved(one.moments) @ head) for one in summaries]
        inverse = torch.cholesky_inverse(factor)
        condition = float(torch.linalg.matrix_norm(damped, ord=1) * torch.linalg.matrix_norm(inverse, ord=1))
        rank = after["moments"].shape[1] * (len(damped) - self.ridge * float(inverse.trace()))
        return Step(head.to(cohort.theta) - cohort.theta, rank, condition, projections, after)
