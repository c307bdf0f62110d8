"""Messages as they come back: matched with what was asked, checked, and refused with a reason or taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.messages import Late, Order, Reply
from fipa.flower.answer import Expected, decode
from fipa.flower.codec import nbytes
from fipa.flower.names import NAMES, Names
from fipa.flower.request import KEY, Request
from fipa.spill import Shelf

OLDEST = 10  # rounds after which an answer is no longer waited for
LONGEST = 2**16  # characters of a reason: a client's whole error, but not all that it could think of
NEEDS = "needs"  # what a client lacks to answer
GONE = (3, 4, 5, 8)  # codes of Flower's errors: message, reply or node unavailable, and a process that died
LACKING = ("frame", "basis", "model")  # arrays that never change, or its copy of the shared basis or of the model


@dataclass(eq=False)
class Post:
    """What came back to one question.

    Attributes
    ----------
    values, late
        Answers to it, and to orders of earlier rounds.
    refused
        Reasons by client, or by node where no client is known.
    lacking
        Clients that lack something they must be sent first.
    gone
        Clients whose nodes died with the question.
    names
        What clients say their model is, where the server takes it for another.
    uplink, received
        Bytes and messages.
    """

    values: dict[int, Any] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    refused: dict[int | str, str] = field(default_factory=dict)
    lacking: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    names: dict[int, Names] = field(default_factory=dict)
    uplink: int = 0
    received: int = 0


class Inbox:
    """Who was asked what. Whatever a client sends must not stop the server."""

    def __init__(self) -> None:
        self._sent: dict[str, Request] = {}  # by message

    def sent(self, message_id: str, request: Request) -> None:
        """Remember a question."""
        self._sent[message_id] = request

    @property
    def orders(self) -> list[str]:
        """Messages with orders that nobody has answered yet."""
        return [name for name, request in self._sent.items() if request.method == Order.method]

    def forget(self, k: int) -> None:
        """Give up orders of long ago, and all other questions."""
        self._sent = {
            name: request for name, request in self._sent.items()
            if request.method == Order.method and request.round_number > k - OLDEST
        }  # fmt: skip

    def matched(
        self, replies: Iterable[Message], refused: dict[int | str, str], gone: list[int] | None = None
    ) -> Iterator[tuple[Request, RecordDict]]:
        """What was asked and what was answered, each question once; all else is refused.

        Clients whose nodes died with the question are noted in `gone`.
        """
        for reply in replies:
            request = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                refused[f"node {reply.metadata.src_node_id}"] = "is to what nobody asked, or comes twice"
            elif reply.has_error():
                refused[request.client] = f"failed: {reply.error.reason}"[:LONGEST]
                if gone is not None and reply.error.code in GONE:
                    gone.append(request.client)
            else:
                yield request, reply.content

    def open(
        self,
        replies: Iterable[Message],
        method: str,
        k: int,
        expected: Expected,
        arrays: Mapping[str, Tensor],
        shelf: Shelf,
    ) -> Post:
        """Read what came back to a question of round k about a model of these arrays, and keep it on a shelf."""
        post = Post()
        for request, content in self.matched(replies, post.refused, post.gone):
            post.uplink += nbytes(*content.array_records.values())
            post.received += 1
            with reading(request.client, post.refused):
                if lacks(content):
                    post.lacking.append(request.client)
                    continue
                told = names_in(content)
                if told is not None:
                    post.names[request.client] = Names.decode(told, arrays)
                    continue
                answer = decode(content, request, expected)
                answer = shelf.keep(answer) if isinstance(answer, Reply) else answer
                post.uplink += 8 * (isinstance(answer, float) or getattr(answer, "loss", None) is not None)
                if (request.round_number, request.method) == (k, method):
                    post.values[request.client] = answer
                elif isinstance(answer, Reply):
                    post.late.append(Late(answer.update, request.round_number, k))
        post.values = dict(sorted(post.values.items()))
        post.late.sort(key=lambda late: (late.update.client_id, late.sent))
        _agree(post)
        return post


@contextmanager
def reading(client: int, refused: dict[int | str, str]) -> Iterator[None]:
    """Errors in this block refuse the client's answer."""
    try:
        yield
    except FipaError as error:
        refused[client] = str(error)[:LONGEST]
    except Exception as error:
        refused[client] = f"cannot be read: {type(error).__name__}: {error}"[:LONGEST]


def lacks(content: RecordDict) -> bool:
    """Whether a client says that it lacks arrays instead of answering."""
    head = content.config_records.get(KEY)
    return head is not None and head.get(NEEDS) in LACKING


def names_in(content: RecordDict) -> Any:
    """What a reply says a client's model is, if it says so instead of answering."""
    head = content.config_records.get(KEY)
    return None if head is None else head.get(NAMES)


def _agree(post: Post) -> None:
    """Curvatures of one round must be of one form: those who differ from most are refused, not the round."""
    sent = {client: reply.update.sketch for client, reply in post.values.items() if isinstance(reply, Reply)}
    summaries = {client: summary for client, summary in sent.items() if summary is not None}
    usual = Counter(summary.form() for summary in summaries.values()).most_common(1)
    for client, summary in summaries.items():
        if summary.form() != usual[0][0]:
            del post.values[client]
            post.refused[client] = f"has {summary.unlike}"
