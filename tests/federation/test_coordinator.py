"""A round is a conversation: these tests are the transport, and say whatever they like."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fipa import FIPA, AdditiveFIPA, ClientUpdate, Diverged, FedAvg, FipaError, Layout, Sketch
from fipa.clients.descent import SGD
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.moon import Moon
from fipa.clients.scaffold import Scaffold
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation.adaptive import AdaptiveRank
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.coordinator import Coordinator, State
from fipa.federation.exact import mark_of
from fipa.federation.messages import Answers, Ask, Bend, Gradient, Late, Loss, Order, Reply, Who
from fipa.federation.participation import Faults, Participation
from fipa.federation.record import RoundRecord
from fipa.federation.stage import Stage

THETA = torch.tensor([1.0, -2.0], dtype=torch.float64)
LAYOUT = Layout(("w",), ((2,),))
SGD_RULE = SGD(lr=0.1, steps=1)
Answer = Callable[[Ask], Answers]


def arm(stage: Stage, **settings: Any) -> Arm:
    return Arm("arm", (stage,), **settings)


def talk(coordinator: Coordinator, state: State, answer: Answer) -> tuple[State, RoundRecord, list[Ask]]:
    """One round with these answers, and all that was asked besides who is there."""
    round_, asks, answers = coordinator.round(state), [], None
    while True:
        try:
            ask = round_.send(answers)
        except StopIteration as end:
            return *end.value, asks
        if not isinstance(ask.question, Who):
            asks.append(ask)
        answers = answer(ask)


def reply(client: int, delta: float = 1.0, **more: Any) -> Reply:
    examples = more.pop("examples", 10)
    sketch = more.pop("sketch", None)
    return Reply(ClientUpdate(torch.full_like(THETA, delta), examples, sketch, client), **more)


def there(*clients: int) -> Answers:
    return Answers(dict.fromkeys(clients, 1))


def texts(record: RoundRecord) -> list[tuple[Any, str]]:
    return [(event["client"], event["text"]) for event in record.events]


def judged(values: list[float], **more: Any) -> tuple[Answer, list[Ask]]:
    """Clients 0 and 1, who tell their loss at one proposed model after the other."""
    asks: list[Ask] = []

    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0, 1)
        asks.append(ask)
        if isinstance(ask.question, Order):
            return Answers({client: reply(client, loss=1.0) for client in ask.clients}, **more)
        return Answers(dict.fromkeys(ask.clients, values.pop(0)), **more)

    return answer, asks


def test_a_model_travels_once_however_many_questions_are_about_it() -> None:
    """The step that was taken is the next round's model: those who judged it have kept it."""
    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 3, control=StepControl(adapt="step"))), 0)
    answer, asks = judged([5.0, 0.5, 0.4])
    state, _, _ = talk(coordinator, coordinator.start(THETA), answer)
    order, first, second = asks
    assert [ask.keep for ask in asks] == [True] * 3
    assert [set(ask.held) for ask in asks] == [set(), set(), set()]
    assert {len(marks) for marks in state.held.values()} == {3}
    state, _, _ = talk(coordinator, state, answer)
    assert asks[3].held == {0, 1}
    assert torch.equal(asks[3].question.theta, second.question.theta)
    assert state.held[0][1] == mark_of(second.question.theta)
    assert mark_of(first.question.theta) in state.held[0]
    assert mark_of(order.question.theta) not in state.held[0]  # three are kept


def test_who_does_not_answer_is_sent_the_model_again() -> None:
    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 3, control=StepControl(adapt="step"))), 0)
    answer, asks = judged([0.5, 0.4])

    def half(ask: Ask) -> Answers:
        answers = answer(ask)
        gone = isinstance(ask.question, Loss)
        return replace(answers, values={c: v for c, v in answers.values.items() if c == 0 or not gone})

    state, _, _ = talk(coordinator, coordinator.start(THETA), half)
    talk(coordinator, state, half)
    assert asks[2].held == {0}


@pytest.mark.parametrize("local", [SGD_RULE, None], ids=["without control", "apps that train"])
def test_models_are_not_kept_for_nothing(local: Any) -> None:
    control = StepControl(adapt="step") if local is None else None
    coordinator = Coordinator(arm(Stage(FedAvg(), local, 1, control=control)), 0)
    answer, asks = judged([0.5])
    state, _, _ = talk(coordinator, coordinator.start(THETA), answer)
    assert not any(ask.keep or ask.held for ask in asks)
    assert state.held == {}


def test_a_transport_may_keep_nothing() -> None:
    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 1, control=StepControl(adapt="step"))), 0)
    state, _, _ = talk(coordinator, coordinator.start(THETA), judged([0.5], kept=False)[0])
    assert state.held == {}


def test_who_is_there_is_asked_first_and_only_they_get_orders() -> None:
    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            assert ask.clients == ()
            return there(3, 5, 9)
        return Answers({client: reply(client) for client in ask.clients}, uplink=7, downlink=11, messages=4)

    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 2), participation=Participation("uniform", 2)), 0)
    state, record, (ask,) = talk(coordinator, coordinator.start(THETA), answer)
    assert set(ask.clients) < {3, 5, 9}
    assert record.clients == ask.clients
    assert isinstance(ask.question, Order)
    assert torch.equal(state.theta, THETA + 1)
    assert (record.uplink_bytes, record.downlink_bytes, record.trips, record.messages) == (7, 11, 1, 4)


def test_missing_refused_and_too_few() -> None:
    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0, 1, 2)
        return Answers({0: reply(0)}, missing={1: "did not answer in time"}, refused={2: "has NaN"}, enough=False)

    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 2)), 0)
    state, record, _ = talk(coordinator, coordinator.start(THETA), answer)
    assert torch.equal(state.theta, THETA)
    assert not record.accepted
    assert texts(record) == [
        (1, "did not answer in time"),
        (2, "refused: its answer has NaN"),
        (None, "1 of 3 clients answered, fewer than the quorum: the model stays as it is"),
    ]


def test_late_answers_wait_for_a_quorum_and_survive_it() -> None:
    """Round 1: one of two is late. Round 2: it arrives, but there is no quorum. Round 3: it counts, by a quarter."""
    late = Late(reply(1, delta=4.0).update, 1, 2)
    plan = [
        Answers({0: reply(0)}),
        Answers({}, late=(late,), missing={0: "gone", 1: "gone"}, enough=False),
        Answers({0: reply(0)}, missing={1: "gone"}),
    ]
    faults = Faults(discount=0.5)
    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 3), faults=faults), 0)
    state, records = coordinator.start(THETA), []
    for answers in plan:
        state, record, _ = talk(
            coordinator, state, lambda ask, answers=answers: there(0, 1) if isinstance(ask.question, Who) else answers
        )
        records.append(record)
    assert (None, "fewer than the quorum answered: late answers wait") in texts(records[1])
    assert (1, "late by 2: used with weight x 0.25") in texts(records[2])
    expected = (10 * 1.0 + 2.5 * 4.0) / 12.5
    torch.testing.assert_close(state.theta, THETA + 1 + expected)
    assert records[2].clients == (0, 1)


def test_late_sums_are_of_no_use() -> None:
    late = Late(reply(1).update, 1, 2)
    coordinator = Coordinator(arm(Stage(AdditiveFIPA(0.1), SGD_RULE, 3, AdditivePlan(width=2))), 0)
    state = State(THETA, 1, late=(late,))
    _, record, _ = talk(
        coordinator, state, lambda ask: there(0, 1) if isinstance(ask.question, Who) else Answers({}, missing={0: "x"})
    )
    assert (1, "late by 1: not used") in texts(record)


@pytest.mark.parametrize("rule", [Scaffold(lr=0.1, steps=1), Moon(lr=0.1, steps=1)])
def test_memories_come_back_as_they_were_handed_in(rule: Any) -> None:
    """The coordinator does not look into them: on Flower they stay with the clients, and a number stands for them."""
    seen: list[Any] = []

    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0, 1)
        assert isinstance(ask.question, Order)
        seen.append(dict(ask.question.memories))
        message = {"change": torch.ones_like(THETA)} if rule.tells else {}
        return Answers(
            {client: reply(client, message=message, memory=f"{client} in {ask.round_number}") for client in ask.clients}
        )

    coordinator = Coordinator(arm(Stage(FedAvg(), rule, 5), participation=Participation("uniform", 1)), 0)
    state, asked = coordinator.start(THETA), []
    for _ in range(5):
        state, record, _ = talk(coordinator, state, answer)
        asked += record.clients
    for k, client in enumerate(asked):
        before = [j for j in range(k) if asked[j] == client]
        assert seen[k] == ({client: f"{client} in {before[-1] + 1}"} if before else {})
    if rule.tells:  # the server's variate has moved by a half for each answer of two clients
        torch.testing.assert_close(state.shared["variate"], torch.full_like(THETA, 2.5))


def sketched(client: int, loss: float, delta: float = 1.0) -> Reply:
    sketch = Sketch(torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), LAYOUT)
    return reply(client, delta, loss=loss, sketch=sketch)


def test_a_controlled_round_asks_for_the_loss_until_it_falls() -> None:
    losses = iter([9.0, 0.5])

    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0, 1)
        if isinstance(ask.question, Loss):
            value = next(losses)
            return Answers(dict.fromkeys(ask.clients, value), uplink=16, messages=4)
        return Answers({client: sketched(client, 1.0) for client in ask.clients})

    stage = Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan(), control=StepControl(caution=4.0, boldness=0.5))
    coordinator = Coordinator(arm(stage), 0)
    state, record, asks = talk(coordinator, coordinator.start(THETA), answer)
    assert [type(ask.question) for ask in asks] == [Order, Loss, Loss]
    assert (record.trials, record.accepted, record.damping, record.trips) == (2, True, 4.0, 3)
    assert state.control_value == 2.0
    torch.testing.assert_close(state.theta, THETA + 1 / 5)
    assert torch.equal(state.theta, asks[-1].question.theta)


def test_a_judge_that_leaves_counts_neither_before_nor_after() -> None:
    """Client 1, at loss 100, does not judge: from 1 to 2 is no progress, though the mean fell from 50 to 2."""

    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0, 1)
        if isinstance(ask.question, Loss):
            return Answers({0: 2.0}, missing={1: "did not answer in time"})
        return Answers({0: sketched(0, 1.0), 1: sketched(1, 100.0)})

    stage = Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan(), control=StepControl(trials=3))
    coordinator = Coordinator(arm(stage), 0)
    state, record, _ = talk(coordinator, coordinator.start(THETA), answer)
    assert (record.trials, record.accepted) == (3, False)
    assert torch.equal(state.theta, THETA)
    assert texts(record)[-1] == (None, "no step of 3 lowered the clients' loss: rolled back")


def test_nobody_judges() -> None:
    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0)
        return Answers({}, missing={0: "gone"}) if isinstance(ask.question, Loss) else Answers({0: sketched(0, 1.0)})

    stage = Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan(), control=StepControl(trials=2))
    coordinator = Coordinator(arm(stage), 0)
    state, record, _ = talk(coordinator, coordinator.start(THETA), answer)
    assert not record.accepted
    assert torch.equal(state.theta, THETA)


def test_clients_that_tell_no_loss_cannot_judge() -> None:
    stage = Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan(), control=StepControl())
    coordinator = Coordinator(arm(stage), 0)

    def silent(ask: Ask) -> Answers:
        told = reply(0, sketch=sketched(0, 1.0).update.sketch)
        if isinstance(ask.question, Loss):
            return Answers({}, refused={0: "failed: it has no evaluate function"})
        return there(0) if isinstance(ask.question, Who) else Answers({0: told})

    with pytest.raises(FipaError, match="step control needs the clients' loss"):
        talk(coordinator, coordinator.start(THETA), silent)


def test_clients_that_tell_no_loss_are_asked_for_it_once() -> None:
    """At the broadcast model in the first round; after that the loss of the accepted trial is theirs there."""
    stage = Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan(), control=StepControl())
    coordinator = Coordinator(arm(stage), 0)
    losses = iter([3.0, 2.0, 1.0])

    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Loss):
            return Answers({0: next(losses)})
        told = reply(0, sketch=sketched(0, 1.0).update.sketch)
        return there(0) if isinstance(ask.question, Who) else Answers({0: told})

    state, record, asks = talk(coordinator, coordinator.start(THETA), answer)
    assert [type(ask.question) for ask in asks] == [Order, Loss, Loss]
    assert (record.loss, record.loss_after, state.judged) == (3.0, 2.0, {0: 2.0})
    _, record, asks = talk(coordinator, state, answer)
    assert [type(ask.question) for ask in asks] == [Order, Loss]
    assert (record.loss, record.loss_after) == (2.0, 1.0)


def test_adaptive_ranks_need_gradients_first() -> None:
    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0, 1)
        if isinstance(ask.question, Gradient):
            return Answers({client: torch.full_like(THETA, 1.0 + client) for client in ask.clients})
        return Answers({client: sketched(client, 1.0) for client in ask.clients})

    stage = Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan(), adaptive_rank=AdaptiveRank())
    coordinator = Coordinator(arm(stage), 0)
    _, record, asks = talk(coordinator, coordinator.start(THETA), answer)
    assert [type(ask.question) for ask in asks] == [Gradient, Order]
    assert asks[1].question.gradient_norm == pytest.approx(3 * math.sqrt(2))
    assert record.trips == 2


def test_the_floor_goes_with_the_order() -> None:
    coordinator = Coordinator(arm(Stage(FIPA(floor=0.25), GaussNewton(), 2, SketchPlan())), 0)
    _, _, (ask,) = talk(
        coordinator,
        coordinator.start(THETA),
        lambda ask: there(0) if isinstance(ask.question, Who) else Answers({0: sketched(0, 1.0)}),
    )
    assert ask.question.floor == 0.25


def test_bends_are_asked_at_the_broadcast_model_along_the_step() -> None:
    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0)
        if isinstance(ask.question, Bend):
            return Answers({0: torch.zeros_like(THETA)})
        return Answers({0: 0.0}) if isinstance(ask.question, Loss) else Answers({0: sketched(0, 1.0)})

    stage = Stage(FIPA(1.0), GaussNewton(), 2, SketchPlan(), control=StepControl(acceleration=0.75))
    coordinator = Coordinator(arm(stage), 0)
    state, _, asks = talk(coordinator, coordinator.start(THETA), answer)
    bend = next(ask.question for ask in asks if isinstance(ask.question, Bend))
    assert torch.equal(bend.theta, THETA)
    torch.testing.assert_close(bend.direction, torch.full_like(THETA, 0.5))
    torch.testing.assert_close(state.theta, THETA + 0.5)


@pytest.mark.parametrize("survives", [True, False])
def test_a_rule_that_refuses_costs_the_round_or_the_run(survives: bool) -> None:
    def answer(ask: Ask) -> Answers:
        return there(0) if isinstance(ask.question, Who) else Answers({0: reply(0)})  # no sketch

    coordinator = Coordinator(arm(Stage(FIPA(1.0), SGD_RULE, 2, SketchPlan())), 0, survives=survives)
    if not survives:
        with pytest.raises(FipaError, match="sent no sketch"):
            talk(coordinator, coordinator.start(THETA), answer)
        return
    state, record, _ = talk(coordinator, coordinator.start(THETA), answer)
    assert torch.equal(state.theta, THETA)
    assert "no step, the model stays as it is: client 0 sent no sketch" in texts(record)[0][1]


def test_buffers_and_metrics_are_weighted_by_examples() -> None:
    def one(client: int, examples: int, value: float) -> Reply:
        buffers = {"running_mean": torch.tensor([value])}
        return reply(client, examples=examples, buffers=buffers, metrics={"accuracy": value})

    def answer(ask: Ask) -> Answers:
        return there(0, 1) if isinstance(ask.question, Who) else Answers({0: one(0, 10, 1.0), 1: one(1, 30, 5.0)})

    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 2)), 0)
    start = coordinator.start(THETA, {"running_mean": torch.zeros(1)})
    state, record, _ = talk(coordinator, start, answer)
    assert state.buffers["running_mean"].item() == pytest.approx(4.0)
    assert record.metrics == {"accuracy": pytest.approx(4.0)}


def test_the_mean_of_the_last_models() -> None:
    def answer(ask: Ask) -> Answers:
        if isinstance(ask.question, Who):
            return there(0)
        return Answers({0: reply(0, delta=float(ask.round_number))})

    coordinator = Coordinator(arm(Stage(FedAvg(), SGD_RULE, 5), average=3), 0)
    state, thetas = coordinator.start(THETA), []
    for _ in range(5):
        state, _, _ = talk(coordinator, state, answer)
        thetas.append(state.theta)
        torch.testing.assert_close(state.mean, torch.stack(thetas[-3:]).mean(dim=0))
    assert len(state.recent) == 3


def test_stages_begin_without_what_the_last_one_left() -> None:
    late = Late(reply(1).update, 1, 2)
    two = Arm("arm", (Stage(FedAvg(), Scaffold(lr=0.1, steps=1), 1), Stage(FedAvg(), SGD_RULE, 2)))
    state = State(THETA, 1, {"momentum": THETA}, 3.0, {"variate": THETA}, {0: "old"}, (late,))
    after, record, (ask,) = talk(
        Coordinator(two, 0), state, lambda ask: there(0) if isinstance(ask.question, Who) else Answers({0: reply(0)})
    )
    assert (ask.question.shared, ask.question.memories) == ({}, {})
    assert (after.rule_state, after.control_value, after.late) == ({}, None, ())
    assert texts(record) == [(1, "its late answer belongs to the last stage: not used")]


def test_a_step_into_nan_is_told() -> None:
    coordinator = Coordinator(arm(Stage(FedAvg(step=1e308), SGD_RULE, 1)), 0)

    def answer(ask: Ask) -> Answers:
        return there(0) if isinstance(ask.question, Who) else Answers({0: reply(0, delta=1e300)})

    with pytest.raises(Diverged):
        talk(coordinator, coordinator.start(THETA), answer)
