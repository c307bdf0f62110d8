"""The transport over Flower: questions as messages to SuperNodes, with a deadline, a quorum and checked answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.messages import Answers, Ask, Curve, Order, Who
from fipa.flower.answer import Expected, Limits
from fipa.flower.codec import Precision, nbytes, pack
from fipa.flower.inbox import Inbox, Post
from fipa.flower.request import FIPA_ACTION, FRAME, KEY, Asked, Request, curve_of, settings_of, tensors_of
from fipa.flower.roster import Roster, collect, post
from fipa.layout import Layout


@dataclass(frozen=True)
class Patience:
    """How long the server waits for clients.

    Parameters
    ----------
    deadline
        Seconds after which a question is closed if the quorum has answered; None waits for all, up to `timeout`.
    quorum
        Share of those asked whose answers are enough.
    grace
        Seconds that the others still have when a quorum is there after the deadline.
    timeout
        Seconds after which a question is closed in any case.
    least
        Clients that must be there before a round begins.
    """

    deadline: float | None = None
    quorum: float = 0.5
    grace: float = 5.0
    timeout: float = 3600.0
    least: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise FipaError(f"FIPA(quorum={self.quorum}): it must be above 0 and at most 1")
        for name in ("deadline", "grace", "timeout"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise FipaError(f"FIPA({name}={value}): seconds must not be negative")

    def enough(self, answered: int, asked: int) -> bool:
        """Whether so many answers are a quorum."""
        return answered >= max(1, math.ceil(self.quorum * asked))


@dataclass(frozen=True, eq=False)
class Cargo:
    """What a model is made of on its way.

    Parameters
    ----------
    layout
        Names and shapes of the trained parameters.
    buffers
        Averaged tensors, as they are at the start.
    frame
        All other arrays: they never change.
    """

    layout: Layout
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    frame: Mapping[str, Tensor] = field(default_factory=dict)

    def arrays(self, theta: Tensor, buffers: Mapping[str, Tensor], names: Sequence[str]) -> ArrayRecord:
        """The whole model, in the order of these names."""
        parts = {**self.frame, **self.buffers, **buffers, **self.layout.unflatten(theta)}
        return ArrayRecord({name: parts[name].clone() for name in names})

    @property
    def checksum(self) -> str:
        """The checksum of the frame; an empty string if there is nothing in it."""
        return checksum(self.frame)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of tensors by name, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in pack(dict(sorted(tensors.items()))).items():
        digest.update(f"{name}{array.dtype}{tuple(array.shape)}".encode() + array.data)
    return digest.hexdigest() if tensors else ""


class FlowerTransport:
    """Carries a coordinator's questions over a grid.

    Parameters
    ----------
    names
        The names of all arrays of the model, in their order.
    config
        What the app's own train functions are given.
    """

    def __init__(
        self,
        grid: Grid,
        cargo: Cargo,
        names: Sequence[str],
        *,
        seed: int,
        patience: Patience,
        precision: Precision = "float32",
        limits: Limits | None = None,
        config: Mapping[str, Any] | None = None,
        roster: Roster | None = None,
    ) -> None:
        self.grid, self.cargo, self.names, self.patience = grid, cargo, tuple(names), patience
        self.roster = roster or Roster()
        self.inbox = Inbox()
        self.seed, self._precision, self._limits = seed, precision, limits or Limits()
        self._config = dict(config or {})
        self._nodes: dict[int, int] = {}  # by client
        self._frame = cargo.checksum
        self._framed: set[int] = set()  # nodes that have been sent the frame

    def ask(self, ask: Ask) -> Callable[[], Answers]:
        """Send a question; the function that comes back waits for the answers."""
        if isinstance(ask.question, Who):
            self._nodes = self.roster.present(self.grid, self.patience.least)
            return lambda: Answers(dict.fromkeys(self._nodes, 1))
        messages = {client: self.message(ask, client) for client in ask.clients}
        ids = self.send(messages)
        return lambda: self._answers(ask, messages, ids)

    def _answers(self, ask: Ask, messages: Mapping[int, tuple[Request, Message]], ids: Sequence[str]) -> Answers:
        question: Any = ask.question
        post = self._collect(ask, ids)
        downlink = sum(self.size(message) for _, message in messages.values())
        if post.lacking:
            again = {client: self.message(ask, client, framed=True) for client in sorted(post.lacking)}
            more = self._collect(ask, self.send(again))
            post = _joined(post, more)
            downlink += sum(self.size(message) for _, message in again.values())
            messages = {**messages, **again}
        self.inbox.forget(ask.round_number)
        for client in ask.clients:
            self.roster.heard(self._nodes[client], client in post.values)
        known = {client: reason for client, reason in post.refused.items() if isinstance(client, int)}
        missing = [client for client in ask.clients if client not in post.values and client not in known]
        return Answers(
            post.values,
            tuple(post.late),
            dict.fromkeys(missing, f"did not answer in time ({question.method})"),
            post.refused,
            self.patience.enough(len(post.values), len(ask.clients)),
            post.uplink,
            downlink,
            len(messages) + post.received,
        )

    def _collect(self, ask: Ask, ids: Sequence[str]) -> Post:
        """Replies to these messages; with an order also late ones to earlier orders."""
        question: Any = ask.question
        waiting = self.inbox.orders if isinstance(question, Order) else []
        replies = collect(self.grid, ids, self.patience, [name for name in waiting if name not in ids])
        shapes = {name: tuple(tensor.shape) for name, tensor in self.cargo.buffers.items()}
        expected = Expected(self.cargo.layout, question.theta, shapes, self._limits)
        return self.inbox.open(replies, question.method, ask.round_number, expected)

    def node(self, client: int) -> int:
        """The node that holds a client's partition."""
        return self._nodes[client]

    @staticmethod
    def size(message: Message) -> int:
        """Bytes of all arrays in it."""
        return nbytes(*message.content.array_records.values())

    def send(self, messages: Mapping[int, tuple[Request, Message]]) -> list[str]:
        """Send messages, and remember what they ask; their ids come back."""
        ids = post(self.grid, [message for _, message in messages.values()])
        for name, (request, _) in zip(ids, messages.values(), strict=True):
            self.inbox.sent(name, request)
        return ids

    def message(self, ask: Ask, client: int, framed: bool = False) -> tuple[Request, Message]:
        """A question to one client, as it travels; `framed` with all that the client may lack."""
        question: Any = ask.question
        request = self._request(ask.round_number, client, question, framed)
        config = dict(self._config) | {"server-round": ask.round_number, "lr-scale": request.lr_scale}
        records: dict[str, Any] = {KEY: request.record(), "config": ConfigRecord(config)}
        node = self._nodes[client]
        if isinstance(question, Order) and question.local is None:  # the app trains, and takes a whole model
            kind, records["arrays"] = MessageType.TRAIN, self.cargo.arrays(question.theta, question.buffers, self.names)
        else:
            kind = f"{MessageType.TRAIN if isinstance(question, Order) else MessageType.QUERY}.{FIPA_ACTION}"
            records |= tensors_of(question, client, framed)
            if self._frame and (framed or node not in self._framed):
                records[FRAME] = pack(dict(self.cargo.frame))
                self._framed.add(node)
        return request, Message(RecordDict(records), dst_node_id=node, message_type=kind)

    def _request(self, k: int, client: int, question: Asked, whole: bool) -> Request:
        order = question if isinstance(question, Order) else None
        curve = curve_of(question, client, whole) if isinstance(question, Curve) else {}
        return Request(
            question.method, k, client, self.seed, self.cargo.layout.names, self._precision,
            tuple(self.cargo.buffers), self._frame, None if order is None else order.memories.get(client),
            {} if order is None else settings_of(order), curve,
        )  # fmt: skip


def _joined(first: Post, second: Post) -> Post:
    return Post(
        dict(sorted({**first.values, **second.values}.items())),
        first.late + second.late,
        {**first.refused, **second.refused, **dict.fromkeys(second.lacking, "lacks arrays that it was sent")},
        [],
        first.uplink + second.uplink,
        first.received + second.received,
    )
