"""One round, written once (paper Algorithm 1): a conversation without I/O and without a clock.

`Coordinator.round(state)` is a generator. It yields what it wants to know (`Ask`), is sent what came back (`Answers`),
and returns the state after the round with a record of it. Who carries the questions is a `Transport`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fipa.aggregation.krylov import TOLERANCE
from fipa.aggregation.once import untold
from fipa.aggregation.private_shared import PrivateSharedFIPA
from fipa.aggregation.rule import Rule, aggregator
from fipa.aggregation.shared import SharedFIPA
from fipa.aggregation.update import ClientUpdate
from fipa.clients.gradient import FullGradient
from fipa.curvature.sketch import Sketch
from fipa.errors import FipaError
from fipa.federation.arm import Arm
from fipa.federation.arrivals import arrivals, arrived
from fipa.federation.control import Conversation, StepControl, controlled
from fipa.federation.exact import mark_of
from fipa.federation.judges import Judges, averaged
from fipa.federation.messages import MODELS, Answers, Ask, Gradient, Late, Order, Question, Reply, Who
from fipa.federation.outcome import Outcome
from fipa.federation.parameters import Seen, mean_of
from fipa.federation.private import PrivateStep
from fipa.federation.record import RoundRecord, event
from fipa.federation.safety import Pace, planned
from fipa.federation.shared import SharedStep
from fipa.federation.stage import floor_of, stage_at


@dataclass(frozen=True, eq=False)
class State:
    """All that one round hands to the next: with it, a run resumes as if it had never stopped.

    Attributes
    ----------
    theta, round_number
        The model, and the last round.
    rule_state, control_value
        What the server's rule remembers, and the damping or step that its control has come to.
    shared, memories
        What the local rule's server part broadcasts, and what each client is to be given back.
    late
        Answers that are still to be used.
    buffers
        Averaged tensors that are no parameters.
    recent
        The last models, for their mean.
    seen
        By client, its examples and its last update as a gradient: for rules that remember clients, and begin after a
        warm-up.
    judged, pace
        Clients' losses at the model, as far as they told them; and what the rounds so far have taught the server.
    held
        By client, checksums of the models that it has kept, the latest first.
    """

    theta: Tensor
    round_number: int = 0
    rule_state: dict[str, Tensor] = field(default_factory=dict)
    control_value: float | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)
    memories: dict[int, Any] = field(default_factory=dict)
    late: tuple[Late, ...] = ()
    buffers: dict[str, Tensor] = field(default_factory=dict)
    recent: tuple[Tensor, ...] = ()
    seen: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    judged: dict[int, float] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        """The mean of the last models."""
        return mean_of(self.recent)


class Coordinator:
    """The server of one arm on one seed.

    Parameters
    ----------
    survives
        Whether a rule that refuses the round's updates costs no more than the round, as on a server that must live, or
        ends the run, as in an experiment.
    """

    def __init__(self, arm: Arm, seed: int, *, survives: bool = False) -> None:
        self.arm = arm
        self.seed = seed
        self._survives = survives

    def start(self, theta: Tensor, buffers: Mapping[str, Tensor] | None = None, seen: Seen | None = None) -> State:
        """Before the first round; `seen` is what a warm-up knows of the clients."""
        return State(theta.clone(), self.arm.after, buffers=dict(buffers or {}), seen=dict(seen or {}))

    def round(self, state: State) -> Conversation[tuple[State, RoundRecord]]:
        """One round."""
        return _Round(self, state, self._survives).run()


class _Round:
    """A round in progress: what it has counted and noted so far."""

    def __init__(self, coordinator: Coordinator, state: State, survives: bool) -> None:
        self.arm, self.seed, self.state = coordinator.arm, coordinator.seed, state
        self.k = state.round_number + 1
        self.stage, self.place = stage_at(self.arm.stages, self.k - self.arm.after)
        self.population = 0
        self._survives = survives
        self._events: list[dict[str, Any]] = []
        self._held = dict(state.held)
        self._counts = {"uplink_bytes": 0, "downlink_bytes": 0, "trips": 0, "messages": 0}

    def run(self) -> Conversation[tuple[State, RoundRecord]]:
        self._enter_stage()
        there = yield Ask(self.k, (), Who())
        everybody = list(there.values)
        self.population = len(everybody)
        chosen = self.arm.participation.select(list(there.values.values()), self.seed, self.k)
        clients = untold(self.stage.rule, self.state.rule_state, [everybody[place] for place in chosen])
        if chosen and not clients:
            self._say(None, f"all of this round's clients have told what they know: {STAYS}")
            outcome = Outcome(control_value=self.state.control_value)
            return self._next(outcome, {}, self.state.late), self._record(outcome, (), {})
        answers = yield from self._ask(clients, (yield from self._order(clients)))
        replies = {client: replace(one, update=one.update.canonical()) for client, one in answers.values.items()}
        answers = replace(answers, values=replies)
        for client, reply in replies.items():
            for note in reply.notes:
                self._say(client, note)
        since = self.k - self.place
        updates, late = arrivals(self.arm, self.stage, self.k, since, self.state.late, answers, self._say)
        outcome = Outcome(control_value=self.state.control_value)
        if not answers.enough:
            self._say(None, f"{len(replies)} of {len(clients)} clients answered, fewer than the quorum: {STAYS}")
        elif not updates:
            self._say(None, f"nobody answered in time: {STAYS}")
        else:
            if isinstance(self.stage.rule, SharedFIPA):
                late_ones = arrived(updates, replies, self.state.late)
                rule: Any = self.stage.rule_at(self.place, self.seed)
                rule = rule.settled(self.state.theta.dtype, self._everybody(clients))
                kind = PrivateStep if isinstance(rule, PrivateSharedFIPA) else SharedStep
                step = kind(self, rule, replies, late_ones).run()
            else:
                step = self._step(updates, replies)
            outcome = yield from self._survived(step)
            self._doubt(outcome)
            if outcome.result is None and outcome.trials:
                self._say(None, f"no step of {outcome.trials} lowered the clients' loss: rolled back")
        return self._next(outcome, replies, late), self._record(outcome, updates, replies)

    def _enter_stage(self) -> None:
        """With another rule, what the last one remembered is of no use."""
        if self.place > 0:
            return
        self.state = replace(self.state, rule_state={}, control_value=None, pace=Pace())
        local, first = self.stage.local, self.k == self.arm.after + 1
        if first or type(stage_at(self.arm.stages, self.k - 1 - self.arm.after)[0].local) is not type(local):
            shared = {} if local is None else local.start(self.state.theta)
            self.state = replace(self.state, shared=shared, memories={})

    def _order(self, clients: Sequence[int]) -> Conversation[Order]:
        """What to broadcast; adaptive ranks need the clients' gradients first."""
        stage, state = self.stage, self.state
        mine = {client: state.memories[client] for client in clients if client in state.memories}
        plan = None if isinstance(stage.rule, SharedFIPA) else stage.plan  # asked for on a second trip
        parts = 0
        if isinstance(stage.rule, SharedFIPA) and isinstance(stage.local, FullGradient):
            parts = stage.rule.settled(state.theta.dtype, self._everybody(clients)).parts or 0
        order = Order(
            self.k, state.theta, stage.local, stage.lr_scale * state.pace.lr_scale, planned(plan, state.pace),
            floor_of(stage.rule), stage.adaptive_rank, stage.adaptive_steps, shared=state.shared, memories=mine,
            buffers=state.buffers, parts=parts,
        )  # fmt: skip
        if stage.adaptive_rank is None:
            return order
        answers = yield from self._ask(clients, Gradient(state.theta))
        if not answers.values:
            return replace(order, gradient_norm=0.0)
        return replace(order, gradient_norm=float(torch.stack(list(answers.values.values())).sum(dim=0).norm()))

    def _everybody(self, clients: Sequence[int]) -> int | None:
        """How many are asked, if these are all that there are."""
        return len(clients) if len(clients) == self.population else None

    def _step(self, updates: Sequence[ClientUpdate], replies: Mapping[int, Reply]) -> Conversation[Outcome]:
        """The server's part: the rule, and its control if it has one."""
        state, stage = self.state, self.stage
        rule: Any = stage.rule_at(self.place, self.seed)
        settings: dict[str, Any] = {name: _setting(rule, name) for name in ("damping", "step")}
        apply = aggregator(state.theta, updates, population=self.population, memory_limit=self.arm.memory_limit)
        if stage.safety is not None:
            apply = stage.safety.limited(apply, state.theta, updates)
        if stage.control is None:
            return Outcome(apply(rule, state.rule_state), state.control_value, 1, **settings)
        assert isinstance(stage.control, StepControl)
        value = stage.control.start(rule) if state.control_value is None else state.control_value
        judges = yield from Judges(self, apply, updates, replies).called()
        trial = yield from controlled(
            stage.control, rule, value, judges.loss, lambda tried: apply(tried, state.rule_state), judges.probe,
            judges.follow, judges.settle,
        )  # fmt: skip
        settings["damping" if stage.control.parameter(rule) == "damping" else "step"] = trial.used
        judged = judges.at(trial.result.theta) if trial.result is not None else judges.losses
        after = trial.loss if trial.result is not None else judges.loss
        return Outcome(
            trial.result, trial.value, trial.trials, **settings, loss=judges.loss, loss_after=after, judged=judged
        )

    def _survived(self, step: Conversation[Outcome]) -> Conversation[Outcome]:
        """A step, or none where the server must live."""
        try:
            return (yield from step)
        except (FipaError, RuntimeError) as error:  # also what LAPACK makes of odd matrices
            if not self._survives:
                raise
            self._say(None, f"no step, the model stays as it is: {error}")
            return Outcome(control_value=self.state.control_value)

    def _doubt(self, outcome: Outcome) -> None:
        """Say so where a step that is found by iteration had not the memory to become as exact as it should."""
        bound = outcome.result.diagnostics.error_bound if outcome.result is not None else 0.0
        if bound > TOLERANCE:
            self._say(None, f"the step may be off by {bound:.1g} of its length: raise the damping, or memory_limit")

    def _next(self, outcome: Outcome, replies: Mapping[int, Reply], late: tuple[Late, ...]) -> State:
        state, local = self.state, self.stage.local
        theta, rule_state, buffers = state.theta, state.rule_state, state.buffers
        if outcome.result is not None:
            theta, rule_state = outcome.result.theta, outcome.result.state
            buffers = {**buffers, **averaged(list(replies.values()))}
        if outcome.rule_state is not None:
            rule_state = outcome.rule_state
        messages = [reply.message for reply in replies.values() if reply.message]
        shared = state.shared
        if local is not None and messages:
            shared = local.server(shared, messages, self.population)
        memories = {client: reply.memory for client, reply in replies.items() if reply.memory is not None}
        recent = (*state.recent, theta)[-self.arm.average :] if self.arm.average else ()
        judged = outcome.judged if outcome.result is not None else {**state.judged, **outcome.judged}
        pace, safety = state.pace, self.stage.safety
        if safety is not None:
            told = means([(reply.update.num_examples, reply.metrics) for reply in replies.values()])
            pace = safety.after(pace, outcome.trials, outcome.result is not None, told, self.stage.plan)
            if pace.lr_scale < state.pace.lr_scale:  # other updates: what served the last ones says nothing of them
                outcome = replace(outcome, control_value=None)
        return State(
            theta, self.k, rule_state, outcome.control_value, shared, {**state.memories, **memories}, late, buffers,
            recent, self._seen(replies, rule_state), judged, pace, self._held,
        )  # fmt: skip

    def _seen(self, replies: Mapping[int, Reply], rule_state: Mapping[str, Tensor]) -> dict[int, tuple[int, Tensor]]:
        """Each client's last update as the gradient that would have led there in as many steps, until it is used."""
        local = self.stage.local
        if isinstance(self.stage.rule, SharedFIPA):
            return {} if rule_state else dict(self.state.seen)
        later = self.arm.remembers or any(isinstance(stage.rule, SharedFIPA) for stage in self.arm.stages)
        if not later or local is None:
            return {}
        lr = local.lr_at(self.k, self.stage.lr_scale)
        seen = dict(self.state.seen)
        for client, reply in replies.items():
            assert isinstance(reply.update.delta, Tensor)
            gradient = reply.update.delta / (-lr * max(1, reply.local_steps))
            seen[client] = (reply.update.num_examples, gradient)
        return seen

    def _record(self, outcome: Outcome, updates: Sequence[ClientUpdate], replies: Mapping[int, Reply]) -> RoundRecord:
        ranks = tuple(u.sketch.rank if isinstance(u.sketch, Sketch) else 0 for u in updates)
        told = {client: reply.loss for client, reply in replies.items() if reply.loss is not None}
        diagnostics = outcome.result.diagnostics if outcome.result is not None else None
        return RoundRecord(
            self.k,
            loss=self.mean(replies, told) if told else outcome.loss,
            loss_after=outcome.loss_after,
            rank=sum(ranks) / len(ranks) if ranks else 0.0,
            ranks=ranks,
            local_steps=tuple(reply.local_steps for reply in replies.values()),
            clients=tuple(u.client_id for u in updates if isinstance(u.client_id, int)),
            damping=outcome.damping,
            step=outcome.step,
            trials=outcome.trials,
            accepted=outcome.result is not None,
            step_length=diagnostics.step_length if diagnostics else 0.0,
            cosine_with_fedavg=diagnostics.cosine_with_fedavg if diagnostics else None,
            effective_rank=diagnostics.effective_rank if diagnostics else None,
            metrics=means([(reply.update.num_examples, reply.metrics) for reply in replies.values()]),
            events=tuple(self._events),
            spectra={str(u.client_id): u.sketch.eigenvalues.tolist() for u in updates if isinstance(u.sketch, Sketch)},
            **self._counts,
        )

    def _ask(self, clients: Sequence[int], question: Question) -> Conversation[Answers]:
        """Ask clients, count what it takes, and note who is missing."""
        theta: Any = getattr(question, "theta", None)
        mark = mark_of(theta) if theta is not None and self._asks_again else ""
        held = frozenset(client for client in clients if mark and mark in self._held.get(client, ()))
        answers = yield Ask(self.k, tuple(clients), question, bool(mark), held)
        for client in clients if mark else ():
            others = [one for one in self._held.pop(client, ()) if one != mark]
            if answers.kept and client in answers.values:
                self._held[client] = (mark, *others)[:MODELS]
        spent = {"uplink_bytes": answers.uplink, "downlink_bytes": answers.downlink, "messages": answers.messages}
        for name, count in (spent | {"trips": 1}).items():
            self._counts[name] += count
        for client, reason in answers.missing.items():
            self._say(client, reason)
        for sender, reason in answers.refused.items():
            self._say(sender, f"refused: its answer {reason}")
        return answers

    @property
    def _asks_again(self) -> bool:
        """Whether a stage has several questions about the same model."""
        stage = self.stage
        return stage.local is not None and (
            stage.control is not None or stage.adaptive_rank is not None or isinstance(stage.rule, SharedFIPA)
        )

    def _say(self, client: int | str | None, text: str) -> None:
        self._events.append(event(self.k, client, text))

    def mean(self, replies: Mapping[int, Reply], numbers: Mapping[int, float]) -> float:
        """Mean of some clients' numbers, with the weights that the clients have in the aggregation."""
        alike = self.arm.participation.kind == "weighted"
        weights = {client: 1 if alike else replies[client].update.num_examples for client in numbers}
        total = math.fsum(weights[client] * number for client, number in numbers.items())
        return total / sum(weights.values()) if numbers else math.nan

    ask, say = _ask, _say


STAYS = "the model stays as it is"


def _setting(rule: Rule, name: str) -> float | None:
    value = getattr(rule, name, None)
    return float(value) if isinstance(value, int | float) else None


def means(rows: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Weighted means of the numbers that all rows have."""
    total = sum(weight for weight, _ in rows)
    shared = [name for name in (rows[0][1] if rows else ()) if all(name in numbers for _, numbers in rows)]
    return {name: sum(weight * float(numbers[name]) for weight, numbers in rows) / total for name in shared}
