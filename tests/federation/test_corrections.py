"""Steps that are led back to the valley's floor: against dense algebra, their bytes, and the settings they need."""

from __future__ import annotations

import pytest
import torch

from federation.cases import DOUBLE, run, stage
from federation.test_acceleration import curved, dense_rows
from fipa import FIPA, FedAvgM, FipaError
from fipa.clients.descent import SGD
from fipa.clients.gauss_newton import GaussNewton
from fipa.curvature.sketch import SketchPlan
from fipa.federation.control import StepControl
from fipa.pde import Points
from fipa.problems.elliptic import elliptic


def corrected(control: StepControl, rounds: int = 1, floor: float = 0.0):
    return stage(FIPA(floor=floor), GaussNewton(), rounds, SketchPlan(rank=None), control=control)


@pytest.mark.parametrize("acceleration", [None, 0.75], ids=["straight", "accelerated"])
@pytest.mark.parametrize("floor", [0.0, 1e-4], ids=["span", "floor"])
def test_corrected_step_equals_the_dense_one(floor: float, acceleration: float | None) -> None:
    """d <- d - (J^T J + f b)^-1 J^T r(theta + d) of the pooled problem, J from where the step began."""
    control = StepControl(initial=0.3, acceleration=acceleration, corrections=2, firmness=5.0)
    ((state, record),) = run(corrected(control, floor=floor), curved)
    problem = curved(0)
    theta = problem.initial

    def rows(t):
        return dense_rows(problem, t)

    def solve(damping, right):
        return torch.linalg.solve(J.T @ J + (damping + floor) * torch.eye(2, dtype=DOUBLE), J.T @ right)

    J = torch.func.jacrev(rows)(theta)
    d = -solve(0.3, rows(theta))
    if acceleration:
        v = d
        second = torch.func.jvp(lambda t: torch.func.jvp(rows, (t,), (v,))[1], (theta,), (v,))[1]
        d = v - 0.5 * solve(0.3, second)
    for _ in range(2):
        d = d - solve(1.5, rows(theta + d))
    assert record["trials"] == 1
    torch.testing.assert_close(state.theta, theta + d, rtol=0, atol=1e-7)
    assert record["step_length"] == pytest.approx(float(d.norm()), abs=1e-7)


def test_a_correction_costs_a_vector_down_and_up() -> None:
    ((_, plain),) = run(corrected(StepControl(initial=0.3)), curved)
    ((_, record),) = run(corrected(StepControl(initial=0.3, corrections=3)), curved)
    assert plain["trials"] == record["trials"] == 1
    assert record["uplink_bytes"] - plain["uplink_bytes"] == 3 * 2 * 16  # three for each of two clients
    assert record["downlink_bytes"] - plain["downlink_bytes"] == 3 * 2 * 16
    assert record["trips"] - plain["trips"] == 3


def test_corrections_let_an_equation_converge_in_fewer_rounds() -> None:
    """The same rounds and sketches: with corrections, longer steps along the valley lower the loss, by far."""

    def small(seed: int):
        return elliptic(seed, equation="bratu", points=Points(interior=30, test=50), hidden=(10, 10))

    plain = run(corrected(StepControl(), 12), small)[-1][1]
    with_them = run(corrected(StepControl(corrections=3, boldness=0.33, caution=2.0), 12), small)[-1][1]
    assert with_them["loss_after"] < 1e-2 * plain["loss_after"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corrections": -1}, "must not be negative"),
        ({"corrections": 1, "firmness": 0.5}, "firmness at least 1"),
        ({"corrections": 1, "adapt": "step"}, "need a damping"),
        ({"corrections": 1, "select": "best"}, "go with select"),
    ],
)
def test_settings_that_make_no_sense(settings, message: str) -> None:
    with pytest.raises(FipaError, match=message):
        StepControl(**settings)


@pytest.mark.parametrize(
    ("rule", "local", "plan"),
    [(FIPA(), SGD(steps=1), SketchPlan()), (FIPA(), GaussNewton(), None), (FedAvgM(0.9), GaussNewton(), None)],
)
def test_corrections_need_gauss_newton_clients_with_sketches(rule, local, plan) -> None:
    with pytest.raises(FipaError, match="corrections needs gauss-newton"):
        stage(rule, local, 1, plan, control=StepControl(corrections=1))
