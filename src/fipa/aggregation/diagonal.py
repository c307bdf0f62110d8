"""Fisher merging: curvature-weighted averaging with the diagonal of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative
from fipa.curvature.diagonal import DiagonalCurvature, DiagonalPlan


@dataclass(frozen=True)
class DiagonalFisher:
    r"""$d_j = \gamma \sum_m w_m (f_{mj} + \beta) \Delta\theta_{mj} / \sum_m w_m (f_{mj} + \beta)$ for each parameter j.

    `damping` $\beta$ leads to FedAvg as it grows, and decides alone where no client has curvature: with
    `damping=0` those parameters are averaged too.

    Parameters
    ----------
    damping
        $\beta$: the larger, the closer to FedAvg.
    step
        $\gamma$, the server's step.
    """

    damping: float = 0.0
    step: float = 1.0

    needs = DiagonalPlan

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        diagonals = cohort.require(DiagonalCurvature, "DiagonalFisher")
        total = torch.zeros_like(diagonals[0].values)
        moved = torch.zeros_like(total)
        for weight, one, delta in zip(cohort.weights, diagonals, cohort.deltas, strict=True):
            total.add_(one.values, alpha=weight)
            moved.addcmul_(one.values + self.damping, delta, value=weight)
        shifted = total + self.damping
        flat = shifted == 0
        d = torch.where(flat, cohort.mean_delta, moved / shifted.where(~flat, 1))
        projections = []
        for weight, one, delta in zip(cohort.weights, diagonals, cohort.deltas, strict=True):
            own = torch.where(flat, delta, (one.values + self.damping) * delta / shifted.where(~flat, 1))
            projections.append(weight * float(own @ d))
        curved = shifted[~flat]
        return Step(
            change=self.step * d,
            effective_rank=float((total[~flat] / curved).sum()),
            condition_number=float(curved.max() / curved.min()) if len(curved) else 1.0,
            projections=projections,
        )
