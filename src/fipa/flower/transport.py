"""The transport over Flower: questions as messages to SuperNodes, with a deadline, a quorum and checked answers."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.exact import mark_of
from fipa.federation.messages import Answers, Ask, Curve, Loss, Order, Who
from fipa.flower.answer import Expected, Limits
from fipa.flower.codec import Precision, nbytes, pack
from fipa.flower.inbox import Inbox, Post
from fipa.flower.names import HALF, Names, agreed
from fipa.flower.request import FIPA_ACTION, FRAME, JUDGE, KEY, Asked, Request, curve_of, settings_of, tensors_of
from fipa.flower.roster import PAUSE, Roster, collect, few, post
from fipa.flower.watch import RATES, SCALE
from fipa.layout import Layout
from fipa.spill import MEMORY_LIMIT, Shelf

AGAIN = 10  # times that a question is asked anew of a node that died with it
UNLIKE = "is of a model with other parameters than most clients have"
Validate = Callable[[ArrayRecord], float]


@dataclass(frozen=True)
class Patience:
    """How long the server waits for clients.

    Parameters
    ----------
    deadline
        Seconds after which a question is closed if the quorum has answered; None waits for all, up to `timeout`.
    quorum
        Share of those asked whose answers are enough. Without them, nodes that died are waited for, and asked anew.
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
    tied
        Other names of trained parameters.
    dtypes
        Types of the arrays, if they are not those of the computation.
    """

    layout: Layout
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    frame: Mapping[str, Tensor] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor], names: Names) -> tuple[Cargo, Tensor]:
        """Arrays of a model, sorted by these names; and the trained ones, flat, in float32 at least."""
        trained = {name: wide(arrays[name]) for name in names.trained}
        buffers = {name: wide(arrays[name]) for name in names.averaged}
        apart = {*trained, *buffers, *names.tied}
        layout = Layout.of(trained)
        frame = {name: tensor for name, tensor in arrays.items() if name not in apart}
        theta = layout.flatten(trained)
        dtypes = {name: t.dtype for name, t in arrays.items() if name in apart and t.dtype != theta.dtype}
        return cls(layout, buffers, frame, dict(names.tied), dtypes), theta

    def arrays(self, theta: Tensor, buffers: Mapping[str, Tensor], names: Sequence[str]) -> ArrayRecord:
        """The whole model, in the order of these names."""
        parts = {**self.frame, **self.buffers, **buffers, **self.layout.unflatten(theta)}
        parts |= {name: parts[own] for name, own in self.tied.items()}
        return ArrayRecord({name: parts[name].to(self.dtypes.get(name, parts[name].dtype)).clone() for name in names})

    @property
    def checksum(self) -> str:
        """The checksum of the frame; an empty string if there is nothing in it."""
        return checksum(self.frame)


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of half precision lose what clients learn."""
    return tensor.float() if tensor.dtype in HALF else tensor


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of tensors by name, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in pack(dict(sorted(tensors.items()))).items():
        digest.update(f"{name}{array.dtype}{tuple(array.shape)}".encode() + array.data)
    return digest.hexdigest() if tensors else ""


class OtherNames(Exception):  # noqa: N818
    """Clients' models are not what the server takes them for."""

    def __init__(self, names: Names) -> None:
        super().__init__(f"clients train {', '.join(names.trained)}")
        self.names = names


class FlowerTransport:
    """Carries a coordinator's questions over a grid.

    Parameters
    ----------
    names
        The names of all arrays of the model, in their order.
    config, evaluate_config
        What the app's own train and evaluate functions are given.
    validate
        Tells the loss of a model in the clients' place.
    loss_name
        What the app's own evaluate function calls the loss that it returns.
    strict
        Whether clients must scale their learning rate.
    settled
        Whether clients have told which arrays are trained and averaged.
    memory_limit
        Bytes of answers to one question that are held in memory; those beyond are in temporary files.
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
        evaluate_config: Mapping[str, Any] | None = None,
        validate: Validate | None = None,
        loss_name: str | None = None,
        strict: bool = False,
        settled: bool = False,
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        self.grid, self.cargo, self.names, self.patience = grid, cargo, tuple(names), patience
        self.roster, self.inbox = roster or Roster(), Inbox()
        self.seed, self._precision, self._limits = seed, precision, limits or Limits()
        self.config, self._evaluate_config = dict(config or {}), dict(evaluate_config or {})
        self._validate, self._loss_name, self._strict = validate, loss_name, strict
        self.settled, self._apps_judge, self._memory_limit = settled, False, memory_limit
        self.held_out = False  # whether apps with an evaluate function judge by that, where all clients take part
        self._nodes: dict[int, int] = {}  # by client
        self._frame = cargo.checksum
        self._framed: set[int] = set()  # nodes that have been sent the frame

    def ask(self, ask: Ask) -> Callable[[], Answers]:
        """Send a question; the function that comes back waits for the answers."""
        if isinstance(ask.question, Who):
            self._nodes = self.roster.present(self.grid, self.patience.least)
            return lambda: Answers(dict.fromkeys(self._nodes, 1))
        if isinstance(ask.question, Loss) and self._validate is not None:
            loss = self._validated(ask.question)
            return lambda: Answers(dict.fromkeys(ask.clients, loss))
        if isinstance(ask.question, Order):
            everybody = self.held_out and len(ask.clients) == len(self._nodes)
            held_out = everybody and self.roster.all_have(JUDGE, self._nodes.values())
            self._apps_judge = ask.question.local is None or held_out
        ids, downlink = self._send_all(ask, ask.clients)
        others = isinstance(ask.question, Order) and (self._validate is not None or self._apps_judge)
        return lambda: _unjudged(self._answers(ask, ids, downlink)) if others else self._answers(ask, ids, downlink)

    def _validated(self, question: Loss) -> float:
        assert self._validate is not None
        loss: Any = self._validate(self.cargo.arrays(question.theta, question.buffers, self.names))
        if isinstance(loss, bool) or not isinstance(loss, int | float):
            raise FipaError(f"validate(arrays) must return the loss as a number, got {loss!r}")
        return float(loss) if math.isfinite(loss) else math.inf

    def _answers(self, ask: Ask, ids: Sequence[str], downlink: int) -> Answers:
        question: Any = ask.question
        begun, shelf = time.perf_counter(), Shelf(self._memory_limit)
        post = self._collect(ask, ids, shelf)
        sent, times = len(ids), 0
        while clients := post.lacking if times == 0 and post.lacking else self._back(ask, post, begun, times):
            ids, more = self._send_all(ask, sorted(clients), framed=True)
            post = _joined(post, self._collect(ask, ids, shelf))
            sent, times, downlink = sent + len(ids), times + 1, downlink + more
        if len(post.names) > len(post.values):
            raise OtherNames(agreed(post.names))
        post.refused |= dict.fromkeys(post.names, UNLIKE)
        self.inbox.forget(ask.round_number)
        for client in ask.clients:
            self.roster.heard(self._nodes[client], client in post.values)
        known = {client: reason for client, reason in post.refused.items() if isinstance(client, int)}
        missing = [client for client in ask.clients if client not in post.values and client not in known]
        silent = {
            client: f"node {self._nodes[client]} did not answer in time ({question.method})" for client in missing
        }
        return Answers(
            post.values, tuple(post.late), silent, post.refused,
            self.patience.enough(len(post.values), len(ask.clients)), post.uplink, downlink, sent + post.received,
            time.perf_counter() - begun, kept=self._travels_flat(question),
        )  # fmt: skip

    def _back(self, ask: Ask, post: Post, begun: float, times: int) -> list[int]:
        """Clients whose nodes died with the question, and are back, as long as there is no quorum without them."""
        while (
            post.gone
            and not self.patience.enough(len(post.values), len(ask.clients))
            and times < AGAIN
            and time.perf_counter() - begun < self.patience.timeout
        ):
            present = self.roster.present(self.grid, self.patience.least)
            back = [client for client in post.gone if client in present]
            self._nodes |= {client: present[client] for client in back}
            if back:
                return back
            time.sleep(PAUSE)
        return []

    def _collect(self, ask: Ask, ids: Sequence[str], shelf: Shelf) -> Post:
        """Replies to these messages; with an order also late ones to earlier orders."""
        question: Any = ask.question
        waiting = self.inbox.orders if isinstance(question, Order) else []
        replies = collect(self.grid, ids, self.patience, [name for name in waiting if name not in ids])
        shapes = {name: tuple(tensor.shape) for name, tensor in self.cargo.buffers.items()}
        expected = Expected(self.cargo.layout, question.theta, shapes, self._limits, self._loss_name)
        arrays = self.arrays(question.theta)
        return self.inbox.open(replies, self._method(question), ask.round_number, expected, arrays, shelf)

    def arrays(self, theta: Tensor) -> dict[str, Tensor]:
        """All arrays of a model, by every name that a client may use."""
        arrays = {**self.cargo.frame, **self.cargo.buffers, **self.cargo.layout.unflatten(theta)}
        return arrays | {name: arrays[own] for name, own in self.cargo.tied.items()}

    def _travels_flat(self, question: Asked) -> bool:
        """Whether a question is for an objective, and not for an app, which takes a whole model."""
        return self._method(question) != JUDGE and not (isinstance(question, Order) and question.local is None)

    def _method(self, question: Asked) -> str:
        return JUDGE if isinstance(question, Loss) and self._apps_judge else question.method

    def node(self, client: int) -> int:
        """The node that holds a client's partition."""
        return self._nodes[client]

    @staticmethod
    def size(message: Message) -> int:
        """Bytes of all arrays in it."""
        return nbytes(*message.content.array_records.values())

    def _send_all(self, ask: Ask, clients: Sequence[int], framed: bool = False) -> tuple[list[str], int]:
        """Send a question to clients, a few at a time; the messages' ids and bytes come back."""
        ids, total = list[str](), 0
        for some in few(clients):
            messages = {client: self.message(ask, client, framed) for client in some}
            ids += self.send(messages)
            total += sum(self.size(message) for _, message in messages.values())
        return ids, total

    def send(self, messages: Mapping[int, tuple[Request, Message]]) -> list[str]:
        """Send messages, and remember what they ask; their ids come back."""
        ids = post(self.grid, [message for _, message in messages.values()])
        for name, (request, _) in zip(ids, messages.values(), strict=True):
            self.inbox.sent(name, request)
        return ids

    def message(self, ask: Ask, client: int, framed: bool = False) -> tuple[Request, Message]:
        """A question to one client, as it travels; `framed` with all that the client may lack."""
        question: Any = ask.question
        request = self._request(ask, client, question, framed)
        config = scaled(self.config, request.lr_scale) | {"server-round": ask.round_number}
        records: dict[str, Any] = {KEY: request.record(), "config": ConfigRecord(config)}
        node = self._nodes[client]
        if self._travels_flat(question):
            kind = f"{MessageType.TRAIN if isinstance(question, Order) else MessageType.QUERY}.{FIPA_ACTION}"
            records |= tensors_of(question, client, framed, client in ask.held)
            if self._frame and (framed or node not in self._framed):
                records[FRAME] = pack(dict(self.cargo.frame))
                self._framed.add(node)
        elif isinstance(question, Order):
            kind, records["arrays"] = MessageType.TRAIN, self.cargo.arrays(question.theta, question.buffers, self.names)
        else:
            kind = MessageType.EVALUATE
            records["arrays"] = self.cargo.arrays(question.theta, question.buffers, self.names)
            records["config"] = ConfigRecord(self._evaluate_config | {"server-round": ask.round_number})
        return request, Message(RecordDict(records), dst_node_id=node, message_type=kind)

    def _request(self, ask: Ask, client: int, question: Asked, whole: bool) -> Request:
        order = question if isinstance(question, Order) else None
        curve = curve_of(question, client, whole) if isinstance(question, Curve) else {}
        return Request(
            self._method(question), ask.round_number, client, self.seed, self.cargo.layout.names, self._precision,
            tuple(self.cargo.buffers), self._frame, None if order is None else order.memories.get(client),
            {} if order is None else settings_of(order), curve, mark_of(question.theta) if ask.keep else "",
            self.settled, self._strict,
        )  # fmt: skip


def scaled(config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A train config with its learning rate times a factor, or beside the factor if it has none."""
    rate = next((name for name in RATES if isinstance(config.get(name), float)), None)
    if rate is None:
        return {**config, SCALE: factor}
    return {**config, rate: config[rate] * factor, SCALE: 1.0}


def _unjudged(answers: Answers) -> Answers:
    """Without clients' losses on what they train on: where others judge, theirs is the loss that counts."""
    return replace(answers, values={client: replace(reply, loss=None) for client, reply in answers.values.items()})


def _joined(first: Post, second: Post) -> Post:
    values = dict(sorted({**first.values, **second.values}.items()))
    refused = {**first.refused, **second.refused}
    refused |= dict.fromkeys(second.lacking, "lacks arrays that it was sent")
    return Post(
        values, first.late + second.late, {client: why for client, why in refused.items() if client not in values}, [],
        [client for client in {*first.gone, *second.gone} if client not in values], {**first.names, **second.names},
        first.uplink + second.uplink, first.received + second.received,
    )  # fmt: skip
