"""Step control that takes the best of its trials."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from federation.cases import START, numbers, run, stage
from federation.test_control import Script
from fipa import FIPA, LBFGS, FedAvg, FipaError, FullGradient
from fipa.federation.control import StepControl, Trial

BEST = StepControl(adapt="step", select="best", caution=2.0, trials=5)


def tried(losses: Sequence[float], loss: float = 1.0, control: StepControl = BEST) -> tuple[Trial, list[float]]:
    name = "step" if control.adapt == "step" else "damping"
    script = Script(name, losses)
    rule = FedAvg(step=1.0) if name == "step" else FIPA(damping=0.1)
    trial = script.run(control, rule, 0.123, loss)
    return trial, [getattr(rule, name) for rule in script.proposed]


def test_it_goes_on_as_long_as_the_loss_falls() -> None:
    trial, steps = tried([1.2, 0.9, 0.8, 0.85, 0.1])
    assert steps == [1.0, 0.5, 0.25, 0.125]  # the fourth is worse than the third: enough
    assert (trial.used, trial.trials) == (0.25, 4)
    assert trial.result is not None
    assert float(trial.result.theta) == 0.25


def test_every_round_starts_anew() -> None:
    """Neither the value that is handed in nor the one that is handed on depends on what happened."""
    trial, steps = tried([0.5, 0.6])
    assert steps[0] == 1.0
    assert trial.value == 1.0


def test_no_trial_below_the_loss() -> None:
    trial, steps = tried([3.0, 2.0, 1.5, 1.2, 1.1])
    assert trial.result is None
    assert trial.trials == len(steps) == 5


def test_nan_is_no_improvement() -> None:
    trial, _ = tried([float("nan"), float("inf"), 0.9, 0.95])
    assert trial.used == 0.25


def test_damping_grows_from_its_initial_value() -> None:
    control = StepControl(adapt="damping", select="best", initial=0.01, caution=4.0)
    trial, dampings = tried([2.0, 0.9, 0.7, 0.8], control=control)
    assert dampings == pytest.approx([0.01, 0.04, 0.16, 0.64])
    assert trial.used == pytest.approx(0.16)


def test_acceleration_goes_with_the_first_trial_only() -> None:
    with pytest.raises(FipaError, match="acceleration and corrections go with select"):
        StepControl(select="best", acceleration=0.75)


# --- with a rule that remembers ---


def test_gradients_and_step_control_alone_find_the_minimum() -> None:
    """L-BFGS: its state is that of the trial that was taken, whose change is in it."""
    best = StepControl(adapt="step", select="best", caution=2.0)
    found = run(stage(LBFGS(step=2.0), FullGradient(), rounds=12, control=best))
    clients, theta = numbers(), np.array(START)
    for after, record in found:
        if record["accepted"]:
            np.testing.assert_allclose(after.rule_state["change"].numpy(), after.theta.numpy() - theta, atol=1e-12)
        theta = after.theta.numpy()
    H = sum(c.n * c.curvature for c in clients)
    expected = theta - np.linalg.solve(H, sum(c.n * c.gradient(theta) for c in clients))
    np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-6)
    assert any(record["step"] != 2.0 for _, record in found)


def test_a_round_without_a_step_leaves_the_state_as_it_was() -> None:
    """The one trial is far too long."""
    once = StepControl(adapt="step", select="best", trials=1)
    first, second = run(stage(LBFGS(first=1e6), FullGradient(), rounds=2, control=once))
    for after, record in (first, second):
        assert not record["accepted"]
        assert after.rule_state == {}
        assert after.theta.tolist() == list(START)
