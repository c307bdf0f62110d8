"""One process or two, one factory or another: the numbers are the same to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from federation.cases import START, comparable, data, linear, lines, stage
from fipa import FIPA, AdditiveFIPA, Diverged, FedAvg, FedAvgM, Problem, Residual
from fipa.clients.local_rules import SGD, Adam, GaussNewton, Scaffold
from fipa.federation.control import StepControl
from fipa.federation.engine import Arm, Federation, State
from fipa.federation.executor import Executor
from fipa.federation.participation import Faults, Participation
from fipa.federation.plans import AdaptiveRank, AdaptiveSteps, AdditivePlan, SketchPlan
from fipa.federation.site import Order
from fipa.problems.fitting import misfit, sine

FOUR = partial(sine, waves=2, samples=12, hidden=(4,), edges=(0.0, 0.3, 0.5, 0.8, 1.0), grid=16)
FULL = SketchPlan(rank=None)
ARMS = {
    "adam, fipa, control": Arm(
        "a", (stage(FIPA(0.1), Adam(lr=0.01, epochs=1, batch=5), 3, FULL, control=StepControl()),), group=3
    ),
    "scaffold, momentum, batches": Arm(
        "a", (stage(FedAvgM(0.5), Scaffold(lr=0.1, epochs=1, batch=6), 3),), Participation("uniform", 3), group=2
    ),
    "adaptive": Arm(
        "a",
        (
            stage(
                FIPA(0.1), SGD(lr=0.1, steps=1), 2, FULL, adaptive_rank=AdaptiveRank(), adaptive_steps=AdaptiveSteps()
            ),
        ),
        group=2,
    ),
    "faults, gauss-newton": Arm(
        "a", (stage(FIPA(0.1), GaussNewton(), 4, FULL),), faults=Faults(drop=0.2, late=0.4, max_delay=2), group=1
    ),
    "additive": Arm("a", (stage(AdditiveFIPA(0.1), SGD(lr=0.1, steps=2), 2, AdditivePlan(width=8)),), group=2),
    "centralised": Arm("a", (stage(FedAvg(), GaussNewton(0.1), 2),), centralised=True),
}


def rounds(executor: Executor, arm: Arm, seed: int = 0) -> list[tuple[State, dict[str, object]]]:
    federation = Federation(arm, seed, executor)
    return list(federation.rounds(federation.start()))


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    with Executor(FOUR, workers=2) as executor:
        yield executor


@pytest.mark.parametrize("name", ARMS)
def test_two_workers_compute_the_same_bits_as_one(name: str, two: Executor) -> None:
    with Executor(FOUR) as one:
        expected = rounds(one, ARMS[name], seed=1)
    found = rounds(two, ARMS[name], seed=1)
    assert len(found) == ARMS[name].rounds
    for (state, record), (same, reference) in zip(found, expected, strict=True):
        assert torch.equal(state.theta, same.theta)
        assert comparable(record) == comparable(reference)
        assert state.variates.keys() == same.variates.keys()
        assert all(torch.equal(state.variates[key], same.variates[key]) for key in same.variates)


def test_errors_come_back_from_workers(two: Executor) -> None:
    arm = Arm("a", (stage(FedAvg(), SGD(lr=1e200, steps=4), 1),), group=1)
    with pytest.raises(Diverged, match="round 1: local training of client 0 ended"):
        rounds(two, arm)
    assert len(rounds(two, ARMS["centralised"])) == 2


def test_workers_change_from_seed_to_seed(two: Executor) -> None:
    """Only one problem is kept in each process, and it is the right one."""
    arm = ARMS["faults, gauss-newton"]
    with Executor(FOUR) as one:
        expected = {seed: rounds(one, arm, seed)[-1][0].theta for seed in (0, 1)}
    assert not torch.equal(expected[0], expected[1])
    for seed in (0, 1, 0):
        assert torch.equal(rounds(two, arm, seed)[-1][0].theta, expected[seed])


def test_answers_come_in_the_order_of_the_groups() -> None:
    with Executor(lines) as executor:
        order = Order(1, torch.tensor(START, dtype=torch.float64), SGD(lr=0.1, steps=1))
        groups = [(2,), (0,), (1,)]
        assert [r.update.client_id for r in executor.work(0, False, groups, order)] == [2, 0, 1]
        site = executor.site(0, False)
        assert executor.losses(0, False, groups, order.theta) == [site.losses((m,), order.theta)[0] for m in (2, 0, 1)]
        gradients = executor.gradients(0, False, groups, order.theta)
        assert torch.equal(gradients, torch.cat([site.gradients((m,), order.theta) for m in (2, 0, 1)]))


def test_sites_are_kept_by_seed_and_kind() -> None:
    with Executor(lines) as executor:
        site = executor.site(0, False)
        assert executor.site(0, False) is site
        assert len(executor.site(0, True).clients) == 1
        assert executor.site(1, False).seed == 1
        assert not torch.equal(executor.site(1, False).clients[0].data[0].inputs[0], site.clients[0].data[0].inputs[0])


def test_two_arms_on_one_problem_start_alike() -> None:
    """A user's factory may return the problem that it made before, whose model has been trained since."""
    problem = Problem(linear(), [Residual(misfit, *data(0, 0, 4))], lambda model: 0.0)
    with Executor(lambda seed: problem) as executor:
        for centralised in (False, True, False):
            federation = Federation(Arm("a", (stage(FedAvg(), rounds=2),), centralised=centralised), 0, executor)
            start = federation.start()
            assert start.theta.tolist() == list(START)
            list(federation.rounds(start))


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        with Executor(lines, threads=2):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
