"""An arm on a seed in this process: the coordinator's rounds over the local transport, and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fipa.federation.arm import Arm
from fipa.federation.control import Conversation
from fipa.federation.coordinator import Coordinator, State
from fipa.federation.executor import Executor
from fipa.federation.local import LocalTransport
from fipa.federation.memory import peak_mib, reset_peak
from fipa.federation.messages import Transport, Who
from fipa.federation.parameters import load_seen
from fipa.federation.record import RoundRecord
from fipa.federation.stage import stage_at

Done = tuple[State, RoundRecord]


def carry(conversation: Conversation[Done], transport: Transport, meanwhile: Callable[[], Any] | None = None) -> Done:
    """Carry a round's questions to the clients and their answers back, up to its end.

    `meanwhile` runs once, while clients are busy. The record's seconds are those of clients and server, without it.
    """
    seconds, answers = 0.0, None
    while True:
        begun = time.perf_counter()
        try:
            ask = conversation.send(answers)  # type: ignore[arg-type]  # None begins
        except StopIteration as end:
            state, record = end.value
            return state, replace(record, seconds=seconds + time.perf_counter() - begun)
        wait = transport.ask(ask)
        seconds += time.perf_counter() - begun
        if meanwhile is not None and not isinstance(ask.question, Who):
            meanwhile()
            meanwhile = None
        answers = wait()
        seconds += answers.seconds


class Federation:
    """One arm on one seed. `rounds(state)` yields the state and the record after each round."""

    def __init__(self, arm: Arm, seed: int, executor: Executor) -> None:
        self.arm = arm
        self._executor = executor
        self._transport = LocalTransport(arm, seed, executor)
        self.site = self._transport.site
        self.coordinator = Coordinator(arm, seed)
        self._measures_memory = reset_peak(executor.pids)

    def start(self) -> State:
        """The state before the first round."""
        seen = load_seen(self.arm.start) if self.arm.start is not None and self.arm.params is None else {}
        return self.coordinator.start(self.site.initial, seen=seen)

    def rounds(self, state: State, last: int | None = None) -> Iterator[Done]:
        """Resume from a state, up to a round, or to the arm's last one.

        A model is evaluated here while worker processes are busy with the next round.
        """
        evaluated: list[Done] = []
        waiting: list[Done] = []

        def evaluate() -> None:
            evaluated.extend(self._evaluated(*waiting.pop(0)) for _ in waiting[:])  # in order: several may wait

        while state.round_number < (self.arm.last if last is None else last):
            done = carry(self.coordinator.round(state), self._transport, evaluate)
            yield from evaluated
            evaluated.clear()
            waiting.append(done)
            state = done[0]
        evaluate()
        yield from evaluated

    def round(self, state: State) -> Done:
        """One round."""
        return self._evaluated(*carry(self.coordinator.round(state), self._transport))

    def _evaluated(self, state: State, record: RoundRecord) -> Done:
        stage, place = stage_at(self.arm.stages, state.round_number - self.arm.after)
        metrics: dict[str, Any] = {}
        if stage.evaluates(place):
            metrics["metric"] = self.site.problem.evaluate(state.theta)
            if state.recent:
                mean = self.site.problem.evaluate(state.mean) if len(state.recent) > 1 else metrics["metric"]
                metrics["averaged_metric"] = mean
        peak = peak_mib(self._executor.pids) if self._measures_memory else None
        return state, replace(record, peak_memory_mib=peak, **metrics)
