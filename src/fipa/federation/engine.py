"""Rounds: select, broadcast, local training and sketch, aggregate, evaluate (paper Algorithm 1)."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.rule import Diagnostics, Result, Rule, aggregator
from fipa.aggregation.update import ClientUpdate
from fipa.clients.features import Moon
from fipa.clients.local_rules import GaussNewton, Scaffold
from fipa.curvature.sketch import Sketch
from fipa.federation.control import controlled
from fipa.federation.executor import Executor, Replies, Scope
from fipa.federation.memory import peak_mib, reset_peak
from fipa.federation.parameters import mean_of
from fipa.federation.participation import Faults, Participation
from fipa.federation.record import RoundRecord, event
from fipa.federation.site import SERVER, Order, Reply
from fipa.federation.stage import Stage, stage_at

GROUP = 16  # clients of one form that are trained side by side


@dataclass(frozen=True)
class Arm:
    """One way to solve a problem.

    Parameters
    ----------
    stages
        In order; the arm's length is theirs together.
    participation, faults
        Who is asked, and who answers.
    centralised
        One client holds all data: the reference that no federation can use.
    group
        Most clients that are trained side by side (`vmap`); 1 for models that this does not work for or pay for.
    after
        Rounds of a warm-up that come before this arm's first.
    start
        File with the parameters that the warm-up ended with.
    params
        Names or patterns of the parameters that are trained, sketched and sent; the others stay as they are.
    average
        The mean of this many of the arm's last models is evaluated beside the model itself; 0 for none.
    """

    name: str
    stages: tuple[Stage, ...]
    participation: Participation = field(default_factory=Participation)
    faults: Faults = field(default_factory=Faults)
    centralised: bool = False
    group: int = GROUP
    after: int = 0
    start: str | None = None
    params: tuple[str, ...] | None = None
    average: int = 10

    @property
    def last(self) -> int:
        """The number of the last round: those of the warm-up count."""
        return self.after + sum(stage.rounds for stage in self.stages)


@dataclass(frozen=True, eq=False)
class Late:
    """An answer on its way."""

    update: ClientUpdate
    sent: int
    arrives: int


@dataclass(frozen=True, eq=False)
class State:
    """All that one round hands to the next: with it, a run goes on as if it had never stopped.

    `recent` holds the last models that are averaged, the present one included and the oldest first.
    """

    theta: Tensor
    round_number: int = 0
    rule_state: dict[str, Tensor] = field(default_factory=dict)
    control_value: float | None = None
    variates: dict[int, Tensor] = field(default_factory=dict)
    late: tuple[Late, ...] = ()
    recent: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the server did with a round's updates."""

    result: Result[Tensor] | None = None  # None: the model stays as it is
    control_value: float | None = None  # for the next round
    trials: int = 0
    damping: float | None = None
    step: float | None = None
    probes: int = 0  # models that clients were asked to judge
    bends: int = 0  # steps that clients were asked to follow


@dataclass(frozen=True, eq=False)
class Begun:
    """A round that clients are at work for."""

    state: State
    stage: Stage
    place: int  # of the round in its stage
    delays: dict[int, int | None]  # of those who were asked
    replies: Replies
    uplink: int
    downlink: int
    seconds: float  # so far
    events: list[dict[str, Any]]


class Federation:
    """One arm on one seed. `rounds(state)` yields the state and the record after each round."""

    def __init__(self, arm: Arm, seed: int, executor: Executor) -> None:
        self.arm = arm
        self.seed = seed
        self._executor = executor
        self.scope = Scope(seed, arm.centralised, arm.start, arm.params)
        self.site = executor.site(self.scope)
        self.num_examples = [client.num_examples for client in self.site.clients]
        first = arm.participation.select(self.num_examples, seed, 1)
        bends = any(stage.control is not None and stage.control.acceleration for stage in arm.stages)
        executor.prepare(self.scope, self.site.groups(first, arm.group), self.site.initial, bends)
        self._measures_memory = reset_peak(executor.pids)

    def start(self) -> State:
        """Before the first round."""
        return State(self.site.initial.clone(), self.arm.after)

    def rounds(self, state: State) -> Iterator[tuple[State, RoundRecord]]:
        """Go on from a state to the arm's last round.

        A model is evaluated here while worker processes are busy with the next round.
        """
        done: tuple[State, RoundRecord] | None = None
        while state.round_number < self.arm.last:
            begun = self._begin(state)
            if done is not None:
                yield self._evaluated(*done)
            done = self._finish(begun)
            state = done[0]
        if done is not None:
            yield self._evaluated(*done)

    def round(self, state: State) -> tuple[State, RoundRecord]:
        """One round."""
        return self._evaluated(*self._finish(self._begin(state)))

    def _evaluated(self, state: State, record: RoundRecord) -> tuple[State, RoundRecord]:
        stage, place = stage_at(self.arm.stages, state.round_number - self.arm.after)
        if stage.evaluates(place):
            metric = self.site.problem.evaluate(state.theta)
            averaged = None if not state.recent else metric  # the mean of one model is that model
            if len(state.recent) > 1:
                averaged = self.site.problem.evaluate(mean_of(state.recent))
            record = replace(record, metric=metric, averaged_metric=averaged)
        return state, record

    def _begin(self, state: State) -> Begun:
        """Ask the round's clients."""
        k = state.round_number + 1
        stage, place = stage_at(self.arm.stages, k - self.arm.after)
        start = time.perf_counter()
        events: list[dict[str, Any]] = []
        if place == 0:  # another rule: what the last one remembered, and answers meant for it, are of no use
            for old in state.late:
                events.append(event(k, old.update.client_id, "its late answer belongs to the last stage: not used"))
            state = replace(state, rule_state={}, control_value=None, late=())
            if k > self.arm.after + 1:
                before, _ = stage_at(self.arm.stages, k - 1 - self.arm.after)
                if type(before.local) is not type(stage.local):
                    state = replace(state, variates={})

        asked = self.arm.participation.select(self.num_examples, self.seed, k)
        delays = {client: self.arm.faults.delay(self.seed, k, client) for client in asked}
        for client, delay in delays.items():
            if delay is None:
                events.append(event(k, client, "dropped out"))
        answering = [client for client in asked if delays[client] is not None]
        order, uplink, downlink = self._order(state, stage, k, asked, answering)
        replies = self._executor.start(self.scope, self.site.groups(answering, self.arm.group), order)
        seconds = time.perf_counter() - start
        return Begun(state, stage, place, delays, replies, uplink, downlink, seconds, events)

    def _finish(self, begun: Begun) -> tuple[State, RoundRecord]:
        """Wait for the answers, and take the server's step."""
        state, stage, place, delays, events = begun.state, begun.stage, begun.place, begun.delays, begun.events
        uplink, downlink, k = begun.uplink, begun.downlink, begun.state.round_number + 1
        replies, client_seconds = begun.replies()
        start = time.perf_counter()
        for reply in replies:
            events += [event(k, reply.update.client_id, note) for note in reply.notes]
        uplink += sum(reply.nbytes for reply in replies)

        in_time = [reply for reply in replies if delays[_id(reply)] == 0]
        updates, late = self._arrivals(state.late, in_time, replies, delays, k, stage.control is not None, events)
        theta, rule_state, value = state.theta, state.rule_state, state.control_value
        outcome = Outcome()
        diagnostics: Diagnostics | None = None
        if updates:
            outcome = self._step(state, stage, place, updates, in_time)
            value = outcome.control_value
            size = theta.numel() * theta.element_size()
            uplink += len(in_time) * (8 * outcome.probes + size * outcome.bends)
            downlink += len(in_time) * size * (outcome.probes + outcome.bends)
            if outcome.result is not None:
                theta, rule_state = outcome.result.theta, outcome.result.state
                diagnostics = outcome.result.diagnostics
            else:
                events.append(event(k, None, f"no step of {outcome.trials} lowered the clients' loss: rolled back"))
        else:
            events.append(event(k, None, "nobody answered in time: the model stays as it is"))

        variates = self._variates(state.variates, in_time)
        if isinstance(stage.local, Moon):
            variates |= {_id(reply): state.theta + _delta(reply) for reply in replies}
        recent = (*state.recent, theta)[-self.arm.average :] if self.arm.average else ()
        state = State(theta, k, rule_state, value, variates, late, recent)
        seconds = begun.seconds + client_seconds + time.perf_counter() - start
        ranks = [u.sketch.rank if isinstance(u.sketch, Sketch) else 0 for u in updates]
        record = RoundRecord(
            k,
            loss=self._mean(in_time, [reply.loss for reply in in_time]),
            seconds=seconds,
            uplink_bytes=0 if self.arm.centralised else uplink,
            downlink_bytes=0 if self.arm.centralised else downlink,
            rank=sum(ranks) / len(ranks) if ranks else 0.0,
            ranks=tuple(ranks),
            local_steps=tuple(reply.local_steps for reply in in_time),
            clients=tuple(u.client_id for u in updates if isinstance(u.client_id, int)),
            damping=outcome.damping,
            step=outcome.step,
            trials=outcome.trials,
            accepted=outcome.result is not None,
            step_length=diagnostics.step_length if diagnostics else 0.0,
            cosine_with_fedavg=diagnostics.cosine_with_fedavg if diagnostics else None,
            effective_rank=diagnostics.effective_rank if diagnostics else None,
            peak_memory_mib=peak_mib(self._executor.pids) if self._measures_memory else None,
            events=tuple(events),
            spectra={str(u.client_id): u.sketch.eigenvalues.tolist() for u in updates if isinstance(u.sketch, Sketch)},
        )
        return state, record

    def _order(
        self, state: State, stage: Stage, k: int, asked: Sequence[int], clients: Sequence[int]
    ) -> tuple[Order, int, int]:
        """What to broadcast to those asked, and the bytes up and down until the clients that answer start."""
        order = Order(
            k, state.theta, stage.local, stage.lr_scale, stage.plan, stage.adaptive_rank, stage.adaptive_steps
        )
        size = state.theta.numel() * state.theta.element_size()
        uplink, downlink = 0, size * len(asked)
        if isinstance(stage.local, Scaffold):
            mine = {m: v for m, v in state.variates.items() if m == SERVER or m in clients}
            order = replace(order, variates=mine)
            downlink *= 2
        elif isinstance(stage.local, Moon):  # clients keep their own last models: nothing is sent
            order = replace(order, variates={m: v for m, v in state.variates.items() if m in clients})
        if order.asks_for_gradients and clients:
            groups = self.site.groups(clients, self.arm.group)
            total = self._executor.gradients(self.scope, groups, state.theta, k).sum(dim=0)
            order = replace(order, gradient_norm=float(total.norm()))
            uplink += size * len(clients)
        return order, uplink, downlink

    def _arrivals(
        self,
        waiting: Sequence[Late],
        in_time: Sequence[Reply],
        replies: Sequence[Reply],
        delays: dict[int, int | None],
        k: int,
        judged: bool,
        events: list[dict[str, Any]],
    ) -> tuple[list[ClientUpdate], tuple[Late, ...]]:
        """The updates of this round, late ones of earlier rounds included, and those that are still to come.

        Where steps are judged and nobody is there to do so, late answers wait for the next round.
        """
        faults = self.arm.faults
        alike = self.arm.participation.kind == "weighted"
        updates = [replace(reply.update, weight=1.0) if alike else reply.update for reply in in_time]
        present = {update.client_id for update in updates}
        arriving = sorted((late for late in waiting if late.arrives == k), key=lambda late: -late.sent)
        still = [late for late in waiting if late.arrives > k]
        if judged and not in_time and arriving:
            events.append(event(k, None, "nobody answered in time to judge a step: late answers wait"))
            still += [replace(late, arrives=k + 1) for late in arriving]
            arriving = []
        for late in arriving:
            client, age = late.update.client_id, k - late.sent
            if client in present:
                events.append(event(k, client, f"late by {age}: a fresher answer is there, not used"))
                continue
            present.add(client)
            weight = (1.0 if alike else late.update.num_examples) * faults.discount**age
            updates.append(replace(late.update, weight=weight))
            events.append(event(k, client, f"late by {age}: used with weight x {faults.discount**age:g}"))
        for reply in replies:
            delay = delays[_id(reply)]
            if delay:
                fate = "" if faults.use_late else ": not used"
                events.append(event(k, _id(reply), f"will be late by {delay}{fate}"))
                if faults.use_late:
                    still.append(Late(reply.update, k, k + delay))
        return updates, tuple(still)

    def _step(
        self, state: State, stage: Stage, place: int, updates: Sequence[ClientUpdate], in_time: Sequence[Reply]
    ) -> Outcome:
        """The server's part."""
        rule: Any = stage.rule_at(place, self.seed)
        k = state.round_number + 1

        apply = aggregator(state.theta, updates)

        def propose(rule: Rule) -> Result[Tensor]:
            return apply(rule, state.rule_state)

        asked = Counter[str]()

        def probe(theta: Tensor) -> float:
            asked["probes"] += 1
            return self._mean(in_time, self._executor.losses(self.scope, groups, theta, k))

        def bend(rule: Rule, result: Result[Tensor]) -> tuple[Result[Tensor], float]:
            """Each client's correction is an update like any other: the same rule weighs it.

            Late clients are not asked. Their curvature counts, their bend does not: the correction is then too short.
            """
            asked["bends"] += 1
            v = result.theta - state.theta
            bends = self._executor.bends(self.scope, groups, state.theta, v, k)
            corrections = {i: torch.zeros_like(v) for i in (update.client_id for update in updates) if i is not None}
            for reply, gradient in zip(in_time, bends, strict=True):
                assert isinstance(stage.local, GaussNewton)
                assert isinstance(reply.update.sketch, Sketch)
                corrections[_id(reply)] = 0.5 * stage.local(reply.update.sketch, gradient)
            full: Any = rule
            a = apply(replace(full, step=1.0), {}, corrections).theta - state.theta  # v has the rule's step in it
            mean = apply(FedAvg()).theta - state.theta
            length = float((v + a).norm())
            cosine = float((v + a) @ mean) / (length * float(mean.norm()) or 1.0)
            diagnostics = replace(result.diagnostics, step_length=length, cosine_with_fedavg=cosine)
            ratio = 2 * float(a.norm()) / (float(v.norm()) or 1.0)
            return replace(result, theta=result.theta + a, diagnostics=diagnostics), ratio

        settings: dict[str, Any] = {name: _setting(rule, name) for name in ("damping", "step")}
        control = stage.control
        if control is None:
            return Outcome(propose(rule), state.control_value, 1, **settings)
        groups = self.site.groups([_id(reply) for reply in in_time], self.arm.group)
        value = control.start(rule) if state.control_value is None else state.control_value
        loss = self._mean(in_time, [reply.loss for reply in in_time])
        trial = controlled(control, rule, value, loss, propose, probe, bend)
        settings["damping" if control.parameter(rule) == "damping" else "step"] = trial.used
        return Outcome(trial.result, trial.value, trial.trials, **settings, **asked)

    def _mean(self, replies: Sequence[Reply], losses: Sequence[float]) -> float:
        """The clients' losses with the weights that they have in the aggregation."""
        alike = self.arm.participation.kind == "weighted"
        weights = [1 if alike else reply.update.num_examples for reply in replies]
        total = math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        return total / sum(weights) if replies else math.nan

    def _variates(self, old: dict[int, Tensor], in_time: Sequence[Reply]) -> dict[int, Tensor]:
        """SCAFFOLD's control variates after the round; the server's moves by the mean change over all clients."""
        new = dict(old)
        for reply in in_time:
            if reply.variate_change is not None:
                change = reply.variate_change
                for place, share in ((_id(reply), 1.0), (SERVER, 1 / len(self.num_examples))):
                    new[place] = new.get(place, torch.zeros_like(change)) + share * change
        return new


def _id(reply: Reply) -> int:
    assert isinstance(reply.update.client_id, int)
    return reply.update.client_id


def _delta(reply: Reply) -> Tensor:
    assert isinstance(reply.update.delta, Tensor)
    return reply.update.delta


def _setting(rule: Rule, name: str) -> float | None:
    value = getattr(rule, name, None)
    return float(value) if isinstance(value, int | float) else None
