"""Rounds in a shared basis: two trips, and a memory of every client, on problems whose answer is known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from federation.cases import SIZES, START, Planned, data, linear, lines, numbers, run, stage, texts
from fipa import Client, Diverged, FedAvg, FipaError, Problem, Residual
from fipa.aggregation.shared import SharedFIPA
from fipa.clients.descent import SGD
from fipa.clients.gradient import FullGradient
from fipa.curvature.basis import BasisPlan
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.judges import Judges
from fipa.federation.participation import Participation
from fipa.federation.shared import LONGEST, STEEPEST, Shared
from fipa.federation.site import Site
from fipa.federation.stage import Stage
from fipa.federation.trust import TrustRegion
from fipa.problems.fitting import misfit

ONE = Participation("uniform", 1)
NEWTON = {"local": FullGradient(), "plan": BasisPlan()}


def optimum(seed: int = 0) -> np.ndarray:
    """The minimum of all clients' weighted losses."""
    clients = numbers(lines, seed)
    H = sum(c.n * c.curvature for c in clients)
    b = sum(c.n * c.X.T @ c.y / len(c.y) for c in clients)
    return np.linalg.solve(H, b)


def shared(rounds: int = 1, control: Any = None, **settings: Any) -> Any:
    return stage(SharedFIPA(**settings), rounds=rounds, control=control, **NEWTON)


def test_one_round_solves_a_linear_problem() -> None:
    """Three gradients span both dimensions: a Newton step, which takes a linear problem to its end."""
    ((state, record),) = run(shared())
    np.testing.assert_allclose(state.theta.numpy(), optimum(), rtol=1e-5, atol=1e-6)
    assert record["trips"] == 2
    assert record["messages"] == 12


def test_a_memory_of_every_client_solves_it_one_client_at_a_time() -> None:
    """Each client's loss is a quadratic: once all have told theirs in a whole basis, the model is at the optimum."""
    rounds = run(shared(rounds=12, damping=1e-6), participation=ONE, seed=3)
    told: set[int] = set()
    for state, record in rounds:
        if len(Shared.of(state.rule_state).basis) == 2:
            told |= set(record["clients"])
        if len(told) == 3:
            np.testing.assert_allclose(state.theta.numpy(), optimum(3), rtol=1e-4, atol=1e-4)
    assert len(told) == 3


def test_a_trust_region_never_raises_the_loss_of_clients_that_are_all_here() -> None:
    rounds = run(shared(rounds=6, control=TrustRegion(initial=1e-3)))
    losses = [record["loss"] for _, record in rounds]
    assert all(after <= before for before, after in pairwise(losses))
    np.testing.assert_allclose(rounds[-1][0].theta.numpy(), optimum(), rtol=1e-4, atol=1e-4)
    lengths = [record["step_length"] for _, record in rounds]
    assert lengths[1] > 2 * 1e-3 * np.linalg.norm(START)  # what comes true makes it bolder, also within a round


def test_nobody_is_asked_to_judge_where_only_some_are_here() -> None:
    rounds = run(shared(rounds=4, control=TrustRegion()), participation=ONE, seed=3)
    assert [record["trips"] for _, record in rounds] == [2] * 4
    assert [record["trials"] for _, record in rounds] == [1] * 4


def test_the_damping_is_the_usual_curvature_where_only_some_are_here() -> None:
    """That of the quadratics of all who are known; where all are here there is none, and what is given holds."""
    rounds = run(shared(rounds=3, control=TrustRegion()), participation=ONE, seed=3)
    for state, record in rounds:
        memory = Shared.of(state.rule_state)
        values = torch.linalg.eigvalsh(memory.clients.curvature(memory.clients.weights(record["round"])))
        assert record["damping"] == pytest.approx(float(values.clamp(min=0).sqrt().mean()) ** 2, rel=1e-6)
        assert record["damping"] > 0
    ((_, record),) = run(shared(control=TrustRegion()))
    assert record["damping"] is None
    ((_, record),) = run(shared(control=TrustRegion(), damping=0.3), participation=ONE, seed=3)
    assert record["damping"] == 0.3


def test_who_has_a_copy_of_the_basis_is_sent_only_what_is_new() -> None:
    rounds = run(shared(rounds=3, columns=2))
    first, second, third = (record["downlink_bytes"] for _, record in rounds)
    whole = 3 * 2 * 2 * 4  # three clients, two columns of two numbers
    model = 3 * 2 * 8  # on the first of two trips
    assert first == model + whole
    assert (second, third) == (model, model)  # both dimensions are there


def test_uplink_is_a_gradient_and_half_a_matrix() -> None:
    ((_, record),) = run(shared())
    assert record["uplink_bytes"] == 3 * (2 * 8 + 8 + 3 * 8)  # gradient, loss, 2 x 2 matrix


def test_late_answers_are_quadratics_of_an_earlier_model() -> None:
    """Client 2 answers round 1 in round 3: its gradient then is of another model, and the memory knows which."""
    faults = Planned(plan={(1, 2): 2, (2, 2): None, (3, 2): None, (4, 2): 0})
    rounds = run(shared(rounds=4, damping=1e-9), faults=faults)
    state, record = rounds[2]
    assert any(client == 2 and "late by 2: used" in text for client, text in texts(record))
    memory = Shared.of(state.rule_state)
    place = memory.clients.place(2)
    assert place is not None
    moved = memory.basis.columns.double() @ memory.clients.moves[place]
    np.testing.assert_allclose(moved.numpy(), state.theta.numpy() - np.asarray(START), rtol=1e-5, atol=1e-6)
    client = numbers()[2]
    np.testing.assert_allclose(-memory.clients.updates[place].numpy(), client.gradient(np.asarray(START)), rtol=1e-10)


def test_clients_that_train_are_weighed_in_the_basis() -> None:
    """With all directions in the basis this is the completed rule."""
    rule, local = SharedFIPA(damping=0.3), SGD(lr=0.1, steps=2)
    ((state, _),) = run(stage(rule, local, plan=BasisPlan()))
    clients, theta = numbers(), np.asarray(START)
    deltas = [c.sgd(theta, 0.1, 2) for c in clients]
    w = np.asarray([c.n for c in clients]) / 10
    H = sum(a * c.curvature for a, c in zip(w, clients, strict=True))
    b = sum(a * (c.curvature + 0.3 * np.eye(2)) @ d for a, c, d in zip(w, clients, deltas, strict=True))
    expected = theta + np.linalg.solve(H + 0.3 * np.eye(2), b)
    np.testing.assert_allclose(state.theta.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_clients_that_train_can_be_judged() -> None:
    control = StepControl(select="best", initial=0.01)
    rounds = run(stage(SharedFIPA(damping=0.1), SGD(lr=0.1, steps=2), 3, BasisPlan(), control=control))
    losses = [record["loss"] for _, record in rounds]
    assert losses == sorted(losses, reverse=True)


def test_a_trust_region_is_not_for_clients_that_train() -> None:
    with pytest.raises(FipaError, match="clients that send gradients"):
        stage(SharedFIPA(damping=0.1), SGD(lr=0.1, steps=2), plan=BasisPlan(), control=TrustRegion())
    with pytest.raises(FipaError, match="weight_decay and radius are for clients that send gradients"):
        stage(SharedFIPA(weight_decay=0.1), SGD(lr=0.1, steps=2), plan=BasisPlan())
    with pytest.raises(FipaError, match="say how they train"):
        Stage(SharedFIPA(), None, 1, BasisPlan())


def test_weight_decay_is_the_servers() -> None:
    ((state, _),) = run(shared(weight_decay=0.5))
    clients = numbers()
    H = sum(c.n / 10 * c.curvature for c in clients) + 0.5 * np.eye(2)
    b = sum(c.n / 10 * c.X.T @ c.y / len(c.y) for c in clients)
    np.testing.assert_allclose(state.theta.numpy(), np.linalg.solve(H, b), rtol=1e-5, atol=1e-6)


def test_a_warm_up_gives_gradients_and_columns_for_free() -> None:
    """The last update of each client in the warm-up stands for its gradient until it is asked."""
    warmup = stage(FedAvg(), SGD(lr=0.1, steps=1), 3)
    rounds = run(Arm("arm", (warmup, shared(damping=0.1)), participation=ONE), seed=3)
    state, record = rounds[-1]
    memory = Shared.of(state.rule_state)
    before = {client for _, one in rounds[:-1] for client in one["clients"]}
    assert set(memory.clients.ids.tolist()) == before | set(record["clients"])
    told = [memory.clients.place(client) for client in record["clients"]]
    assert all(int(memory.clients.rounds[place]) == 4 for place in told)


def test_state_survives_its_tensors() -> None:
    rounds = run(shared(rounds=3, control=TrustRegion()), participation=ONE, seed=3)
    state, _ = rounds[-1]
    memory = Shared.of(state.rule_state)
    again = memory.tensors()
    assert again.keys() == state.rule_state.keys()
    assert all(torch.equal(tensor, state.rule_state[name]) for name, tensor in again.items())


def test_a_full_basis_makes_room() -> None:
    rounds = run(shared(rounds=5, columns=1, damping=0.1))
    for state, _ in rounds:
        assert len(Shared.of(state.rule_state).basis) == 1
    losses = [record["loss"] for _, record in rounds]
    assert losses[-1] < losses[0]


def test_a_client_that_is_always_late_by_one_is_remembered() -> None:
    faults = Planned(plan={(k, 2): 1 for k in range(1, 7)})
    rounds = run(shared(rounds=6, damping=1e-6), faults=faults)
    memory = Shared.of(rounds[-1][0].rule_state)
    place = memory.clients.place(2)
    assert place is not None
    assert int(memory.clients.visits[place]) == 5


def test_a_late_answer_does_not_replace_a_fresher_one() -> None:
    faults = Planned(plan={(1, 2): 2, (3, 2): None})
    rounds = run(shared(rounds=3, damping=1e-6), faults=faults)
    memory = Shared.of(rounds[-1][0].rule_state)
    place = memory.clients.place(2)
    assert place is not None
    assert (int(memory.clients.visits[place]), int(memory.clients.rounds[place])) == (2, 2)


def test_a_warm_up_outlives_a_round_that_comes_to_nothing() -> None:
    warmup = stage(FedAvg(), SGD(lr=0.1, steps=1), 2)
    faults = Planned(plan={(3, client): None for client in range(3)})
    rounds = run(Arm("arm", (warmup, shared(rounds=2, damping=0.1)), faults=faults))
    assert set(rounds[2][0].seen) == {0, 1, 2}
    assert rounds[3][0].seen == {}
    assert len(Shared.of(rounds[3][0].rule_state).clients) == 3


def zeros(seed: int) -> Any:
    problem = lines(seed)
    problem.initial = torch.zeros_like(problem.initial)
    return problem


def test_parameters_that_are_all_zero_have_a_radius() -> None:
    rounds = run(shared(rounds=2, control=TrustRegion()), zeros)
    assert rounds[-1][1]["loss"] < rounds[0][1]["loss"]


@pytest.mark.parametrize("damping", [None, 1e-3])
def test_the_first_step_from_zero_is_limited_by_its_damping_where_only_some_are_here(damping: float | None) -> None:
    """Nobody can come back to judge it, and zeros give no scale: a tiny share of 1 would take many rounds to grow."""
    limited = run(
        shared(rounds=3, control=TrustRegion(initial=1e-6), damping=damping), zeros, participation=ONE, seed=3
    )
    free = run(shared(damping=limited[0][1]["damping"]), zeros, participation=ONE, seed=3)
    torch.testing.assert_close(limited[0][0].theta, free[0][0].theta)
    assert limited[0][0].control_value == pytest.approx(limited[0][1]["step_length"])


@pytest.mark.long
def test_a_run_that_has_converged_stays_alive() -> None:
    rounds = run(shared(rounds=60, control=TrustRegion()))
    np.testing.assert_allclose(rounds[-1][0].theta.numpy(), optimum(), rtol=1e-4, atol=1e-4)


def test_the_basis_never_has_more_columns_than_it_may() -> None:
    rounds = run(shared(rounds=4, columns=1, damping=0.1, weight_decay=0.1))
    assert all(len(Shared.of(state.rule_state).basis) <= 1 for state, _ in rounds)


def test_one_client_cannot_outweigh_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who tells a curvature far above the usual is refused by name; the round is that of the others."""
    honest = Site.curvatures

    def lying(site: Site, clients: Any, *about: Any) -> Any:
        answers = honest(site, clients, *about)
        longer = {1: 1e6}
        return [
            (answer.view(torch.float64) * longer.get(client, 1.0)).view(torch.uint8)
            for client, answer in zip(clients, answers, strict=True)
        ]

    monkeypatch.setattr(Site, "curvatures", lying)
    ((state, record),) = run(shared())
    assert [(client, text) for client, text in texts(record) if "refused" in text] == [
        (1, f"refused: its curvature is more than {STEEPEST} times as steep as that of most")
    ]
    assert record["accepted"]
    known = Shared.of(state.rule_state).clients
    assert known.place(1) is None
    assert sorted(known.ids.tolist()) == [0, 2]


def test_one_gradient_cannot_outweigh_all_others() -> None:
    """One that is a thousand times too long counts as one that is ten times as long as usual, and is named."""

    def loud(seed: int) -> Any:
        points = [data(seed, m, n) for m, n in enumerate(SIZES)]
        clients = [Residual(misfit, x, y * (1e4 if m == 1 else 1)) for m, (x, y) in enumerate(points)]
        return Problem(linear(), clients, lambda model: model.weight.square().sum())

    ((state, record),) = run(shared(), loud)
    assert any(client == 1 and "times as long as usual: shortened" in text for client, text in texts(record))
    known = [float(update.norm()) for update in Shared.of(state.rule_state).clients.updates]
    assert known[1] == pytest.approx(LONGEST * max(known[0], known[2]), rel=1e-3)
    assert not any("shortened" in text for _, text in texts(run(shared())[0][1]))


def test_gradients_that_are_mostly_zero_shorten_nobody() -> None:
    """Two clients at their optimum say nothing of how long the third one's gradient may be."""

    def still(seed: int) -> Any:
        points = [data(seed, m, n) for m, n in enumerate(SIZES)]
        at = torch.tensor(START, dtype=torch.float64)
        clients = [Residual(misfit, x, y if m == 2 else x @ at) for m, (x, y) in enumerate(points)]
        return Problem(linear(), clients, lambda model: model.weight.square().sum())

    ((_, record),) = run(shared(), still)
    assert record["accepted"]
    assert not any("shortened" in text for _, text in texts(record))


def test_many_clients_tell_fewer_parts() -> None:
    rule = SharedFIPA(columns=200)
    parts = [rule.settled(torch.float32, clients).parts for clients in (10, 50, 100, 300, None)]
    assert parts == [4, 4, 2, 1, 1]
    assert rule.settled(torch.float64, 10).parts == 0
    assert SharedFIPA(parts=7).settled(torch.float64, None).parts == 7


def test_a_first_trial_that_diverges_makes_the_next_one_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, tried = Judges.probe, []

    def probe(judges: Judges, theta: torch.Tensor) -> Any:
        tried.append(float((theta - torch.tensor(START)).norm()))
        if len(tried) == 1:
            raise Diverged("the loss is no number")
        return (yield from honest(judges, theta))

    monkeypatch.setattr(Judges, "probe", probe)
    ((_, record),) = run(shared(control=TrustRegion(initial=0.1)))
    assert tried[1] < 0.6 * tried[0]
    assert record["accepted"]
    assert record["loss_after"] < record["loss"]


def test_damping_fades_where_the_stage_says_so() -> None:
    rounds = run(stage(SharedFIPA(damping=0.8), rounds=3, damping_decay=0.5, **NEWTON))
    assert [record["damping"] for _, record in rounds] == pytest.approx([0.8, 0.4, 0.2])


def single(seed: int) -> Any:
    """The problem in single precision, where gradients and matrices travel in few bits."""
    clients = [Residual(misfit, *(t.float() for t in data(seed, m, n))) for m, n in enumerate(SIZES)]
    return Problem(linear().float(), clients, lambda model: model.weight.square().sum())


def two_terms(seed: int) -> Any:
    clients = [Client((Residual(misfit, *data(seed, m, 4)), Residual(misfit, *data(seed, m, 3)))) for m in range(2)]
    return Problem(linear(), clients, lambda model: model.weight.square().sum())


@pytest.mark.parametrize("participation", [Participation(), ONE])
def test_in_single_precision_gradients_come_in_parts_of_8_bits(participation: Participation) -> None:
    """In four where all clients take part, but in no more than there are examples; else in one."""
    ((state, record),) = run(shared(control=TrustRegion()), single, participation=participation)
    everybody, word = participation.kind == "full", 4
    k = 2 if everybody else 1
    matrix = k * (k + 1) // 2 + word * k  # one half in 8 bits, and a scale for each row
    part = 2 + word  # two entries in 8 bits, and the scale of a block
    parts = [min(4, n) for n in SIZES] if everybody else [1]
    losses = 8 * record["trials"] * len(parts) if everybody else 0
    assert record["uplink_bytes"] == losses + sum(8 + matrix + part * n for n in parts)
    assert Shared.of(state.rule_state).clients.updates[0].dtype == torch.float32


def test_few_bits_lead_to_nearly_the_same_place() -> None:
    rounds = run(shared(rounds=12, control=TrustRegion()), single)
    np.testing.assert_allclose(rounds[-1][0].theta.numpy(), optimum(), rtol=0.02, atol=0.01)
    exact = run(shared(rounds=12, control=TrustRegion(), parts=0, bits=32), single)
    np.testing.assert_allclose(exact[-1][0].theta.numpy(), optimum(), rtol=1e-3, atol=1e-3)


def wide(seed: int) -> Any:
    """Forty parameters in single precision, which more rounds than one have to find."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(40, 1, generator=generator)
    inputs = [torch.randn(60, 40, generator=generator) for _ in range(3)]
    model = torch.nn.Linear(40, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return Problem(
        model,
        [Residual(misfit, x, (x @ truth)[:, 0]) for x in inputs],
        lambda model: float((model.weight.T - truth).norm()),
    )


def test_columns_of_2_bits_take_half_of_the_bytes_and_lead_to_the_same_place() -> None:
    spent, left = {}, {}
    for bits in (4, 2):
        rounds = run(shared(rounds=12, control=TrustRegion(), column_bits=bits), wide)
        spent[bits] = rounds[0][1]["downlink_bytes"] - 3 * 40 * 4 * (1 + rounds[0][1]["trials"])
        left[bits] = float(rounds[-1][1]["metric"])
    columns = 12  # three clients, four parts each
    root = 4 * columns * columns
    assert spent == {bits: 3 * (size * columns + root) for bits, size in ((4, 20), (2, 12))}
    assert max(left.values()) < 1e-2


def test_a_loss_with_several_terms_comes_in_one_part() -> None:
    ((_, record),) = run(shared(parts=2, bits=32), two_terms)
    scale, size, word = 4, 2, 8
    assert record["uplink_bytes"] == 2 * (8 + size + scale + 3 * word)  # loss, codes, matrix
    assert record["accepted"]
