"""L-BFGS on the server (Nocedal, 1980): curvature guessed from gradients alone, for clients that send theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative
from fipa.aggregation.server_optimizers import buffer
from fipa.errors import FipaError, LayoutError

BENT = 1e-4  # least cosine between s and y: that of a curvature of condition 4e8, where single precision ends
GRADIENT, CHANGE, STEPS, TURNS = "gradient", "change", "steps", "turns"  # names in the state


@dataclass(frozen=True)
class LBFGS:
    r"""$d = -\gamma \hat H^{-1} g$, $g = \sum_m w_m g_m$, with an inverse curvature from how g has changed so far.

    Clients with `fipa.FullGradient()` send $\Delta\theta_m = -g_m$. A pair is a change s of the model and the change y
    of g that it brought; the two-loop recursion makes $\hat H^{-1}$ of the last pairs and of
    $\frac{s^\top y}{y^\top y} I$ with the newest. It costs what FedAvg does, as no curvature is sent, and is the
    control for rules that are told one. Meant for step control, which shortens `step` as the clients' loss demands, and
    for rounds with all clients: else y also holds how the clients of two rounds differ.

    Pairs along which g does not grow, $s^\top y \le 10^{-4} |s| |y|$, are skipped: the loss is not convex there, or the
    rest is rounding. So $\hat H^{-1}$ is positive and d goes downhill.

    Parameters
    ----------
    memory
        Most pairs that are kept.
    step
        $\gamma$.
    first
        Length of d at step 1 as long as there is no pair: gradients alone tell no length.

    Examples
    --------
    >>> from fipa import ClientUpdate, aggregate
    >>> theta, state = torch.tensor([4.0]), None
    >>> for _ in range(2):  # the loss is 3/2 theta^2: two gradients tell it all
    ...     result = aggregate(theta, [ClientUpdate(-3 * theta, 10)], LBFGS(), state)
    ...     theta, state = result.theta, result.state
    >>> theta
    tensor([0.])
    """

    memory: int = 10
    step: float = 1.0
    first: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(self, step=self.step, first=self.first)
        if self.memory < 1 or self.first == 0:
            raise FipaError(f"LBFGS(memory={self.memory}, first={self.first}): at least one pair, and a length above 0")

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        downhill = cohort.mean_delta
        steps, turns = self._pairs(downhill, state)
        inverse = _Inverse.of(steps, turns) or _Inverse(steps, turns, self.first / (float(downhill.norm()) or 1.0))
        d = inverse(downhill.double())
        change = (self.step * d).to(downhill)
        back = inverse(d)  # client m's own part of d is w_m H^-1 D_m, and H is symmetric
        projections = [w * float(delta.double() @ back) for w, delta in zip(cohort.weights, cohort.deltas, strict=True)]
        after = {GRADIENT: -downhill, CHANGE: change, STEPS: steps, TURNS: turns}
        return Step(change, float(len(steps)), inverse.condition(), projections, after)

    def _pairs(self, downhill: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All s and all y (n x p), the oldest first, with the pair that this round's gradient makes."""
        steps, turns = (_rows(state, name, downhill) for name in (STEPS, TURNS))
        s = buffer(state, CHANGE, downhill, 0.0)
        y = -downhill - buffer(state, GRADIENT, downhill, 0.0)
        wide, other = s.double(), y.double()
        if float(wide @ other) > BENT * float(wide.norm() * other.norm()):
            steps, turns = torch.cat([steps, s[None]]), torch.cat([turns, y[None]])
        return steps[-self.memory :].clone(), turns[-self.memory :].clone()


@dataclass(frozen=True, eq=False)
class _Inverse:
    """An inverse curvature by the two-loop recursion, in double precision."""

    steps: Tensor
    turns: Tensor
    scale: float  # of the identity that the pairs correct

    @classmethod
    def of(cls, steps: Tensor, turns: Tensor) -> _Inverse | None:
        """With the newest pair's scale; None without one."""
        if len(steps) == 0:
            return None
        s, y = steps.double(), turns.double()
        return cls(s, y, float(s[-1] @ y[-1]) / float(y[-1] @ y[-1]))

    def __call__(self, v: Tensor) -> Tensor:
        """The product with a vector (p) or with columns (p x n)."""
        v = v.clone()
        curvatures = [float(s @ y) for s, y in zip(self.steps, self.turns, strict=True)]
        shares: list[Tensor] = []
        for s, y, c in reversed(list(zip(self.steps, self.turns, curvatures, strict=True))):
            shares.append((s @ v) / c)
            v -= _outer(y, shares[-1])
        v *= self.scale
        for s, y, c in zip(self.steps, self.turns, curvatures, strict=True):
            v += _outer(s, shares.pop() - (y @ v) / c)
        return v

    def condition(self) -> float:
        """Largest by smallest eigenvalue: beside the span of all pairs it is the identity times its scale."""
        if len(self.steps) == 0:
            return 1.0
        basis = torch.linalg.qr(torch.cat([self.steps, self.turns]).T).Q
        inside = basis.T @ self(basis)
        values = [self.scale, *torch.linalg.eigvalsh((inside + inside.T) / 2).tolist()]
        return max(values) / min(values) if min(values) > 0 else float("inf")


def _outer(column: Tensor, row: Tensor) -> Tensor:
    return column * row if row.dim() == 0 else torch.outer(column, row)


def _rows(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """What the state holds of this name (n x p), checked to be like the update; nothing at first."""
    found = state.get(name, like.new_zeros(0, len(like)))
    if found.dim() != 2:
        raise LayoutError(f"the server state {name!r} has {found.dim()} axes, expected 2: start with state=None")
    for row in found[:1]:
        buffer({name: row}, name, like, 0.0)
    return found
