"""Who is there: which node holds which partition, and messages to them with a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from logging import INFO, WARNING
from typing import Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fipa.errors import FipaError
from fipa.flower.request import JUDGE, KEY, OBJECTIVE, WHO

PAUSE = 0.1  # seconds between two looks for replies
FEW = 8  # messages that are sent or fetched at once: a server must not have all of them in memory
PATIENCE = 60.0  # seconds for a node to say who it is
WAIT = 600.0  # seconds for enough nodes to be there


class Roster:
    """Partitions by node, as the nodes say; each is asked once."""

    def __init__(self) -> None:
        self._partitions: dict[int, int] = {}  # in the order of their answers
        self._can: dict[str, set[int]] = {OBJECTIVE: set(), JUDGE: set()}  # nodes that have this
        self._asked: dict[int, float] = {}  # when
        self._questions: set[str] = set()  # without an answer
        self._silent: set[int] = set()  # did not answer in their last round
        self._strangers: dict[int, str] = {}  # nodes that did not say what they hold, and why

    def partition(self, node: int) -> int:
        """The partition that a node holds; -1 for a node that did not say."""
        return self._partitions.get(node, -1)

    def all_have(self, what: str, nodes: Iterable[int]) -> bool:
        """Whether all of these nodes have an `OBJECTIVE`, or an evaluate function of their own to `JUDGE` by."""
        return self._can[what].issuperset(nodes)

    def heard(self, node: int, answered: bool) -> None:
        """Whether a node has answered in its round: if not, another with its partition may take its place."""
        (self._silent.discard if answered else self._silent.add)(node)

    def present(self, grid: Grid, least: int) -> dict[int, int]:
        """Nodes by partition, in the order of the partitions; waits for at least so many.

        A new node has a minute to say what it holds. After that nobody waits for it any more.
        """
        begun = time.monotonic()
        logged = False
        while True:
            nodes, now = set(grid.get_node_ids()), time.monotonic()
            self._ask(grid, sorted(nodes - set(self._asked)))
            known: dict[int, int] = {}
            for node, partition in self._partitions.items():
                if node in nodes and (partition not in known or known[partition] in self._silent):
                    known[partition] = node  # of two with one partition the first, as long as it answers
            late = [node for node in nodes - set(self._partitions) if now - self._asked[node] < PATIENCE]
            if len(known) >= least and not late:
                return dict(sorted(known.items()))
            strangers = {node: why for node, why in self._strangers.items() if node in nodes}
            if strangers and not late and len(known) + len(strangers) >= least:
                said = "\n".join(f"node {node}: {why}" for node, why in sorted(strangers.items()))
                raise FipaError(
                    f"{len(strangers)} of {len(nodes)} nodes do not say which partition they hold, and the others are "
                    f"fewer than {least}: make their app with app = fipa.flower.client(ClientApp()). They say:\n{said}"
                )
            if now - begun > WAIT:
                raise FipaError(
                    f"{len(known)} of at least {least} clients are there after {WAIT:g} s: start more SuperNodes, "
                    "or lower min_available_nodes"
                )
            if not logged:
                log(INFO, "waiting for clients: %d of at least %d are there", len(known), least)
                logged = True
            time.sleep(PAUSE)

    def _ask(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Ask new nodes, and hear those who were asked."""
        kind = f"{MessageType.QUERY}.{WHO}"
        questions = [Message(RecordDict(), dst_node_id=node, message_type=kind) for node in nodes]
        self._questions |= set(grid.push_messages(questions)) if questions else set()
        self._asked |= dict.fromkeys(nodes, time.monotonic())
        for reply in grid.pull_messages(sorted(self._questions)) if self._questions else ():
            node = reply.metadata.src_node_id
            self._questions.discard(reply.metadata.reply_to_message_id)
            record = None if reply.has_error() else reply.content.config_records.get(KEY)
            partition = record.get("partition") if record is not None else None
            if type(partition) is int and partition >= 0:
                if partition in self._partitions.values():
                    log(WARNING, "node %d says that it holds partition %d, as another one does", node, partition)
                self._partitions[node] = partition
                for what, able in self._can.items():
                    if record is not None and record.get(what) is True:
                        able.add(node)
            else:
                self._asked[node] = -PATIENCE  # nobody waits for it
                reason = str(reply.error.reason) if reply.has_error() else f"it says {partition!r}"
                self._strangers[node] = reason
                log(WARNING, "node %d does not say which partition it holds: %s", node, reason)
                log(WARNING, "make its app with fipa.flower.client(ClientApp())")


class Waits(Protocol):
    """How long to wait for replies: see `fipa.flower.transport.Patience`."""

    @property
    def deadline(self) -> float | None:
        """Seconds after which enough answers are enough."""

    @property
    def grace(self) -> float:
        """Seconds that the others have from there on."""

    @property
    def timeout(self) -> float:
        """Seconds after which nobody waits any longer."""

    def enough(self, answered: int, asked: int) -> bool:
        """Whether so many answers are a quorum."""


def few(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    """So many at a time as there should be messages in memory."""
    return (clients[start : start + FEW] for start in range(0, len(clients), FEW))


def post(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages; their ids come back, in order."""
    ids = list(grid.push_messages(messages)) if messages else []
    if len(ids) != len(messages):
        raise FipaError(f"Flower took {len(ids)} of {len(messages)} messages: are they too large for it?")
    return ids


def collect(grid: Grid, ids: Sequence[str], waits: Waits, waiting: Sequence[str] = ()) -> Iterator[Message]:
    """Replies to messages that were sent, also those to earlier ones that are still `waiting`, a few at a time.

    Ends when all messages have a reply; after the deadline, when enough have one and the others have had their grace;
    and after the timeout in any case. What comes in time counts, however long the reader takes over the others: it is
    a look that began late enough that ends it.
    """
    begun = time.monotonic()
    missing, late, good, enough_since = set(ids), list(waiting), 0, None
    while True:
        names, now = [*sorted(missing), *late], time.monotonic()
        for start in range(0, len(names), FEW):
            for reply in grid.pull_messages(names[start : start + FEW]):
                name = reply.metadata.reply_to_message_id
                good += name in missing and not reply.has_error()
                missing.discard(name)
                late = [other for other in late if other != name]
                yield reply
        if not missing or now - begun > waits.timeout:
            return
        if waits.deadline is not None and waits.enough(good, len(ids)):
            enough_since = now if enough_since is None else enough_since
            if now >= max(begun + waits.deadline, enough_since + waits.grace):
                return
        time.sleep(PAUSE)
