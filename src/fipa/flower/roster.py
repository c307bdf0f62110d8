"""Who is there: which node holds which partition, and messages to them with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from logging import INFO, WARNING

from flwr.app import Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fipa.errors import FipaError
from fipa.flower.client import WHO
from fipa.flower.request import KEY

PAUSE = 0.1  # seconds between two looks for replies
PATIENCE = 60.0  # seconds for a node to say who it is
WAIT = 600.0  # seconds for enough nodes to be there


class Roster:
    """Partitions by node, asked for once per node."""

    def __init__(self) -> None:
        self._partitions: dict[int, int] = {}

    def partition(self, node: int) -> int:
        """That a node holds; -1 for a node that did not say."""
        return self._partitions.get(node, -1)

    def present(self, grid: Grid, least: int) -> dict[int, int]:
        """Nodes by partition, in the order of the partitions; waits for at least so many."""
        begun = time.monotonic()
        while True:
            nodes = set(grid.get_node_ids())
            self._ask(grid, sorted(nodes - set(self._partitions)))
            # of two nodes with one partition the newer: Flower takes a minute to notice that the other was killed
            known = {partition: node for node, partition in self._partitions.items() if node in nodes}
            if len(known) >= least:
                return dict(sorted(known.items()))
            if time.monotonic() - begun > WAIT:
                raise FipaError(
                    f"{len(known)} of at least {least} clients are there after {WAIT:g} s: start more SuperNodes, "
                    "or lower min_available_nodes"
                )
            log(INFO, "waiting for clients: %d of at least %d are there", len(known), least)
            time.sleep(1)

    def _ask(self, grid: Grid, nodes: Sequence[int]) -> None:
        if not nodes:
            return
        kind = f"{MessageType.QUERY}.{WHO}"
        questions = [Message(RecordDict(), dst_node_id=node, message_type=kind) for node in nodes]
        replies, _ = exchange(grid, questions, enough=lambda replies: False, deadline=None, timeout=PATIENCE)
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                log(WARNING, "node %d does not say which partition it holds: %s", node, reply.error.reason)
                log(WARNING, "make its app with fipa.flower.client(ClientApp())")
                continue
            record = reply.content.config_records.get(KEY)
            partition = record.get("partition") if record is not None else None
            if not isinstance(partition, int) or isinstance(partition, bool) or partition < 0:
                log(WARNING, "node %d says that it holds partition %r: it is left out", node, partition)
                continue
            self._partitions[node] = partition


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    enough: Callable[[Sequence[Message]], bool],
    deadline: float | None,
    timeout: float,
    waiting: Sequence[str] = (),
) -> tuple[list[Message], list[str]]:
    """Send messages and collect the replies, also those to earlier messages that are still `waiting`.

    Ends when all messages have a reply, after `deadline` seconds if there are `enough` replies to them, and after
    `timeout` in any case. Also returns the ids of the messages, in order.
    """
    begun = time.monotonic()
    ids = list(grid.push_messages(messages))
    sent, missing, replies = set(ids), set(ids), list[Message]()
    while True:
        for reply in grid.pull_messages([*sorted(missing), *waiting]):
            replies.append(reply)
            missing.discard(reply.metadata.reply_to_message_id)
            waiting = [name for name in waiting if name != reply.metadata.reply_to_message_id]
        passed = time.monotonic() - begun
        if not missing or passed > timeout:
            return replies, ids
        fresh = [reply for reply in replies if reply.metadata.reply_to_message_id in sent]
        if deadline is not None and passed > deadline and enough(fresh):
            return replies, ids
        time.sleep(PAUSE)
