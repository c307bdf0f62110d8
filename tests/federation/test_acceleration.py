"""Geodesic acceleration against dense algebra, its bytes, and the settings that it needs."""

from __future__ import annotations

import pytest
import torch

from federation.cases import (
    DOUBLE,
    Planned,
    linear,
    run,
    stage,
)
from fipa import FIPA, FedAvgM, FipaError, Problem, Residual
from fipa.clients.descent import SGD
from fipa.clients.gauss_newton import GaussNewton
from fipa.curvature.sketch import SketchPlan
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl

CURVED = torch.tensor([[0.3, -0.2], [1.1, 0.4], [-0.5, 0.9]], dtype=DOUBLE)


def curved_rows(model, x, y):
    z = model(x)[:, 0]
    return z + 0.5 * z.square() - y


def curved(seed: int) -> Problem:
    """Two clients whose residuals bend with the parameters."""
    clients = [Residual(curved_rows, CURVED + m, CURVED[:, 0] - m) for m in range(2)]
    return Problem(linear(), clients, lambda model: model.weight.square().sum())


def dense_rows(problem: Problem, theta: torch.Tensor) -> torch.Tensor:
    """The residuals of all clients with the weights of the federation's loss."""
    parts = []
    for one in problem.clients:
        x, y = one.data[0].inputs
        z = x @ theta
        parts.append((z + 0.5 * z.square() - y) / (len(x) * len(problem.clients)) ** 0.5)
    return torch.cat(parts)


@pytest.mark.parametrize("floor", [0.0, 1e-4], ids=["span", "floor"])
def test_accelerated_step_equals_the_dense_one(floor: float) -> None:
    """v = -(J^T J + b)^-1 J^T r and a = -1/2 (J^T J + b)^-1 J^T r'' of the pooled problem."""
    control = StepControl(initial=0.3, acceleration=0.75)
    rule, local = FIPA(floor=floor), GaussNewton()
    arm = Arm("arm", (stage(rule, local, 1, SketchPlan(rank=None), control=control),))
    ((state, record),) = run(arm, curved)
    problem = curved(0)
    theta = problem.initial

    def rows(t):
        return dense_rows(problem, t)

    J, r = torch.func.jacrev(rows)(theta), rows(theta)
    M = J.T @ J + (0.3 + floor) * torch.eye(2, dtype=DOUBLE)
    v = -torch.linalg.solve(M, J.T @ r)
    second = torch.func.jvp(lambda t: torch.func.jvp(rows, (t,), (v,))[1], (theta,), (v,))[1]
    a = -0.5 * torch.linalg.solve(M, J.T @ second)
    assert record["trials"] == 1
    torch.testing.assert_close(state.theta, theta + v + a, rtol=0, atol=1e-7)
    assert record["step_length"] == pytest.approx(float((v + a).norm()), abs=1e-7)
    # up: loss, update, 2 eigenpairs, then a loss and a bend per client
    # down: the model, the step, and the proposed model
    assert record["downlink_bytes"] == 2 * 3 * 16
    plain = run(Arm("arm", (stage(rule, local, 1, SketchPlan(rank=None), control=StepControl(initial=0.3)),)), curved)
    assert record["uplink_bytes"] - plain[0][1]["uplink_bytes"] == 2 * 16


def test_a_step_that_bends_too_much_is_rejected() -> None:
    control = StepControl(initial=0.3, acceleration=1e-3, caution=10.0)
    ((_state, record),) = run(stage(FIPA(), GaussNewton(), 1, SketchPlan(rank=None), control=control), curved)
    assert record["trials"] > 1  # the loss alone would have accepted the first
    straight = run(stage(FIPA(), GaussNewton(), 1, SketchPlan(rank=None), control=StepControl(initial=0.3)), curved)
    assert straight[0][1]["trials"] == 1
    with pytest.raises(FipaError, match="acceleration must be positive"):
        StepControl(acceleration=0.0)


def test_the_correction_does_not_depend_on_the_rules_step() -> None:
    """With half the step v is half as long, and a, quadratic in v, a quarter: not an eighth."""
    steps = {}
    for gamma in (1.0, 0.5):
        moved = []
        for acceleration in (None, 0.75):
            control = StepControl(initial=0.3, acceleration=acceleration)
            local = stage(FIPA(step=gamma), GaussNewton(), 1, SketchPlan(rank=None), control=control)
            ((state, record),) = run(local, curved)
            assert record["trials"] == 1
            moved.append(state.theta)
        steps[gamma] = moved[1] - moved[0]
    torch.testing.assert_close(steps[0.5], steps[1.0] / 4, rtol=1e-6, atol=1e-12)


def test_steps_that_are_rejected_unseen_are_not_paid_for_as_probes() -> None:
    control = StepControl(initial=0.3, acceleration=1e-3, caution=10.0)
    ((_, record),) = run(stage(FIPA(), GaussNewton(), 1, SketchPlan(rank=None), control=control), curved)
    # two clients of 16 bytes: the model, the step for each trial, and the one proposed model that they judged
    assert record["downlink_bytes"] == 2 * 16 * (1 + record["trials"] + 1)
    assert record["trips"] == 1 + record["trials"] + 1


def test_late_clients_count_with_their_curvature_but_do_not_bend() -> None:
    control = StepControl(initial=0.3, acceleration=0.75)
    accelerated = stage(FIPA(), GaussNewton(), 2, SketchPlan(rank=None), control=control)
    rounds = run(Arm("arm", (accelerated,), faults=Planned(plan={(1, 1): 1, (2, 1): None})), curved)
    assert [record["clients"] for _, record in rounds] == [[0], [0, 1]]
    assert all(record["accepted"] for _, record in rounds)


@pytest.mark.parametrize(
    ("rule", "local", "plan", "control", "message"),
    [
        (FIPA(), SGD(steps=1), SketchPlan(), StepControl(acceleration=0.75), "acceleration needs gauss-newton"),
        (FIPA(), GaussNewton(), None, StepControl(acceleration=0.75), "acceleration needs gauss-newton"),
        (
            FIPA(floor=1e-2),
            GaussNewton(1e-6),
            SketchPlan(),
            None,
            "damping = 1e-06, .* floor = 0.01: ",
        ),
        (FIPA(floor=1e-2), GaussNewton(1e-2), SketchPlan(), None, "leave theirs out"),
        (FedAvgM(0.9, inner=FIPA(floor=1e-2)), GaussNewton(1e-6), SketchPlan(), None, "leave theirs out"),
    ],
)
def test_settings_that_only_work_in_pairs(rule, local, plan, control, message: str) -> None:
    with pytest.raises(FipaError, match=message):
        stage(rule, local, 1, plan, control=control)
