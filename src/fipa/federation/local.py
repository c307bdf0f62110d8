"""The transport within this machine: clients in this process or in worker processes, with simulated faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.executor import Executor, Scope
from fipa.federation.messages import Answers, Ask, Curve, Late, Loss, Order, Reply, Who
from fipa.spill import Shelf

Waiting = Callable[[], Answers]


class LocalTransport:
    """Clients of one arm on one seed, computed by an executor.

    Bytes are those of the tensors that a network would carry; an arm with all data in one place has none.
    """

    def __init__(self, arm: Arm, seed: int, executor: Executor) -> None:
        self._arm, self._seed, self._executor = arm, seed, executor
        self.scope = Scope(seed, arm.centralised, arm.start, arm.params, arm.trace)
        self.site = executor.site(self.scope)
        self.num_examples = {number: client.num_examples for number, client in self.site.clients.items()}
        first = arm.participation.select(list(self.num_examples.values()), seed, 1)
        bends = any(isinstance(stage.control, StepControl) and stage.control.acceleration for stage in arm.stages)
        executor.prepare(self.scope, self._groups(first), self.site.initial, bends)

    def ask(self, ask: Ask) -> Waiting:
        """Begin with an order at once where there are worker processes, else when the answers are waited for."""
        if isinstance(ask.question, Who):
            return lambda: Answers(self.num_examples)
        if isinstance(ask.question, Order):
            return self._train(ask, ask.question)
        method, groups = ask.question.method, self._groups(ask.clients)
        here = isinstance(ask.question, Loss)  # too cheap to send away
        wait = self._executor.start(method, self.scope, groups, *ask.question.about(), ask.round_number, here=here)

        def answers() -> Answers:
            rows, seconds = wait()
            values = dict(zip(ask.clients, rows, strict=True))
            return Answers(values, seconds=seconds, **self._traffic(ask, values.values()))

        return answers

    def _train(self, ask: Ask, order: Order) -> Waiting:
        delays = {client: self._arm.faults.delay(self._seed, ask.round_number, client) for client in ask.clients}
        answering = [client for client, delay in delays.items() if delay is not None]
        shelf = Shelf(self._arm.memory_limit)
        wait = self._executor.start(order.method, self.scope, self._groups(answering), order, keep=shelf.keep)

        def answers() -> Answers:
            replies, seconds = wait()
            by_client: Mapping[int, Reply] = dict(zip(answering, replies, strict=True))
            return Answers(
                {client: reply for client, reply in by_client.items() if delays[client] == 0},
                late=tuple(
                    Late(reply.update, ask.round_number, ask.round_number + delay)
                    for client, reply in by_client.items()
                    if (delay := delays[client])
                ),
                missing={client: "dropped out" for client, delay in delays.items() if delay is None},
                seconds=seconds,
                **self._traffic(ask, replies),
            )

        return answers

    def _groups(self, clients: Sequence[int]) -> list[tuple[int, ...]]:
        return self.site.groups(clients, self._arm.group)

    def _traffic(self, ask: Ask, values: Collection[Any]) -> dict[str, Any]:
        """Bytes down to all who are asked, and up from all who answer, sooner or later."""
        if self._arm.centralised:
            return {}
        question: Any = ask.question
        down = [*getattr(question, "shared", {}).values(), getattr(question, "direction", None)]
        downlink = len(ask.clients) * sum(_size(tensor) for tensor in down if tensor is not None)
        downlink += sum(_size(question.theta) for client in ask.clients if client not in ask.held)
        if isinstance(ask.question, Curve):
            downlink += sum(_size(delta) for delta in ask.question.deltas.values())
            downlink += sum(move.nbytes for client in ask.clients for move in ask.question.news(client))
        return {
            "uplink": sum(_size(value) for value in values),
            "downlink": downlink,
            "messages": len(ask.clients) + len(values),
        }


def _size(value: Any) -> int:
    """A number takes 8 bytes."""
    if isinstance(value, Reply):
        return value.nbytes
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 8
