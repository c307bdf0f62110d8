"""What every kind of curvature has in common: how clients compute it, how it travels, and when it makes no sense."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from typing_extensions import Self

from fipa.curvature.options import Options
from fipa.curvature.terms import LossName
from fipa.errors import SketchError
from fipa.layout import Layout
from fipa.linalg import aligned

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Arrived:
    """What a client sent, and what is known of it.

    Parameters
    ----------
    tensors, about
        As `CurvatureSummary.sent` and `CurvatureSummary.about` gave them.
    plan, shared_seed
        What it was asked for, and the seed of what all clients of the round share.
    layout, num_examples, delta
        Its parameters, its weight and its update, which came along.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    plan: Any
    layout: Layout
    num_examples: int
    delta: Tensor
    shared_seed: int


class CurvatureSummary(ABC):
    """A frozen dataclass of tensors that sums up a client's curvature, and knows when it makes no sense.

    To bring a curvature of your own to a rule of your own, derive from this. `tensors` and `flaw` are all that
    `fipa.aggregate` needs; to send it over a network it also needs a `kind`, `expected`, and what of the rest is not as
    it is here. `examples/own_curvature.py` is a whole one.

    What a client sends is not to be trusted: `expected` and `restore` raise a `SketchError` for what cannot be, in
    words that go on after "its answer", as in "has eigenvectors that are not of length 1".
    """

    kind: ClassVar[str]  # its name in messages
    made_by: ClassVar[str]  # the function that users call for it
    is_sum: ClassVar[bool] = False  # whether the server needs nothing but the sum over the clients of one round
    roughest: ClassVar[str] = "int8"  # the lowest precision that its matrices survive: "float32", "bfloat16" or "int8"
    unlike: ClassVar[str] = "a curvature of another form"  # what a client has whose `form` is not that of the others
    layout: Layout

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by the name of their field."""

    @abstractmethod
    def flaw(self, parameters: int) -> str | None:
        """What is wrong with it for that many parameters, or None; the client's name goes before it."""

    def about(self) -> dict[str, Any]:
        """What travels besides tensors, as JSON knows it."""
        return {}

    def sent(self) -> dict[str, Tensor]:
        """The tensors that travel; the update does so anyway."""
        return self.tensors()

    @classmethod
    def expected(
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        """Names and shapes of the tensors that must arrive, given the plan and the shapes of those that did."""
        raise SketchError(f"has a {cls.__name__}, which cannot be received: define its classmethod expected(...)")

    @classmethod
    def restore(cls, arrived: Arrived) -> Self:
        """The summary from what arrived in the `expected` shapes."""
        known = {"layout": arrived.layout, "num_examples": arrived.num_examples}
        return cls(**arrived.tensors, **{f.name: known[f.name] for f in fields(cls) if f.name in known})  # type: ignore[arg-type]

    def sizes(self) -> dict[str, Tensor]:
        """By name, numbers that are NaN or infinite if one of the tensors is; the server sets a limit to them."""
        return {name: tensor.norm() for name, tensor in self.sent().items()}

    def form(self) -> object:
        """What the summaries of one round must have in common, hashable: those that differ from most are refused."""
        return None

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
        return nbytes_of(self.tensors())

    @property
    def sent_bytes(self) -> int:
        """Size of the tensors that travel."""
        return nbytes_of(self.sent())


class Source(Protocol):
    """Whose curvature it is: a `Client`, or any other data with a loss."""

    @property
    def tensors(self) -> Any:
        """The data, as `fipa.sketch` takes them."""

    @property
    def loss(self) -> LossName:
        """Name of the loss on these data."""

    @property
    def num_examples(self) -> int:
        """Number of examples, the client's weight."""


@dataclass(frozen=True, eq=False)
class Occasion:
    """What differs from client to client and from round to round when a curvature is computed.

    Parameters
    ----------
    seed
        Seed of this client's random numbers.
    shared_seed
        Seed of what all clients of the round share.
    delta
        The client's update, flat; None where there is none yet.
    basis
        The basis that all clients of the round share (p x k), for curvatures that are seen through one.
    """

    seed: int
    shared_seed: int = 0
    delta: Tensor | None = None
    basis: Tensor | None = None


class CurvaturePlan(ABC):
    """How clients compute a curvature: a frozen dataclass of settings, with a default for each.

    Settings are numbers, strings, None, lists of them, or a `RelativeThreshold` or `TraceShare`: they travel.
    """

    makes: ClassVar[type[CurvatureSummary]]

    @abstractmethod
    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> CurvatureSummary:
        """The client's curvature at the model's present parameters, of those that the layout names."""

    def at_most(self, rank: int | None) -> Self:
        """The same with at most that many eigenpairs, where there are any; None sets no limit."""
        return self


@dataclass(frozen=True, kw_only=True)
class SampledPlan(CurvaturePlan):
    """A plan of curvature that may be taken of some of the examples, and of some labels: see `Options`."""

    max_examples: int | None = None
    sampled_labels: int | None = None

    def for_loss(self, loss: LossName) -> Self:
        """The same without what a loss has no use for, where who made the plan did not know the loss."""
        labels = self.sampled_labels if loss == "cross_entropy" else None
        examples = None if loss == "least_squares" else self.max_examples
        return replace(self, sampled_labels=labels, max_examples=examples)

    def options(self, layout: Layout, occasion: Occasion) -> Options:
        """The options of one computation."""
        return {
            "params": layout.names,
            "max_examples": self.max_examples,
            "sampled_labels": self.sampled_labels,
            "seed": occasion.seed,
        }


def nbytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Size of all tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def wrong_shape(name: str, tensor: Tensor, expected: Shape) -> str | None:
    """A sentence about a tensor that is not as it should be, or None."""
    if tuple(tensor.shape) == expected:
        return None
    return f"sent {name} of shape {tuple(tensor.shape)}, expected {expected}: send them as they were computed"
