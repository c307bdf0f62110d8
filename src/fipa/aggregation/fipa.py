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
from fipa.aggregation.krylov import Iteration
from fipa.aggregation.rule import Step, check_not_negative
from fipa.aggregation.stack import SAFE_IN_OWN_DTYPE, Stack
from fipa.curvature.sketch import Sketch, SketchPlan
from fipa.errors import FipaError

CUTOFF = 1e-5
_ALWAYS = 2**28  # bytes that a system may take, however low the limit is


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

    Directions that no sketch covers do not move, unless a `floor` is given: then $\hat H_m + \mu I$ stands for
    $\hat H_m$ on both sides,

    $$d = \gamma (\hat H + (\mu + \beta) I)^{-1} \sum_m w_m (\hat H_m + \mu I) \Delta\theta_m ,$$

    and the server sees all of an update instead of its projection on the sketch. Gauss-Newton clients
    are told the floor and send $\Delta\theta_m = -(\hat H_m + \mu I)^{-1} g_m$: the sum is their gradient, all of it,
    whatever the rank.

    Parameters
    ----------
    damping
        $\beta$. Zero is the pseudo-inverse, which the paper uses for fitting and PDEs; the published code has 0.5 for
        images.
    step
        $\gamma$.
    cutoff
        Without damping: eigenvalues of $\hat H$ below this share of the largest count as zero.
    floor
        $\mu$: curvature of each client in the directions that its sketch leaves out. Zero is the paper's rule.
    """

    damping: float = 0.0
    step: float = 1.0
    cutoff: float = CUTOFF
    floor: float = 0.0

    needs = SketchPlan

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step, cutoff=self.cutoff, floor=self.floor)

    @classmethod
    def as_in_authors_code(cls, damping: float, step: float) -> FIPA:
        r"""The published code's $\gamma \beta (\hat H + \beta I)^{-1} b$: the paper's rule with step $\gamma \beta$."""
        if damping == 0:
            raise FipaError("as_in_authors_code(damping=0): the step is multiplied by the damping, and would be zero")
        return cls(damping, step * damping)

    def _check_floor(self, stack: Stack) -> None:
        """Updates of size 1 / floor are rounded, and then multiplied by the curvature."""
        least = torch.finfo(stack.dtype).eps * stack.largest_possible
        if self.floor < least:
            raise FipaError(
                f"FIPA(floor={self.floor:g}) drowns in the rounding of {stack.dtype} under curvatures up to "
                f"{stack.largest_possible:.3g}: use a floor well above {least:.1g}, or float64"
            )

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        total = self.damping + self.floor
        if self.floor:
            self._check_floor(_stack(cohort, "FIPA"))
        return _weigh(cohort, "FIPA", total, self.cutoff, self.step, mean=self.floor / total if total else 0.0)


@dataclass(frozen=True)
class CompletedFIPA:
    r"""FIPA where sketches know the way, FedAvg where they do not.

    Minimises $\sum_m w_m (d - \Delta\theta_m)^\top (\hat H_m + \beta I) (d - \Delta\theta_m)$:

    $$d = \gamma \big[ \bar\Delta + A^\top (A A^\top + \beta I)^{-1} (y - A \bar\Delta) \big], \qquad
    \bar\Delta = \sum_m w_m \Delta\theta_m .$$

    $\beta \to \infty$ is FedAvg; $\beta = 0$ is the paper's rule on the sketched range and FedAvg on its complement.
    Other parameters as for `FIPA`, which is the same rule with `floor` = $\beta$ and no damping.

    Parameters
    ----------
    damping
        $\beta$: the larger, the closer to FedAvg.
    step
        $\gamma$, the server's step.
    cutoff
        Without damping: eigenvalues of $\hat H$ below this share of the largest count as zero.
    pull
        Factor of y. 1 takes an update for the way to the client's optimum: all others are pulled there where its
        curvature is high. 0 takes it for a step against its gradient, and $d = \gamma \beta (\hat H + \beta I)^{-1}
        \bar\Delta$ is FedAvg's step, shortened where the mean curvature is high: for clients that train little, or
        whose sketches are rough.
    """

    damping: float = 0.0
    step: float = 1.0
    cutoff: float = CUTOFF
    pull: float = 1.0

    needs = SketchPlan

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step, cutoff=self.cutoff, pull=self.pull)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        return _weigh(cohort, "CompletedFIPA", self.damping, self.cutoff, self.step, mean=1.0, pull=self.pull)


def _weigh(
    cohort: Cohort, rule: str, damping: float, cutoff: float, step: float, mean: float, pull: float = 1.0
) -> Step:
    r"""$d = \kappa \bar\Delta + A^\top F (\rho y - \kappa A \bar\Delta)$, F the filtered inverse, $\kappa$ = `mean`."""
    stack = _stack(cohort, rule)
    if stack.nbytes > cohort.memory_limit or _system(stack) > max(cohort.memory_limit, _ALWAYS):
        if damping:
            return _iterated(cohort, stack, damping, step, mean, pull)
        _check_system(stack, rule, cohort.memory_limit)
    solve = ReducedSolve(stack, damping, cutoff)
    y = [pull * own for own in stack.times_each(cohort.deltas)]
    if mean == 0.0:
        d = stack.transposed(solve(torch.cat(y)))
    else:
        centre = mean * cohort.mean_delta
        d = centre + stack.transposed(solve(torch.cat(y) - stack.times(centre)))
    # Client m's part is d_m = k w_m D_m + A^T F (y_m - k w_m A D_m), with the pull in y, so
    # <d_m, d> = k w_m <D_m, d - A^T F A d> + <y_m, F A d>.
    reaction = solve(stack.times(d))
    projections = [float(a @ b) for a, b in zip(y, reaction.split(stack.ranks), strict=True)]
    if mean:
        free = mean * (d - stack.transposed(reaction))
        pairs = zip(projections, cohort.weights, cohort.deltas, strict=True)
        projections = [own + weight * float(delta @ free) for own, weight, delta in pairs]
    return Step(step * d, solve.effective_rank, solve.condition_number, projections)


def _iterated(cohort: Cohort, stack: Stack, damping: float, step: float, mean: float, pull: float) -> Step:
    r"""The same from products with $\hat H$ alone: $(\hat H + \beta I) d = \rho b + \kappa \beta \bar\Delta$."""
    precise = damping < SAFE_IN_OWN_DTYPE * stack.largest_possible
    found = _iteration(cohort, stack, torch.float64 if precise else stack.dtype)
    solved, bound = found.solve(damping, pull * found.response + mean * damping * found.mean)
    if not len(solved):
        return Step(torch.zeros_like(cohort.theta), 0.0, 1.0, [0.0] * len(cohort.ids))
    d, x = (found.space.vector(z).to(stack.dtype) for z in (solved, found.space.solve(damping, solved)))
    # as for `_weigh`, where F A d = A x and d - A^T F A d = beta x with x = (H + beta I)^-1 d
    reaction = stack.times(x).split(stack.ranks)
    projections = [pull * float(a @ b) for a, b in zip(found.own, reaction, strict=True)]
    if mean:
        pairs = zip(projections, cohort.weights, cohort.deltas, strict=True)
        projections = [own + weight * mean * damping * float(delta @ x) for own, weight, delta in pairs]
    known = found.effective_rank(damping), found.condition_number(damping)
    return Step(step * d, *known, projections, error_bound=bound)


def _iteration(cohort: Cohort, stack: Stack, dtype: torch.dtype) -> Iteration:
    """The one for the cohort's updates; those of the last two are kept: an update and its correction alternate."""
    found = cohort.remember(_iterations)
    same = [one for one in found if one.deltas is cohort.deltas and one.dtype == dtype]
    if not same:
        same = [Iteration(cohort, stack, dtype)]
    found[:] = [*[one for one in found if one is not same[0]][-1:], same[0]]
    return same[0]


def _iterations(cohort: Cohort) -> list[Iteration]:
    return []


def _system(stack: Stack) -> int:
    """Bytes of an R x R system, which takes about four matrices of that size in float64."""
    return 32 * int(sum(stack.ranks)) ** 2


def _check_system(stack: Stack, rule: str, memory_limit: int) -> None:
    """Without damping there is no way around the R x R system."""
    if _system(stack) > max(memory_limit, _ALWAYS):
        raise FipaError(
            f"{rule} without damping solves a system of side {sum(stack.ranks)} for these sketches, which takes "
            f"{_system(stack) / 2**30:.1f} GiB: set a damping, lower the clients' rank, or raise memory_limit"
        )


def _stack(cohort: Cohort, rule: str) -> Stack:
    """The cohort's sketches; built once, for the spectrum is most of the work and does not depend on the damping."""
    cohort.require(Sketch, rule)
    return cohort.remember(_stacked)


def _stacked(cohort: Cohort) -> Stack:
    return Stack(cohort.require(Sketch, "FIPA"), cohort.weights)


class ReducedSolve:
    r"""The filtered inverse $F$ of $A A^\top$: $(A A^\top + \beta I)^{-1}$, or the pseudo-inverse for $\beta = 0$."""

    def __init__(self, stack: Stack, damping: float, cutoff: float) -> None:
        noise = (sum(stack.ranks) * torch.finfo(stack.dtype).eps) ** 2
        bound = stack.largest_possible
        least = damping / bound if bound else 1.0
        values, self.vectors = stack.spectrum(least if damping else stack.cut(max(cutoff, noise)))
        self.inverse, self.effective_rank, self.condition_number = filtered_inverse(values, damping, cutoff, noise)

    def __call__(self, v: Tensor) -> Tensor:
        """$F v$ (R)."""
        return self.vectors @ (self.inverse * (self.vectors.T @ v))
