"""Rounds written out in numpy: averages, stages, faults, control variates, and what is recorded of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from federation.cases import (
    DOUBLE,
    SIZES,
    START,
    Planned,
    alike,
    data,
    fedavg,
    fipa_step,
    linear,
    lines,
    mean_loss,
    numbers,
    run,
    stage,
    texts,
)
from fipa import FIPA, FOOF, AdditiveFIPA, DiagonalFisher, Diverged, FedAvg, FedAvgM, FipaError, Problem, Residual
from fipa.clients.descent import SGD
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.scaffold import Scaffold
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.covariance import CovariancePlan
from fipa.curvature.diagonal import DiagonalPlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.coordinator import State
from fipa.federation.participation import Participation
from fipa.problems.fitting import misfit, sine

THETA = np.array(START)


def close(theta: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(theta.numpy(), expected, rtol=tolerance, atol=tolerance)


# --- one round ---


@pytest.mark.parametrize("factory", [lines, alike])
def test_a_round_of_fedavg(factory: object) -> None:
    clients = numbers(factory)
    counts = [c.n for c in clients]
    mean = fedavg([c.sgd(THETA, 0.1, 2) for c in clients], counts)
    ((state, record),) = run(stage(FedAvg(step=0.7)), factory)
    close(state.theta, THETA + 0.7 * mean)
    assert state.round_number == record["round"] == 1
    assert record["metric"] == pytest.approx(float(np.sum((THETA + 0.7 * mean) ** 2)))
    assert record["loss"] == pytest.approx(mean_loss(clients, THETA))
    assert record["clients"] == list(range(len(clients)))
    assert record["local_steps"] == [2] * len(clients)
    assert record["step_length"] == pytest.approx(0.7 * float(np.linalg.norm(mean)))
    assert record["cosine_with_fedavg"] == pytest.approx(1.0)
    assert (record["trials"], record["accepted"]) == (1, True)
    assert (record["damping"], record["step"]) == (None, 0.7)
    assert record["events"] == []
    assert (record["rank"], record["ranks"], record["spectra"]) == (0.0, [0] * len(clients), {})


@pytest.mark.parametrize("group", [1, 3, 16])
def test_groups_change_nothing_but_rounding(group: int) -> None:
    rounds = stage(FIPA(0.1), SGD(lr=0.1, epochs=2, batch=3), 3, SketchPlan(rank=None))
    expected = run(rounds, alike)[-1][0].theta
    torch.testing.assert_close(run(rounds, alike, group=group)[-1][0].theta, expected, rtol=1e-10, atol=0)


def test_the_broadcast_state_is_left_alone() -> None:
    start = State(torch.tensor(START, dtype=DOUBLE))
    run(stage(FedAvg(), rounds=2), state=start)
    assert start.theta.tolist() == list(START)
    assert start.round_number == 0


def test_ranks_and_spectra_are_recorded() -> None:
    (_, record) = run(stage(FIPA(0.1), plan=SketchPlan(rank=None)))[0]
    values = [np.linalg.eigvalsh(c.curvature)[::-1] for c in numbers()]
    assert record["ranks"] == [2, 2, 2]
    assert record["rank"] == 2.0
    for m in range(3):
        assert record["spectra"][str(m)] == pytest.approx(values[m].tolist())
    shares = np.array(SIZES) / sum(SIZES)
    total = np.linalg.eigvalsh(sum(w * c.curvature for w, c in zip(shares, numbers(), strict=True)))
    assert record["effective_rank"] == pytest.approx(float(np.sum(total / (total + 0.1))))


# --- bytes: a loss of 8, and two parameters of 8 each; three clients ---

BYTES = {
    "fedavg": (FedAvg(), None, 16),
    "rank 1": (FIPA(0.1), SketchPlan(rank=1), 16 + (2 + 1) * 8),
    "rank 2": (FIPA(0.1), SketchPlan(rank=2), 16 + (4 + 2) * 8),
    "diagonal": (DiagonalFisher(0.1), DiagonalPlan(), 16 + 2 * 8),
    "covariance": (FOOF(0.1), CovariancePlan(), 16 + 4 * 8),
    "additive": (AdditiveFIPA(0.1), AdditivePlan(width=5), 16 + 2 * 5 * 8 + 2 * 8),  # the update itself goes once
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_round(name: str) -> None:
    rule, plan, payload = BYTES[name]
    (_, record) = run(stage(rule, plan=plan))[0]
    assert record["uplink_bytes"] == 3 * (8 + payload)
    assert record["downlink_bytes"] == 3 * 16


def test_bytes_of_scaffold_and_of_adaptive_ranks() -> None:
    (_, record) = run(stage(FedAvg(), Scaffold(lr=0.1, steps=2)))[0]
    assert record["uplink_bytes"] == 3 * (8 + 16 + 16)
    assert record["downlink_bytes"] == 3 * 2 * 16
    adaptive = AdaptiveRank(constant=1e-9)
    (_, record) = run(stage(FIPA(0.1), plan=SketchPlan(), adaptive_rank=adaptive))[0]
    assert record["ranks"] == [2, 2, 2]
    assert record["uplink_bytes"] == 3 * (8 + 16 + 48) + 3 * 16  # gradients, for the norm of their sum
    assert record["downlink_bytes"] == 3 * 16  # the model goes out once: clients keep it for the second question
    assert (record["trips"], record["messages"]) == (2, 2 * 3 * 2)


# --- stages ---


def test_warm_up_then_fipa_with_a_scaled_learning_rate() -> None:
    clients, counts = numbers(), list(SIZES)
    local = SGD(lr=0.1, steps=2, lr_decay=0.9)
    fipa_rounds = stage(FIPA(0.8), local, 2, SketchPlan(rank=None), lr_scale=0.5, damping_decay=0.25)
    arm = Arm("a", (stage(FedAvg(), local, 2), fipa_rounds))
    assert arm.last == 4
    rounds, theta = run(arm), THETA
    for k, (state, record) in enumerate(rounds, start=1):
        lr = 0.1 * 0.9 ** (k - 1) * (1.0 if k <= 2 else 0.5)
        deltas = [c.sgd(theta, lr, 2) for c in clients]
        if k <= 2:
            theta = theta + fedavg(deltas, counts)
        else:
            theta = theta + fipa_step([c.curvature for c in clients], deltas, counts, 0.8 * 0.25 ** (k - 3))
        close(state.theta, theta)
        assert record["damping"] == (None if k <= 2 else pytest.approx(0.8 * 0.25 ** (k - 3)))


def test_momentum_lasts_for_a_stage() -> None:
    clients, counts = numbers(), list(SIZES)
    one = stage(FedAvgM(0.5), rounds=2)
    rounds, theta, v = run(Arm("a", (one, one))), THETA, 0.0
    for k, (state, _) in enumerate(rounds):
        if k == 2:
            v = 0.0
        v = 0.5 * v + fedavg([c.sgd(theta, 0.1, 2) for c in clients], counts)
        theta = theta + v
        close(state.theta, theta)


# --- participation ---


@pytest.mark.parametrize("kind", ["uniform", "weighted"])
def test_some_clients_per_round(kind: str) -> None:
    """Those drawn in proportion to their examples count alike, else they would count twice."""
    clients, theta = numbers(), THETA
    participation = Participation(kind, 2)
    seen = set()
    for k, (state, record) in enumerate(run(stage(FedAvg(), rounds=6), participation=participation), start=1):
        chosen = record["clients"]
        assert chosen == participation.select(SIZES, 0, k)
        weights = [1.0 if kind == "weighted" else SIZES[m] for m in chosen]
        losses = [mean_loss([clients[m]], theta) for m in chosen]
        loss = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
        theta = theta + fedavg([clients[m].sgd(theta, 0.1, 2) for m in chosen], weights)
        close(state.theta, theta)
        assert record["loss"] == pytest.approx(loss)
        assert record["uplink_bytes"] == 2 * 24
        seen.add(tuple(chosen))
    assert len(seen) > 1


# --- faults ---


def averaged(rounds: int, plan: dict[tuple[int, int], int | None], **settings: object) -> object:
    more = {"participation": settings.pop("participation")} if "participation" in settings else {}
    return run(stage(FedAvg(), rounds=rounds), faults=Planned(plan=plan, **settings), **more)


def test_dropped_client() -> None:
    clients = numbers()
    ((state, record),) = averaged(1, {(1, 1): None})
    close(state.theta, THETA + fedavg([clients[m].sgd(THETA, 0.1, 2) for m in (0, 2)], [2, 5]))
    assert record["clients"] == [0, 2]
    assert record["loss"] == pytest.approx(mean_loss([clients[0], clients[2]], THETA))
    assert record["events"] == [{"round": 1, "client": 1, "text": "dropped out"}]
    assert record["uplink_bytes"] == 2 * 24


@pytest.mark.parametrize("weighted", [False, True])
def test_late_answer_is_used_with_a_discounted_weight(weighted: bool) -> None:
    """Client 1 answers round 1 in round 3, where it drops out: 0.3^2 of its 3 examples, or of 1."""
    clients = numbers()
    more = {"participation": Participation("weighted", 3)} if weighted else {}
    n = [1.0, 1.0, 1.0] if weighted else [2.0, 3.0, 5.0]
    rounds = averaged(3, {(1, 1): 2, (2, 1): None, (3, 1): None}, discount=0.3, **more)
    old = clients[1].sgd(THETA, 0.1, 2)
    theta = THETA
    for k, (state, record) in enumerate(rounds, start=1):
        deltas, weights = [clients[m].sgd(theta, 0.1, 2) for m in (0, 2)], [n[0], n[2]]
        if k == 3:
            deltas, weights = [*deltas, old], [*weights, 0.09 * n[1]]
        theta = theta + fedavg(deltas, weights)
        close(state.theta, theta)
        assert sorted(record["clients"]) == ([0, 1, 2] if k == 3 else [0, 2])
        assert len(state.late) == (1 if k < 3 else 0)
    assert texts(rounds[0][1]) == [(1, "will be late by 2")]
    assert rounds[0][1]["uplink_bytes"] == 3 * 24
    assert (1, "late by 2: used with weight x 0.09") in texts(rounds[2][1])
    assert rounds[2][1]["local_steps"] == [2, 2]


def test_late_sketches_go_with_their_update() -> None:
    """FIPA with the curvature and the update of round 1; on a linear problem the former does not change."""
    clients = numbers()
    plan = {(1, 2): 1, (2, 2): None}
    local = SGD(lr=0.1, steps=2)
    rounds = run(stage(FIPA(0.2), local, 2, SketchPlan(rank=None)), faults=Planned(plan=plan, discount=0.5))
    H, old = [c.curvature for c in clients], clients[2].sgd(THETA, 0.1, 2)
    theta = THETA + fipa_step(H[:2], [c.sgd(THETA, 0.1, 2) for c in clients[:2]], [2, 3], 0.2)
    close(rounds[0][0].theta, theta)
    deltas = [*(c.sgd(theta, 0.1, 2) for c in clients[:2]), old]
    close(rounds[1][0].theta, theta + fipa_step(H, deltas, [2, 3, 2.5], 0.2))


def test_late_answers_that_are_not_used() -> None:
    plan = {(1, 1): 1, (2, 1): None}
    rounds = averaged(2, plan, use_late=False)
    for (state, _), (expected, _) in zip(rounds, averaged(2, {(1, 1): None, (2, 1): None}), strict=True):
        assert torch.equal(state.theta, expected.theta)
        assert state.late == ()
    assert texts(rounds[0][1]) == [(1, "will be late by 1: not used")]


def test_a_fresher_answer_wins() -> None:
    """Over one that comes late in the same round."""
    rounds = averaged(2, {(1, 1): 1})
    clients, theta = numbers(), rounds[0][0].theta.numpy()
    close(rounds[1][0].theta, theta + fedavg([c.sgd(theta, 0.1, 2) for c in clients], SIZES))
    assert texts(rounds[1][1]) == [(1, "late by 1: a fresher answer is there, not used")]


def test_the_fresher_of_two_late_answers_wins() -> None:
    rounds = averaged(3, {(1, 1): 2, (2, 1): 1, (3, 1): None})
    clients, (first, second) = numbers(), (state.theta.numpy() for state, _ in rounds[:2])
    deltas = [clients[0].sgd(second, 0.1, 2), clients[1].sgd(first, 0.1, 2), clients[2].sgd(second, 0.1, 2)]
    close(rounds[2][0].theta, second + fedavg(deltas, [2, 1.5, 5]))
    assert (1, "late by 1: used with weight x 0.5") in texts(rounds[2][1])
    assert (1, "late by 2: a fresher answer is there, not used") in texts(rounds[2][1])


@pytest.mark.parametrize("control", [None, StepControl()])
def test_nobody_answers(control: StepControl | None) -> None:
    faults = Planned(plan=dict.fromkeys([(1, 0), (1, 1), (1, 2)]))
    rounds = run(stage(FedAvg(), rounds=2, control=control), faults=faults)
    state, record = rounds[0]
    assert state.theta.tolist() == list(START)
    assert (record["trials"], record["accepted"]) == (0, False)
    assert record["loss"] is None
    assert (record["uplink_bytes"], record["downlink_bytes"]) == (0, 3 * 16)  # they were sent the model all the same
    assert (record["clients"], record["step_length"], record["rank"]) == ([], 0.0, 0.0)
    assert (None, "nobody answered in time: the model stays as it is") in texts(record)
    assert not torch.equal(rounds[1][0].theta, state.theta)


def test_only_late_answers_are_there() -> None:
    """With weights in proportion to the examples, where no step is judged."""
    plan = {(1, 0): 1, (1, 1): 1} | dict.fromkeys([(2, 0), (2, 1), (2, 2)])
    rounds = run(stage(FedAvg(), rounds=2), faults=Planned(plan=plan))
    clients, theta = numbers(), rounds[0][0].theta.numpy()
    close(rounds[1][0].theta, theta + fedavg([clients[m].sgd(THETA, 0.1, 2) for m in (0, 1)], [2, 3]))
    assert rounds[1][1]["loss"] is None


def test_late_answers_wait_until_somebody_can_judge_a_step() -> None:
    plan = {(1, 0): 1} | dict.fromkeys([(2, 0), (2, 1), (2, 2), (3, 0)])
    rounds = run(stage(FedAvg(), rounds=3, control=StepControl()), faults=Planned(plan=plan))
    assert torch.equal(rounds[1][0].theta, rounds[0][0].theta)
    assert rounds[1][0].control_value == rounds[0][0].control_value
    assert rounds[1][1]["trials"] == 0
    assert (None, "nobody answered in time to judge a step: late answers wait") in texts(rounds[1][1])
    assert (0, "late by 2: used with weight x 0.25") in texts(rounds[2][1])


def test_late_answer_of_an_earlier_stage_without_sketch() -> None:
    """It cannot be used by a rule that needs one, and must not end the run."""
    arm = Arm(
        "a",
        (stage(FedAvg()), stage(FIPA(0.2), plan=SketchPlan(rank=None))),
        faults=Planned(plan={(1, 1): 1, (2, 1): None}),
    )
    rounds = run(arm)
    clients, theta = numbers(), rounds[0][0].theta.numpy()
    pair = [clients[0], clients[2]]
    expected = fipa_step([c.curvature for c in pair], [c.sgd(theta, 0.1, 2) for c in pair], [2, 5], 0.2)
    close(rounds[1][0].theta, theta + expected)
    assert any(client == 1 and "not used" in text for client, text in texts(rounds[1][1]))


# --- SCAFFOLD ---


@pytest.mark.parametrize("count", [2, 3])
def test_scaffold_is_option_two_of_the_paper(count: int) -> None:
    """c_i+ = c_i - c + (x - y_i) / (K lr), c+ = c + |S| / N mean of the changes; x by N_m, as FedAvg."""
    clients, theta = numbers(), THETA
    participation = Participation("uniform", count)
    lr, K = 0.1, 3
    c, own = np.zeros(2), [np.zeros(2) for _ in clients]
    for state, record in run(stage(FedAvg(), Scaffold(lr=lr, steps=K), 6), participation=participation):
        chosen, moved = record["clients"], []
        for m in chosen:
            y = theta.copy()
            for _ in range(K):
                y = y - lr * (clients[m].gradient(y) - own[m] + c)
            moved.append(y)
        changes = []
        for m, y in zip(chosen, moved, strict=True):
            new = own[m] - c + (theta - y) / (K * lr)
            changes.append(new - own[m])
            own[m] = new
        theta = theta + fedavg([y - theta for y in moved], [SIZES[m] for m in chosen])
        c = c + len(chosen) / 3 * np.mean(changes, axis=0)
        close(state.theta, theta)
        close(state.shared["variate"], c)
        for m in chosen:
            close(state.memories[m]["variate"], own[m])


def test_scaffold_of_identical_clients_is_fedavg() -> None:
    def twins(seed: int) -> Problem:
        return Problem(linear(), [Residual(misfit, *data(0, 0, 4))] * 3, lambda model: 0.0)

    scaffold = run(stage(FedAvg(), Scaffold(lr=0.1, steps=3), 5), twins)
    plain = run(stage(FedAvg(), SGD(lr=0.1, steps=3), 5), twins)
    for (one, _), (other, _) in zip(scaffold, plain, strict=True):
        torch.testing.assert_close(one.theta, other.theta, rtol=1e-12, atol=1e-14)
    assert float(scaffold[0][0].shared["variate"].norm()) > 0


def test_late_answers_leave_the_variates_alone() -> None:
    rounds = run(stage(FedAvg(), Scaffold(lr=0.1, steps=3), 2), faults=Planned(plan={(1, 1): 1, (2, 1): None}))
    assert set(rounds[-1][0].memories) == {0, 2}
    messages = [reply["variate"] for reply in rounds[0][0].memories.values()]  # of the first round: all of a variate
    close(rounds[0][0].shared["variate"], sum(messages).numpy() / 3)


# --- adaptive rank and steps ---


def test_adaptive_rank_and_steps_record_what_they_clamp() -> None:
    clients = numbers()
    adaptive = {"adaptive_rank": AdaptiveRank(constant=1e9), "adaptive_steps": AdaptiveSteps(constant=1e-3, most=4)}
    (_, record) = run(stage(FIPA(0.1), SGD(lr=1e-3, steps=1), plan=SketchPlan(), **adaptive))[0]
    assert record["ranks"] == [1, 1, 1]
    assert record["local_steps"] == [4, 4, 4]
    gradients = [c.gradient(THETA) for c in clients]
    total = np.linalg.norm(sum(gradients))
    for m, g in enumerate(gradients):
        raw = 1e9 / (np.linalg.norm(g) + total)
        assert (m, f"rank threshold {raw:.3g} clamped to 0.99") in texts(record)
        notes = [text for client, text in texts(record) if client == m]
        assert len(notes) == 2
        assert "clamped to 4" in notes[1]


def test_adaptive_steps_by_hand() -> None:
    clients, lr = numbers(), 0.05
    adaptive = {"adaptive_rank": AdaptiveRank(constant=1e-12), "adaptive_steps": AdaptiveSteps(constant=0.1)}
    ((state, record),) = run(stage(FIPA(0.1), SGD(lr=lr, steps=1), plan=SketchPlan(), **adaptive))
    expected = []
    for c in clients:
        smallest = np.linalg.eigvalsh(c.curvature)[0]
        steps = math.log(0.1 / np.linalg.norm(c.gradient(THETA))) / math.log(1 - lr * smallest)
        expected.append(min(200, math.ceil(steps)))
    assert record["local_steps"] == expected
    assert len(set(expected)) > 1
    deltas = [c.sgd(THETA, lr, steps) for c, steps in zip(clients, expected, strict=True)]
    close(state.theta, THETA + fipa_step([c.curvature for c in clients], deltas, SIZES, 0.1))


# --- the paper's claim ---

CURVE = partial(sine, waves=2, samples=40, hidden=(6, 6), grid=64)


@pytest.mark.long
def test_fipa_with_full_sketches_follows_centralised_gauss_newton() -> None:
    """Clients solve their own problems exactly; the server's damping is then that of the pooled problem."""
    rounds = 20
    federated = run(stage(FIPA(damping=0.05), GaussNewton(), rounds, SketchPlan(rank=None)), CURVE)
    central = run(stage(FedAvg(), GaussNewton(damping=0.05), rounds), CURVE, centralised=True)
    for (one, record), (other, reference) in zip(federated, central, strict=True):
        assert float((one.theta - other.theta).norm() / other.theta.norm()) < 1e-6
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert federated[-1][1]["metric"] < 0.1 * federated[0][1]["metric"]


def test_centralised_arm_has_one_client() -> None:
    ((state, record),) = run(stage(FedAvg()), centralised=True)
    clients = numbers()
    X, y = (np.concatenate([getattr(c, name) for c in clients]) for name in ("X", "y"))
    moved = THETA
    for _ in range(2):
        moved = moved - 0.1 * X.T @ (X @ moved - y) / len(y)
    close(state.theta, moved)
    assert record["clients"] == [0]
    assert record["uplink_bytes"] == record["downlink_bytes"] == 0


# --- leaving the finite numbers ---


def test_divergence_names_the_client() -> None:
    with pytest.raises(Diverged, match="round 1: local training of client 0"):
        run(stage(FedAvg(), SGD(lr=1e200, steps=4)))
    broken = State(torch.tensor([math.nan, 0.0], dtype=DOUBLE), 1)
    with pytest.raises(Diverged, match="round 2: the loss of client 0 is nan"):
        run(stage(FedAvg(), rounds=2), state=broken)


def test_too_many_clients_are_asked() -> None:
    with pytest.raises(FipaError, match="count = 4, but there are only 3"):
        run(stage(FedAvg()), participation=Participation("uniform", 4))


def test_no_rounds_left() -> None:
    rounds = run(stage(FedAvg(), rounds=2))
    assert run(stage(FedAvg(), rounds=2), state=rounds[-1][0]) == []
    more = run(stage(FedAvg(), rounds=3), state=replace(rounds[-1][0]))
    assert [record["round"] for _, record in more] == [3]
