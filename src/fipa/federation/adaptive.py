"""Rank and local steps that clients choose by their gradients, round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fipa.curvature.rank import RelativeThreshold
from fipa.errors import FipaError


@dataclass(frozen=True)
class AdaptiveRank:
    r"""Paper's adaptive rank: keep $\lambda_i \ge t_m \lambda_1$, $t_m = C / (k (|g_m| + |g|))$ within [0, 0.99].

    $g_m$ is the client's gradient at the broadcast model, $g = \sum_m g_m$, k the round. Gradients are those of the
    loss, a mean over the examples; with `sums` they are summed over the examples, as in the published code.

    Parameters
    ----------
    constant
        C: the larger, the fewer eigenpairs are kept.
    max_rank
        Most eigenpairs that are kept; None sets no limit.
    sums
        Take gradients as sums over the examples, as in the published code.
    """

    constant: float = 1.0
    max_rank: int | None = None
    sums: bool = False

    def __post_init__(self) -> None:
        if not self.constant > 0 or (self.max_rank is not None and self.max_rank < 1):
            raise FipaError("adaptive rank: constant must be positive, max_rank at least 1")

    def choose(
        self, round_number: int, own: float, total: float, examples: int = 1
    ) -> tuple[RelativeThreshold, str | None]:
        """The threshold, and what had to be clamped."""
        size = round_number * (own + total) * (examples if self.sums else 1)
        raw = self.constant / size if size > 0 else math.inf
        share = min(raw, 0.99)
        note = f"rank threshold {raw:.3g} clamped to 0.99" if share != raw else None
        return RelativeThreshold(share, self.max_rank), note


@dataclass(frozen=True)
class AdaptiveSteps:
    r"""Paper's adaptive local steps: $\tau_m = \lceil \log(C / (k |g_m|)) / \log(1 - \eta \lambda_{min}) \rceil$.

    Clamped to [1, `most`]; $\lambda_{min}$ is the smallest eigenvalue that the sketch keeps, $\eta$ the learning rate.
    With `sums`, gradient and eigenvalue are sums over the examples instead of means, as in the published code.

    Parameters
    ----------
    constant
        C: the smaller, the more steps.
    most
        Most local steps.
    sums
        Take gradients and eigenvalues as sums over the examples, as in the published code.
    """

    constant: float = 0.1
    most: int = 200
    sums: bool = False

    def __post_init__(self) -> None:
        if not self.constant > 0 or self.most < 1:
            raise FipaError("adaptive steps: constant must be positive, most at least 1")

    def choose(
        self, round_number: int, own: float, lr: float, smallest: float, examples: int = 1
    ) -> tuple[int, str | None]:
        """The number of steps, and what had to be clamped."""
        own, smallest = (value * (examples if self.sums else 1) for value in (own, smallest))
        wanted, shrink = self.constant / (round_number * own) if own > 0 else math.inf, 1 - lr * smallest
        if wanted >= 1:
            return 1, f"gradient norm {own:.3g} already within {self.constant:g} / k: 1 local step"
        if shrink <= 0:
            return 1, f"lr x smallest kept eigenvalue = {lr * smallest:.3g} is not below 1: 1 local step"
        steps = math.log(wanted) / math.log(shrink) if shrink < 1 else math.inf
        if steps > self.most:
            return self.most, f"local steps {steps:.3g} clamped to {self.most}"
        return max(1, math.ceil(steps)), None
