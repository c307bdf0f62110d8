r"""FIPA in a basis that all clients share.

With $S = \sum_m w_m S_m$, $S_m = Q^\top H_m Q$ and the clients' gradients $g = \sum_m w_m g_m$ the step is
$d = -Q (S + \beta I)^{-1} Q^\top g$: the paper's rule, with each $H_m$ seen through Q, for clients that take one
Gauss-Newton step. Clients that train send their update and $Q^\top H_m \Delta\theta_m$ instead, and the step is that of
the completed rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative
from fipa.curvature.basis import BasisCurvature, BasisPlan
from fipa.curvature.summary import CurvatureSummary
from fipa.errors import FipaError, UpdateError
from fipa.linalg import eigh
from fipa.parallel import inside, spanned

PARTS = 4  # that gradients are told in where all clients take part


@dataclass(frozen=True)
class ClientMemory:
    """How a server remembers clients.

    Parameters
    ----------
    discount
        A client's weight is multiplied by this for each round since it was seen.
    forget
        Clients that were not seen for this many rounds have left for good; None waits for ever.
    limit
        Most clients that are remembered one by one; beyond that, those seen longest ago are merged into one.
    precision
        Precision of what is kept: `"full"` is that of the parameters, `"bfloat16"` takes half of float32.
    """

    discount: float = 1.0
    forget: int | None = None
    limit: int | None = None
    precision: Literal["full", "bfloat16"] = "full"

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise FipaError(f"ClientMemory(discount={self.discount}): must be above 0 and at most 1")
        if any(value is not None and value < 1 for value in (self.forget, self.limit)):
            raise FipaError("ClientMemory: forget and limit must be at least 1, or None")
        if self.precision not in ("full", "bfloat16"):
            raise FipaError(f'ClientMemory(precision={self.precision!r}): use "full" or "bfloat16"')


@dataclass(frozen=True)
class SharedFIPA:
    r"""The least of $g^\top d + \frac12 d^\top (Q S Q^\top + \beta I) d$ over d in the span of Q, $|d| \le$ `radius`.

    Clients with `fipa.FullGradient()` send $\Delta\theta_m = -g_m$. Of clients that train, with a `moment` in their
    curvature, the minimum of $\sum_m w_m (d - \Delta\theta_m)^\top (Q S_m Q^\top + \beta I) (d - \Delta\theta_m)$ is
    taken, whose last term also moves what lies outside of the basis.

    Parameters
    ----------
    damping
        $\beta$. None is 0 if all clients take part. If only some do, most of what is known is some rounds old, and None
        is the usual curvature $(\frac1k \sum_i \sqrt{\lambda_i})^2$ of the $\lambda_i$ of S: flat directions, where
        news is mostly noise, take short steps.
    radius
        Longest step; None for any length.
    columns
        Most columns of the basis.
    directions
        Most new columns in a round; None takes what all clients of the round add.
    parts
        Number of parts that each client's gradient travels in, each from a share of its examples, with 8 bits per
        entry; each is a direction for the basis. 0 sends the gradient whole, with all of its digits. None is 4 if all
        clients take part, or fewer if the basis has no room for them, and 1 if only some do, because these directions
        have to be sent to all who come later. For parameters in double precision, where every digit counts, it is 0.
    bits
        Bits per number of a client's matrix on its way to the server: 8, or 32 for all of its digits. None is 8 for
        parameters in single precision, and 32 for those in double.
    column_bits
        Bits per entry of new columns on their way to the clients: 4, or 2 with a step for each 32 entries, which takes
        a little more than half of that. What is lost by rounding is not in the span of the basis.
    weight_decay
        Coefficient of $\frac12 |\theta|^2$, which the server adds to loss, gradient and curvature.
    memory
        How the server remembers clients.

    Notes
    -----
    All but `damping` and `radius` are for the rounds of a federation. `fipa.aggregate` has one round, and the basis in
    which clients' curvatures are.
    """

    damping: float | None = None
    radius: float | None = None
    columns: int = 200
    directions: int | None = None
    parts: int | None = None
    bits: Literal[8, 32] | None = None
    column_bits: Literal[2, 4] = 4
    weight_decay: float = 0.0
    memory: ClientMemory = ClientMemory()

    needs = BasisPlan
    for_rounds = ("columns", "directions", "parts", "bits", "column_bits", "weight_decay", "memory")

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping or 0.0, weight_decay=self.weight_decay)
        if self.radius is not None and not self.radius > 0:
            raise FipaError(f"SharedFIPA(radius={self.radius}): must be positive, or None")
        if self.columns < 1 or (self.directions is not None and self.directions < 1):
            raise FipaError("SharedFIPA: columns and directions must be at least 1")
        if self.parts is not None and self.parts < 0:
            raise FipaError(f"SharedFIPA(parts={self.parts}): must be at least 1, or 0 for gradients with all digits")
        if self.bits not in (8, 32, None):
            raise FipaError(f"SharedFIPA(bits={self.bits}): must be 8 or 32")
        if self.column_bits not in (2, 4):
            raise FipaError(f"SharedFIPA(column_bits={self.column_bits}): must be 2 or 4")

    def settled(self, dtype: torch.dtype, clients: int | None) -> SharedFIPA:
        """The same with all that was left open, for parameters of that kind.

        `clients` is how many take part, if these are all that there are, and None otherwise.
        """
        double = dtype == torch.float64
        usual = 1 if clients is None else max(1, min(PARTS, self.columns // clients))
        parts = (0 if double else usual) if self.parts is None else self.parts
        return replace(self, parts=parts, bits=self.bits or (32 if double else 8))

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        summaries = cohort.require(BasisCurvature, "SharedFIPA")
        trained = {len(one.moment) > 0 for one in summaries}
        if len(trained) > 1:
            raise UpdateError("some clients sent an update with its moment, others a gradient: ask all of them alike")
        basis = summaries[0].basis
        for client, one in zip(cohort.clients, summaries, strict=True):
            if one.basis is not basis and not torch.equal(one.basis, basis):
                raise UpdateError(f"{client} sent a curvature in another basis: send all clients of a round the same")
        values, vectors = cohort.remember(_spectrum)
        mean, damping = cohort.mean_delta, self.damping or 0.0
        within = inside(basis, mean)
        if trained == {True}:
            moment = sum(w * one.moment.double() for w, one in zip(cohort.weights, summaries, strict=True))
            pulled = moment + damping * within.double()
        else:
            pulled = within.double()
        solved, shift = _within(values, vectors.T @ pulled, damping, self.radius)
        d = spanned(basis, (vectors @ solved).to(basis))
        if trained == {True}:
            d = d + (mean - spanned(basis, within))
        kept = values.clamp(min=0)
        effective = float((kept / (kept + shift)).sum()) if shift else float((kept > 0).sum())
        condition = float((kept[0] + shift) / (kept[-1] + shift)) if len(kept) and kept[-1] + shift > 0 else math.inf
        projections = [w * float(delta @ d) for w, delta in zip(cohort.weights, cohort.deltas, strict=True)]
        return Step(d, effective, condition, projections)


def usual_curvature(summary: CurvatureSummary | None) -> float:
    r"""$(\frac1k \sum_i \sqrt{\lambda_i})^2$: few steep directions count for less than in the mean of all."""
    assert isinstance(summary, BasisCurvature)
    values, _ = eigh(summary.matrix.double())
    return float(values.clamp(min=0).sqrt().mean().square()) if len(values) else 0.0


def _spectrum(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Eigenpairs of the mean curvature, in double precision, the largest eigenvalue first."""
    summaries = cohort.require(BasisCurvature, "SharedFIPA")
    total = sum(w * one.matrix.double() for w, one in zip(cohort.weights, summaries, strict=True))
    assert isinstance(total, Tensor)
    values, vectors = eigh((total + total.T) / 2)
    return values.flip(0), vectors.flip(1)


def _within(values: Tensor, projected: Tensor, damping: float, radius: float | None) -> tuple[Tensor, float]:
    r"""$(\Lambda + \mu I)^{-1}$ times a vector, with the least $\mu \ge$ `damping` that keeps it within the radius."""
    least = torch.finfo(torch.float32).eps * float(values[:1].clamp(min=0).sum())  # rounding is no curvature
    kept = values.clamp(min=0)

    def solved(shift: float) -> Tensor:
        return projected / (kept + shift)

    low = max(damping, least, torch.finfo(torch.float64).tiny)
    if radius is None or float(solved(low).norm()) <= radius:
        return solved(low), low
    high = low + float(projected.norm()) / radius  # here the step is short enough in any case
    for _ in range(200):
        middle = math.sqrt(low * high)
        if float(solved(middle).norm()) > radius:
            low = middle
        else:
            high = middle
        if high <= low * (1 + 1e-12):
            break
    return solved(high), high
