r"""FIPA: curvature-weighted averaging with low-rank Fisher sketches.

With the stacked sketches A and $y = [\sqrt{w_m} \Lambda_m^{1/2} U_m^\top \Delta\theta_m]$ of `stack.Stack`,
$\hat H = A^\top A$ and $b = A^\top y$ are the paper's aggregated curvature and right-hand side. Only an R x R system is
ever solved. b lies in the span of the sketches, so the paper's orthogonal-complement correction is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative
from fipa.aggregation.stack import Stack
from fipa.curvature.sketch import Sketch
from fipa.errors import FipaError

CUTOFF = 1e-5


def filtered_inverse(eigenvalues: Tensor, damping: float, cutoff: float, noise: float) -> tuple[Tensor, float, float]:
    r"""$1 / (\lambda + \beta)$, or the pseudo-inverse for $\beta = 0$; with effective rank and condition number.

    Eigenvalues below `noise` times the largest are rounding: a small damping must not blow them up.
    """
    if len(eigenvalues) == 0 or eigenvalues[0] <= 0:
        return torch.zeros_like(eigenvalues), 0.0, 1.0
    kept = eigenvalues > (noise if damping else max(cutoff, noise)) * eigenvalues[0]
    shifted = eigenvalues + damping
    inverse = torch.where(kept, 1 / shifted.where(kept, 1), 0)
    if damping:
        return inverse, float((eigenvalues * inverse).sum()), float(shifted[0] / shifted[-1])
    return inverse, float(kept.sum()), float(shifted[0] / shifted[kept][-1])


@dataclass(frozen=True)
class FIPA:
    r"""Paper Eq. `eq:hpa_update`, $d = \gamma (\hat H + \beta I)^\dagger \sum_m w_m \hat H_m \Delta\theta_m$.

    Directions that no sketch covers do not move.

    Parameters
    ----------
    damping
        $\beta$. Zero is the pseudo-inverse, which the paper uses for fitting and PDEs; the published code has 0.5 for
        images.
    step
        $\gamma$.
    cutoff
        Without damping: eigenvalues of $\hat H$ below this share of the largest count as zero.
    """

    damping: float = 0.0
    step: float = 1.0
    cutoff: float = CUTOFF

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step, cutoff=self.cutoff)

    @classmethod
    def as_in_authors_code(cls, damping: float, step: float) -> FIPA:
        r"""The published code's $\gamma \beta (\hat H + \beta I)^{-1} b$: the paper's rule with step $\gamma \beta$."""
        if damping == 0:
            raise FipaError("as_in_authors_code(damping=0): the step is multiplied by the damping, and would be zero")
        return cls(damping, step * damping)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        stack = _stack(cohort, "FIPA")
        solve = ReducedSolve(stack, self.damping, self.cutoff)
        y = stack.times_each(cohort.deltas)
        d = stack.transposed(solve(torch.cat(y)))
        # d_m = A^T F y_m, with F the filtered inverse, so <d_m, d> = <y_m, F A d>
        pull = solve(stack.times(d)).split(stack.ranks)
        projections = [float(a @ b) for a, b in zip(y, pull, strict=True)]
        return Step(self.step * d, solve.effective_rank, solve.condition_number, projections)


@dataclass(frozen=True)
class CompletedFIPA:
    r"""FIPA where sketches know the way, FedAvg where they do not.

    Minimises $\sum_m w_m (d - \Delta\theta_m)^\top (\hat H_m + \beta I) (d - \Delta\theta_m)$:

    $$d = \gamma \big[ \bar\Delta + A^\top (A A^\top + \beta I)^{-1} (y - A \bar\Delta) \big], \qquad
    \bar\Delta = \sum_m w_m \Delta\theta_m .$$

    $\beta \to \infty$ is FedAvg; $\beta = 0$ is the paper's rule on the sketched range and FedAvg on its complement.
    Parameters as for `FIPA`.
    """

    damping: float = 0.0
    step: float = 1.0
    cutoff: float = CUTOFF

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step, cutoff=self.cutoff)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        stack = _stack(cohort, "CompletedFIPA")
        solve = ReducedSolve(stack, self.damping, self.cutoff)
        y = stack.times_each(cohort.deltas)
        mean = cohort.mean_delta
        d = mean + stack.transposed(solve(torch.cat(y) - stack.times(mean)))
        # d_m = w_m D_m + A^T F (y_m - w_m A D_m), so <d_m, d> = w_m <D_m, d - A^T F A d> + <y_m, F A d>
        pull = solve(stack.times(d))
        free = d - stack.transposed(pull)
        projections = [
            weight * float(delta @ free) + float(a @ b)
            for weight, delta, a, b in zip(cohort.weights, cohort.deltas, y, pull.split(stack.ranks), strict=True)
        ]
        return Step(self.step * d, solve.effective_rank, solve.condition_number, projections)


def _stack(cohort: Cohort, rule: str) -> Stack:
    """The cohort's sketches; built once, for the spectrum is most of the work and does not depend on the damping."""
    return cohort.remember("stack", lambda: Stack(cohort.require(Sketch, rule), cohort.weights))


class ReducedSolve:
    r"""The filtered inverse $F$ of $A A^\top$: $(A A^\top + \beta I)^{-1}$, or the pseudo-inverse for $\beta = 0$."""

    def __init__(self, stack: Stack, damping: float, cutoff: float) -> None:
        bound = stack.largest_possible
        values, self.vectors = stack.spectrum(resolution=damping / bound if bound else 1.0)
        self.inverse, self.effective_rank, self.condition_number = filtered_inverse(
            values, damping, cutoff, noise=(len(values) * torch.finfo(stack.dtype).eps) ** 2
        )

    def __call__(self, v: Tensor) -> Tensor:
        """$F v$ (R)."""
        return self.vectors @ (self.inverse * (self.vectors.T @ v))
