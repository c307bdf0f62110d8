"""How many eigenpairs to keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.errors import SketchError


@dataclass(frozen=True)
class RelativeThreshold:
    r"""Keep the eigenvalues of at least `share` of the largest, $\lambda_i \ge t \lambda_1$; at most `max_rank`."""

    share: float
    max_rank: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SketchError(f"RelativeThreshold takes a share in [0, 1], got {self.share}")

    def count(self, eigenvalues: Tensor, trace: float) -> int:
        """Number of leading eigenvalues to keep."""
        return max(1, int((eigenvalues >= self.share * eigenvalues[0]).sum()))


@dataclass(frozen=True)
class TraceShare:
    r"""Keep as few as hold `share` of the trace, $\sum_{i \le r} \lambda_i \ge s \mathrm{Tr} H$; at most `max_rank`."""

    share: float
    max_rank: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SketchError(f"TraceShare takes a share in (0, 1], got {self.share}")

    def count(self, eigenvalues: Tensor, trace: float) -> int:
        """Number of leading eigenvalues to keep."""
        captured = torch.cumsum(eigenvalues.double(), dim=0)
        return min(len(eigenvalues), int((captured < self.share * trace * (1 - 1e-12)).sum()) + 1)


Rank = int | RelativeThreshold | TraceShare | None
