"""The conversation of a round: what the server asks, and what clients answer. Nothing here knows how they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.clients.rule import LocalRule
from fipa.coding import Coded
from fipa.curvature.basis import packed_length
from fipa.curvature.summary import CurvaturePlan as Plan
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.basis import Basis, Move

MODELS = 3  # that a client keeps of those that it was asked about last
POOL = -1  # in the place of a client: all clients of a round together, where nobody sees one of them


@dataclass(frozen=True, eq=False)
class Who:
    """Who is there? Answered with the clients' numbers of examples, or 1 where nobody knows them."""


@dataclass(frozen=True, eq=False)
class Order:
    """Train from the broadcast model, and tell of the curvature there. Answered with a `Reply`.

    Parameters
    ----------
    round_number, theta
        Which round this is, and the model.
    local
        How to train; None leaves that to the client.
    lr_scale
        Factor for the learning rate.
    plan
        What to tell about the curvature; None for nothing.
    floor
        Curvature that the server's rule adds to each client's in all directions: Gauss-Newton clients add the same.
    adaptive_rank, adaptive_steps, gradient_norm
        Let clients choose rank and local steps, for which they need the norm of the sum of their gradients.
    shared
        What the server's part of the local rule sends to all clients (SCAFFOLD's variate).
    memories
        What each client is to remember of its last round; whoever carries the order decides what this looks like.
    buffers
        Averaged tensors that are no parameters, by name (BatchNorm's statistics).
    parts
        In how many parts, each in 8 bits per entry, clients tell their gradient; 0 for their update as it is.
    signs
        Under masks: how many sums of gradients with random signs there are besides the one without.
    """

    method: ClassVar[str] = "work"  # of `Site`, that answers

    round_number: int
    theta: Tensor
    local: LocalRule | None = None
    lr_scale: float = 1.0
    plan: Plan | None = None
    floor: float = 0.0
    adaptive_rank: AdaptiveRank | None = None
    adaptive_steps: AdaptiveSteps | None = None
    gradient_norm: float | None = None
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    memories: Mapping[int, Any] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    parts: int = 0
    signs: int = 0


@dataclass(frozen=True, eq=False)
class Gradient:
    """The full gradient at a model. Answered with a tensor (p)."""

    method: ClassVar[str] = "gradients"
    theta: Tensor

    def about(self) -> tuple[Any, ...]:
        """What the site's method takes besides clients and round."""
        return (self.theta,)


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss at a model, infinite where it is no number. Answered with a number.

    Parameters
    ----------
    theta, buffers
        The model: its parameters, and the averaged tensors that are none.
    """

    method: ClassVar[str] = "losses"
    theta: Tensor
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def about(self) -> tuple[Any, ...]:
        """What the site's method takes besides clients and round."""
        return (self.theta,)


@dataclass(frozen=True, eq=False)
class VariedLoss(Loss):
    """The loss at a model, on examples as they are varied in this round. Answered with a number."""

    method: ClassVar[str] = "varied_losses"


@dataclass(frozen=True, eq=False)
class Bend:
    """How residuals bend along a step from a model, seen as a gradient. Answered with a tensor (p)."""

    method: ClassVar[str] = "bends"
    theta: Tensor
    direction: Tensor

    def about(self) -> tuple[Any, ...]:
        """What the site's method takes besides clients and round."""
        return self.theta, self.direction


@dataclass(frozen=True, eq=False)
class Remainder(Bend):
    """What a step from a model leaves of the residuals, seen as a gradient at the model. Answered with a tensor (p)."""

    method: ClassVar[str] = "remainders"


@dataclass(frozen=True, eq=False)
class Curve:
    """The curvature at a model in the shared basis. Answered with bytes: see `BasisCurvature.packed`.

    Parameters
    ----------
    theta, basis, plan
        The model, the basis, and how to compute it.
    holds
        The version of the basis that clients have a copy of: they are sent what is new.
    deltas
        The updates of clients that train.
    bits
        Per number of a matrix on its way.
    """

    method: ClassVar[str] = "curvatures"
    theta: Tensor
    basis: Basis
    plan: Plan
    holds: Mapping[int, int] = field(default_factory=dict)
    deltas: Mapping[int, Tensor] = field(default_factory=dict)
    bits: int = 8

    def about(self) -> tuple[Any, ...]:
        """What the site's method takes besides clients and round."""
        return self.theta, self.basis.columns, self.plan, self.deltas, self.bits

    def news(self, client: int) -> tuple[Move, ...]:
        """What a client lacks of the basis."""
        return self.basis.news(self.holds.get(client))

    @property
    def length(self) -> int:
        """How many bytes an answer has."""
        return packed_length(len(self.basis), self.bits, self.theta.dtype, bool(self.deltas))


Question = Who | Order | Gradient | Loss | Bend | Curve


@dataclass(frozen=True, eq=False)
class Ask:
    """A question to some clients, which concerns a round.

    Parameters
    ----------
    keep
        Whether clients are to keep the model that it is about, since more questions about it may come.
    held
        Clients that have kept it: to them it need not travel.
    """

    round_number: int
    clients: tuple[int, ...]
    question: Question
    keep: bool = False
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's answer to an order.

    Attributes
    ----------
    update
        The client's update, with the curvature that was asked for.
    loss
        The client's loss at the broadcast model; None if it does not tell.
    local_steps, notes
        How long it trained, and what it had to change of its orders.
    message
        What it tells the server's part of the local rule.
    memory
        What it is to be given back with its next order.
    buffers, metrics
        Tensors that are averaged, and numbers for the log.
    coded
        The parts that the update is the sum of, where these travel in its place.
    directions
        More directions for a shared basis: sums of gradients with random signs.
    """

    update: ClientUpdate
    loss: float | None = None
    local_steps: int = 0
    notes: tuple[str, ...] = ()
    message: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Any = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    coded: tuple[Coded, ...] = ()
    directions: tuple[Tensor, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> Reply:
        """The same reply of changed tensors, in its update and its message."""
        message = {name: change(tensor) for name, tensor in self.message.items()}
        return replace(self, update=self.update.map(change), message=message)

    @property
    def nbytes(self) -> int:
        """Uplink: update, curvature, loss (8 bytes) and the local rule's message. Memories stay with the client."""
        curvature = self.update.sketch.sent_bytes if self.update.sketch is not None else 0
        update = () if self.coded else (self.update.delta,)
        tensors = [t for t in (*update, *self.message.values()) if isinstance(t, Tensor)]
        parts = sum(part.nbytes for part in self.coded)
        return 8 + curvature + parts + sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True, eq=False)
class Late:
    """An answer to an order of round `sent` that arrives in round `arrives`."""

    update: ClientUpdate
    sent: int
    arrives: int


@dataclass(frozen=True, eq=False)
class Answers:
    """What became of a question.

    Attributes
    ----------
    values
        The answers in time, by client: each is what the question says.
    late
        Answers that have arrived after their round, or will.
    missing, refused
        Who did not answer, and who gave an answer that cannot be used, with the reason.
    enough
        Whether there are as many as the transport's quorum wants.
    uplink, downlink, messages
        Bytes and messages that it took.
    seconds
        The time that the clients took.
    pooled
        Whose answers are in the one of `POOL`, where the transport gives nothing but their sum.
    kept
        Whether those who answered have kept the model, if they were to.
    """

    values: Mapping[int, Any]
    late: tuple[Late, ...] = ()
    missing: Mapping[int, str] = field(default_factory=dict)
    refused: Mapping[int | str, str] = field(default_factory=dict)
    enough: bool = True
    uplink: int = 0
    downlink: int = 0
    messages: int = 0
    seconds: float = 0.0
    pooled: tuple[int, ...] = ()
    kept: bool = True


class Transport(Protocol):
    """Carries questions to clients, and answers back. Knows nothing of rules."""

    def ask(self, ask: Ask) -> Callable[[], Answers]:
        """Send a question; the function that comes back waits for the answers."""
        ...
