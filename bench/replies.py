"""(k) Flower's server: peak memory by number of replies, which are made when they are fetched."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from logging import WARNING, getLogger
from multiprocessing import get_context
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import fipa
from bench.common import PeakMemory, Record
from fipa.curvature.additive import AdditivePlan
from fipa.federation.messages import Reply
from fipa.flower import FIPA
from fipa.flower.answer import encode
from fipa.flower.request import KEY, Request
from fipa.layout import Layout
from fipa.randomness import seed_for

P, WIDTH, LIMIT, CLIENTS = 272_474, 8, 2**22, (10, 100)
RULES: dict[str, dict[str, Any]] = {
    "FedAvg": {"rule": fipa.FedAvg()},
    "additive FIPA, width 8": {"rule": fipa.AdditiveFIPA(damping=0.5), "plan": AdditivePlan(width=WIDTH)},
}


class MadeUp(Grid):
    """Nodes without clients: the reply to a message is made when it is pulled, in any order but that of the clients."""

    def __init__(self, nodes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._nodes, self._asked = nodes, dict[str, Message]()
        self._delta, self._factor = (torch.randn(P, k, generator=generator) / P**0.5 for k in (1, 4))
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self._nodes + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self._asked)}-{message.metadata.dst_node_id}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            if KEY in message.content:
                kept = RecordDict({KEY: message.content[KEY]})
                message = Message(kept, dst_node_id=message.metadata.dst_node_id, message_type="train")
                message.metadata.__dict__["_message_id"] = ids[-1]
            self._asked[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answer(self._asked.pop(name)) for name in reversed(list(message_ids)) if name in self._asked]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(list(self.push_messages(messages)))

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1
        if KEY not in message.content:
            return Message(RecordDict({KEY: ConfigRecord({"partition": client})}), reply_to=message)
        request = Request.of(message.content)
        delta, summary = self._delta[:, 0].roll(137 * client), None
        if request.plan is not None:
            seed = seed_for(request.seed, "test matrix", request.round_number)
            factor = self._factor.roll(131 * client, 0)
            products = factor @ (factor.T @ fipa.random_test_matrix(P, WIDTH, seed))
            response = factor @ (factor.T @ delta)
            layout = Layout(("w",), ((P,),))
            summary = fipa.AdditiveStatistics(products, response, delta, 100, seed, layout)
        return Message(encode(request, Reply(fipa.ClientUpdate(delta, 100, summary))), reply_to=message)


def round_of(name: str, clients: int) -> tuple[int, float, int]:
    """Peak memory, CPU seconds with the making of replies, and bytes of a reply; in a process of its own."""
    torch.set_num_threads(1)
    getLogger("flwr").setLevel(WARNING)
    strategy = FIPA(
        **RULES[name], control=False, safety=None, memory_limit=LIMIT, fraction_evaluate=0.0, min_available_nodes=1
    )
    grid = MadeUp(clients)
    with PeakMemory() as memory:
        start = time.process_time()
        strategy.start(grid, ArrayRecord({"w": torch.zeros(P)}), 1)
        seconds = time.process_time() - start
    assert len(strategy.records[0].clients) == clients
    return memory.bytes, seconds, strategy.records[0].uplink_bytes // clients


def flower_memory() -> Iterator[Record]:
    """What one more reply takes of the server's memory."""
    few, many = CLIENTS
    for name in RULES:
        peaks, seconds, size = {}, {}, 0
        for clients in CLIENTS:
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                peaks[clients], seconds[clients], size = fresh.submit(round_of, name, clients).result()
        yield Record(
            f"flower: memory of one more reply, {name}",
            (peaks[many] - peaks[few]) / (many - few) / size,
            0.25,
            "of its size",
            {"peak_bytes": peaks, "seconds": seconds, "reply_bytes": size, "memory_limit": LIMIT},
            at_most=True,
        )
