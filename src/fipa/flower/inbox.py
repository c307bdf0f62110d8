"""Replies as they arrive: matched with what was asked, checked, refused with a reason, or taken."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.errors import FipaError
from fipa.flower.answer import Answer, Limits, decode
from fipa.flower.request import Request
from fipa.layout import Layout

OLDEST = 10  # rounds after which an answer is no longer waited for
KEPT = 10_000  # events
LONGEST = 300  # characters of a reason


@dataclass(frozen=True, eq=False)
class Expected:
    """What answers of a round must fit."""

    round_number: int
    since: int  # round in which this phase began: answers from before it are of no use
    layout: Layout
    theta: Tensor
    buffers: Mapping[str, tuple[int, ...]]


class Inbox:
    """Who was asked what, and what became of it.

    Attributes
    ----------
    events
        What happened, by round and client.
    refused
        How many replies were refused, by reason.
    """

    def __init__(self, limits: Limits, late: float | None) -> None:
        self.limits = limits
        self._late = late
        self._sent: dict[str, Request] = {}  # by message
        self._late_updates: dict[int, tuple[int, ClientUpdate]] = {}  # round and update by client, not used yet
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.refused = Counter[str]()

    def sent(self, message_id: str, request: Request) -> None:
        """Remember a question."""
        self._sent[message_id] = request

    def matched(self, k: int, replies: Iterable[Message]) -> Iterator[tuple[Request, RecordDict]]:
        """What was asked and what was answered, each question once; all else is refused."""
        for reply in replies:
            request = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                self.refuse(k, None, f"node {reply.metadata.src_node_id} answers what nobody asked, or twice")
            elif reply.has_error():
                self.refuse(k, request.client, f"failed: {reply.error.reason}")
            else:
                yield request, reply.content

    @contextmanager
    def reading(self, k: int, client: int) -> Iterator[None]:
        """Whatever a client sends must not stop the server: errors in this block refuse its answer."""
        try:
            yield
        except FipaError as error:
            self.refuse(k, client, str(error))
        except Exception as error:
            self.refuse(k, client, f"cannot be read: {type(error).__name__}: {error}")

    @property
    def waiting(self) -> list[str]:
        """Messages of earlier rounds whose replies are still of use."""
        return list(self._sent) if self._late is not None else []

    def open(self, replies: Iterable[Message], expected: Expected) -> tuple[list[Answer], list[ClientUpdate]]:
        """The answers of this round in the order of the clients, and late ones of earlier rounds, discounted."""
        k = expected.round_number
        fresh: dict[int, Answer] = {}
        late = {m: kept for m, kept in self._late_updates.items() if kept[0] >= expected.since}
        for request, content in self.matched(k, replies):
            answer, age = None, k - request.round_number
            with self.reading(k, request.client):
                answer = decode(content, request, expected.layout, expected.theta, expected.buffers, self.limits)
            if answer is None:
                continue
            if age == 0:
                fresh[request.client] = answer
            elif self._late is None or request.round_number < expected.since or _is_sum(request):
                self.event(k, request.client, f"late by {age} rounds: not used")
            elif request.client not in late or request.round_number > late[request.client][0]:
                late[request.client] = request.round_number, answer.update
        self._agree(k, fresh)
        self.forget(k)
        for client in sorted(late.keys() & fresh.keys()):
            self.event(k, client, f"late by {k - late[client][0]} rounds: a fresher answer is there, not used")
        self._late_updates = {client: late[client] for client in sorted(late.keys() - fresh.keys())}
        usable = [
            replace(update, weight=update.num_examples * (self._late or 1.0) ** (k - sent))
            for sent, update in self._late_updates.values()
        ]
        return [answer for _, answer in sorted(fresh.items())], usable

    def forget(self, k: int) -> None:
        """Give up questions of long ago."""
        self._sent = {name: sent for name, sent in self._sent.items() if sent.round_number > k - OLDEST}

    def _agree(self, k: int, fresh: dict[int, Answer]) -> None:
        """Curvatures must have one form: those who differ from most are refused, not the round."""
        summaries = {client: a.update.sketch for client, a in fresh.items() if a.update.sketch is not None}
        usual = Counter(summary.form() for summary in summaries.values()).most_common(1)
        for client, summary in summaries.items():
            if summary.form() != usual[0][0]:
                del fresh[client]
                self.refuse(k, client, f"has {summary.unlike} than most have")

    def used(self, k: int) -> None:
        """The late answers that `open` returned are in the model now; without this they wait for the next round."""
        for client, (sent, _) in self._late_updates.items():
            self.event(k, client, f"late by {k - sent} rounds: used with weight x {self._late or 1:g}^{k - sent}")
        self._late_updates = {}

    def refuse(self, k: int, client: int | None, reason: str) -> None:
        """Count and log a reply that is not used."""
        reason = reason if len(reason) <= LONGEST else reason[:LONGEST] + " ..."  # clients choose some of the words
        self.refused[reason] += 1
        self.event(k, client, f"refused: its answer {reason}" if client is not None else f"refused: {reason}", WARNING)

    def event(self, k: int, client: int | None, what: str, level: int = INFO) -> None:
        """Log something, and keep it."""
        self.events.append({"round": k, "client": client, "what": what})
        log(level, "round %d, %s: %s", k, "server" if client is None else f"client {client}", what)


def _is_sum(request: Request) -> bool:
    """Whether the answer can only be added to others of its round."""
    return request.plan is not None and request.plan.makes.is_sum
