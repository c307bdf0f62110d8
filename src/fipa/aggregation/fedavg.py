"""FedAvg: curvature-weighted averaging with the identity as curvature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative


@dataclass(frozen=True)
class FedAvg:
    r"""The weighted mean of the updates, $d = \gamma \sum_m w_m \Delta\theta_m$ (paper Eq. `eq:fedavg_aggregation`).

    Parameters
    ----------
    step
        $\gamma$, the server's step.
    """

    step: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(self, step=self.step)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        mean = cohort.mean_delta
        return Step(
            change=self.step * mean,
            effective_rank=float(mean.numel()),
            condition_number=1.0,
            projections=[w * float(mean @ delta) for w, delta in zip(cohort.weights, cohort.deltas, strict=True)],
        )
