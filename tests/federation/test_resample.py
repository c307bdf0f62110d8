"""New data for every round: the same ones in any order, in any process, and for those who judge a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from federation.cases import DOUBLE, linear, run, stage
from fipa import FIPA, Client, FedAvg, FipaError, Problem, Residual
from fipa.clients.descent import SGD
from fipa.clients.gauss_newton import GaussNewton
from fipa.curvature.sketch import SketchPlan
from fipa.federation.adaptive import AdaptiveRank
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.messages import Order
from fipa.federation.site import Site
from fipa.pde import Points
from fipa.problems.elliptic import elliptic, poisson
from fipa.problems.fitting import misfit

FRESH = Points(interior=12, boundary=4, test=16, fresh=True)
LINE = partial(elliptic, cuts=((0.3, 0.6),), points=FRESH, hidden=(4,))
ENDS = (0, 2)  # clients of one form, which are side by side
SQUARE = partial(poisson, points=FRESH, hidden=(4,))
FULL = SketchPlan(rank=None)


# --- points of an equation ---


def data(clients: Sequence[Client]) -> list[Tensor]:
    return [tensor for client in clients for term in client.data for tensor in term.inputs]


def same(one: Sequence[Client], other: Sequence[Client]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(data(one), data(other), strict=True))


def test_points_stay_unless_they_are_to_be_fresh() -> None:
    assert elliptic(0, points=Points(interior=5), hidden=(4,)).resample is None
    assert LINE(0).resample is not None


@pytest.mark.parametrize("make", [LINE, SQUARE])
def test_each_round_has_points_of_its_own(make: Callable[[int], Problem]) -> None:
    problem, again = make(0), make(0)
    draws = {k: problem.resample(k) for k in (0, 1, 2, 3)}
    assert same(draws[0], problem.clients)
    for k in (3, 1, 2, 3, 0):  # in any order, by any problem of the seed
        assert same(again.resample(k), draws[k])
    interior = [clients[0].data[0].inputs[0] for clients in draws.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(interior) for b in interior[:i])
    assert not same(make(1).resample(1), draws[1])


def test_fresh_points_stay_in_their_regions_and_on_their_faces() -> None:
    problem = SQUARE(0)
    for k in range(1, 6):
        for client, (low, high) in zip(problem.resample(k), ((0.0, 0.5), (0.5, 1.0)), strict=True):
            (x, _), (s, g) = (term.inputs for term in client.data)
            assert (len(x), len(s)) == (12, 12)
            assert low <= float(x[:, 0].min()) <= float(x[:, 0].max()) <= high
            assert bool(((s == 0) | (s == 1)).any(dim=1).all())
            assert float(g.abs().max()) < 1e-14


# --- a site ---


def loss_by_hand(clients: Sequence[Client], problem: Problem) -> list[float]:
    return [sum(term.loss(problem.model).item() for term in client.data) for client in clients]


def test_a_site_has_the_data_of_the_round_that_it_is_asked_for() -> None:
    problem = SQUARE(0)
    site = Site(problem, 0)
    for k in (2, 0, 1, 2, 2, 1):
        expected = loss_by_hand(SQUARE(0).resample(k), problem)
        assert site.losses((0, 1), problem.initial, k) == pytest.approx(expected, rel=1e-12)
        assert site.losses((1,), problem.initial, k) == pytest.approx(expected[1:], rel=1e-12)
    assert len({site.losses((0,), problem.initial, k)[0] for k in range(4)}) == 4


@pytest.mark.long
def test_gradients_and_work_follow_the_round() -> None:
    site, fixed = Site(LINE(0), 0), LINE(0)
    for k in (3, 1):
        clients = LINE(0).resample(k)
        still = Site(Problem(fixed.model, clients, fixed.metric), 0)  # a problem with the data of that round for good
        theta = fixed.initial
        assert torch.equal(site.gradients(ENDS, theta, k), still.gradients(ENDS, theta, k))
        order = Order(k, theta, GaussNewton(0.1), plan=FULL)
        for found, expected in zip(site.work(ENDS, order), still.work(ENDS, order), strict=True):
            assert torch.equal(found.update.delta, expected.update.delta)
            assert torch.equal(found.update.sketch.eigenvalues, expected.update.sketch.eigenvalues)
            assert found.loss == expected.loss


def test_a_centralised_site_pools_the_data_of_the_round() -> None:
    problem = SQUARE(0)
    site = Site(problem, 0, centralised=True)
    expected = loss_by_hand(SQUARE(0).resample(4), problem)
    assert site.losses((0,), problem.initial, 4) == pytest.approx([sum(expected) / 2], rel=1e-12)
    assert len(site.clients) == 1


# --- rounds ---


def moving(seed: int, values: Callable[[int], float] = lambda k: 10.0 * k) -> Problem:
    """One client with one example, 1 -> 10 k in round k; the parameter starts at zero."""

    def draw(k: int) -> list[Client]:
        return [Client((Residual(misfit, torch.ones(1, 1, dtype=DOUBLE), torch.tensor([values(k)], dtype=DOUBLE)),))]

    return Problem(linear([0.0]), draw(0), lambda model: model.weight.item(), scale="linear", resample=draw)


def test_steps_are_judged_on_the_data_of_their_round() -> None:
    """Each round leads from 10 (k - 1) to 10 k; on any other round's data, that would be no better."""
    arm = stage(FIPA(1e-12), GaussNewton(), 4, FULL, control=StepControl())
    for k, (_, record) in enumerate(run(arm, moving), start=1):
        assert record["metric"] == pytest.approx(10 * k)
        assert (record["trials"], record["accepted"]) == (1, True)
        assert record["loss"] == pytest.approx(50)


@pytest.mark.long
def test_probes_ask_for_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, problem = [], SQUARE(0)
    losses = Site.losses

    def spy(self: Site, clients: Sequence[int], theta: Tensor, k: int = 0) -> list[float]:
        found = losses(self, clients, theta, k)
        if k:
            problem.load(theta)
            resampled = problem.resample(k)
            asked.append((k, found, [loss_by_hand(resampled, problem)[m] for m in clients]))
        return found

    monkeypatch.setattr(Site, "losses", spy)
    run(stage(FIPA(), GaussNewton(), 3, FULL, control=StepControl()), SQUARE)
    assert sorted({k for k, _, _ in asked}) == [1, 2, 3]
    for _, found, expected in asked:
        assert found == pytest.approx(expected, rel=1e-10)


def test_gradients_for_an_adaptive_rank_are_those_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' own, and their sum, which is asked for before the round."""
    told = []
    choose = AdaptiveRank.choose

    def spy(self: AdaptiveRank, k: int, own: float, summed: float, examples: int) -> object:
        told.append((k, own, summed))
        return choose(self, k, own, summed, examples)

    monkeypatch.setattr(AdaptiveRank, "choose", spy)
    one = stage(FIPA(0.1), SGD(lr=0.01, steps=1), 2, SketchPlan(), adaptive_rank=AdaptiveRank())
    rounds = run(one, LINE, group=1)
    problem = LINE(0)
    for k, theta in ((1, problem.initial), (2, rounds[0][0].theta)):
        problem.load(theta)
        gradients = []
        for client in problem.resample(k):
            loss = sum(term.loss(problem.model) for term in client.data)
            parts = torch.autograd.grad(loss, list(problem.model.parameters()))
            gradients.append(torch.cat([part.reshape(-1) for part in parts]))
        expected = [(k, float(g.norm()), float(sum(gradients).norm())) for g in gradients]
        found = told[3 * (k - 1) : 3 * k]
        assert [x for row in found for x in row] == pytest.approx([x for row in expected for x in row], rel=1e-10)
    assert len(told) == 6


def test_a_second_arm_starts_from_the_first_rounds_data_again() -> None:
    arm = Arm("a", (stage(FIPA(0.1), GaussNewton(), 3, FULL),))
    with Executor(LINE) as executor:
        results = []
        for _ in range(2):
            federation = Federation(arm, 0, executor)
            results.append([state.theta for state, _ in federation.rounds(federation.start())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_run_goes_on_as_if_it_had_never_stopped() -> None:
    arm = stage(FIPA(0.1), GaussNewton(), 3, FULL)
    whole = run(arm, LINE)
    middle = whole[0][0]
    rest = run(arm, LINE, state=State(middle.theta, middle.round_number))
    assert torch.equal(rest[-1][0].theta, whole[-1][0].theta)


# --- data of another form ---


def one(n: int, function: Callable[..., Tensor] = misfit) -> Client:
    return Client((Residual(function, torch.ones(n, 1, dtype=DOUBLE), torch.ones(n, dtype=DOUBLE)),))


FORMS: dict[str, Callable[[], list[Client]]] = {
    "more examples": lambda: [one(3), one(4)],
    "fewer clients": lambda: [one(3)],
    "more clients": lambda: [one(3), one(3), one(3)],
    "more terms": lambda: [one(3), Client((*one(3).data, *one(3).data))],
    "another function": lambda: [one(3), one(3, lambda u, x, y: u(x)[:, 0] + y)],
    "nobody": list,
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "group"), [*((name, 1) for name in FORMS), ("more examples", 16)])
def test_data_of_another_form(name: str, group: int) -> None:
    def problem(seed: int) -> Problem:
        return Problem(linear([0.0]), [one(3), one(3)], lambda m: 0.0, resample=lambda k: FORMS[name]())

    with pytest.raises(FipaError, match=r"resample\(1\) returned data of another form than the problem's clients"):
        run(stage(FedAvg(), SGD(lr=0.1, steps=1)), problem, group=group)


def test_data_in_the_forms_that_a_problem_takes() -> None:
    """Clients may be given as residuals, then also by `resample`."""

    def draw(k: int) -> list[Residual]:
        return [one(3).data[0]]

    def problem(seed: int) -> Problem:
        return Problem(linear([0.0]), draw(0), lambda model: model.weight.item(), resample=draw)

    ((state, _),) = run(stage(FedAvg(), SGD(lr=0.1, steps=1)), problem)
    assert state.theta.tolist() == pytest.approx([0.1])
