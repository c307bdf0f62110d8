"""What every kind of curvature that a client may send has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from fipa.layout import Layout
from fipa.linalg import aligned


class CurvatureSummary(ABC):
    """A frozen dataclass of tensors that sums up a client's curvature, and knows when it makes no sense.

    To bring a curvature of your own to a rule of your own, derive from this.
    """

    made_by: ClassVar[str]  # the function that users call for it
    layout: Layout

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by the name of their field."""

    @abstractmethod
    def problem(self, parameters: int) -> str | None:
        """What is wrong with it for that many parameters, or None; the client's name goes before it."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert all tensors, as `torch.Tensor.to` does."""
        return self.map(lambda t: t.to(*args, **kwargs))

    def canonical(self) -> Self:
        """The same numbers in the one form of memory that rules work on, see `fipa.linalg.aligned`."""
        return self.map(aligned)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same summary of changed tensors. Override it where `tensors` are no fields of the dataclass."""
        return replace(self, **{name: change(t) for name, t in self.tensors().items()})  # type: ignore[type-var]

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


def wrong_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> str | None:
    """A sentence about a tensor that is not as it should be, or None."""
    if tuple(tensor.shape) == expected:
        return None
    return f"sent {name} of shape {tuple(tensor.shape)}, expected {expected}: send them as they were computed"
