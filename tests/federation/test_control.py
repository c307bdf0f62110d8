"""Trials of more and more careful steps, alone and in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from federation.cases import (
    DOUBLE,
    START,
    fedavg,
    fipa_step,
    lines,
    mean_loss,
    numbers,
    run,
    stage,
    texts,
)
from fipa import FIPA, Client, CompletedFIPA, FedAvg, FedAvgM, FipaError, Problem, Residual, Result, Rule
from fipa.clients.descent import SGD
from fipa.clients.gauss_newton import GaussNewton
from fipa.curvature.sketch import SketchPlan
from fipa.federation.arm import Arm
from fipa.federation.control import LARGEST, SMALLEST, Conversation, StepControl, Trial, controlled
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor, Rows
from fipa.problems.fitting import misfit, sine

NAN = float("nan")


class Script:
    """Proposals that carry their rule's setting, and losses that were written down beforehand."""

    def __init__(self, name: str, losses: Sequence[float]) -> None:
        self.name, self.losses = name, list(losses)
        self.proposed: list[Rule] = []

    def propose(self, rule: Rule) -> Result[torch.Tensor]:
        self.proposed.append(rule)
        return Result(torch.tensor([getattr(rule, self.name)], dtype=DOUBLE), None, {})

    def probe(self, theta: torch.Tensor) -> Conversation[float]:
        yield from ()  # clients need not be asked
        return self.losses[len(self.proposed) - 1]

    def follow(self, rule: Rule, result: Result[torch.Tensor]) -> Conversation[tuple[Result[torch.Tensor], float]]:
        raise AssertionError("nobody asked for acceleration")

    def settle(self, rule: Rule, result: Result[torch.Tensor]) -> Conversation[Result[torch.Tensor]]:
        raise AssertionError("nobody asked for corrections")

    def run(self, control: StepControl, rule: Rule, value: float, loss: float = 1.0) -> Trial:
        trials = controlled(control, rule, value, loss, self.propose, self.probe, self.follow, self.settle)
        with pytest.raises(StopIteration) as end:
            next(trials)
        return end.value.value

    @property
    def values(self) -> list[float]:
        return [getattr(rule, self.name) for rule in self.proposed]


def test_accepted_at_once_lowers_the_damping() -> None:
    script = Script("damping", [0.9])
    trial = script.run(StepControl(), FIPA(damping=0.3, step=0.7), 0.2)
    assert script.proposed == [FIPA(damping=0.2, step=0.7)]
    assert (trial.value, trial.used, trial.trials) == (0.1, 0.2, 1)
    assert trial.result.theta.tolist() == [0.2]


def test_rejected_raises_the_damping_until_accepted() -> None:
    script = Script("damping", [1.5, 1.0, NAN, 0.5])
    trial = script.run(StepControl(caution=3.0, boldness=0.1), FIPA(), 0.01)
    assert script.values == pytest.approx([0.01, 0.03, 0.09, 0.27])
    assert trial.used == pytest.approx(0.27)
    assert trial.value == pytest.approx(0.027)
    assert trial.trials == 4
    assert trial.result.theta.item() == pytest.approx(0.27)


def test_rolls_back_after_the_last_trial() -> None:
    script = Script("damping", [2.0, NAN, float("inf"), 0.0])
    trial = script.run(StepControl(trials=3), FIPA(), 1.0)
    assert script.values == [1.0, 4.0, 16.0]
    assert trial.result is None
    assert (trial.value, trial.used, trial.trials) == (64.0, 16.0, 3)


def test_step_is_adapted_for_rules_without_damping() -> None:
    script = Script("step", [3.0, 2.0, 0.5])
    trial = script.run(StepControl(), FedAvg(step=1.0), 1.0)
    assert script.proposed == [FedAvg(1.0), FedAvg(0.25), FedAvg(0.0625)]
    assert (trial.value, trial.used) == (0.125, 0.0625)


def test_step_never_grows_above_the_rules_own() -> None:
    value, used = 0.3, []
    for _ in range(4):
        trial = Script("step", [0.5]).run(StepControl(), FedAvg(step=0.8), value)
        used.append(trial.used)
        value = trial.value
    assert used == pytest.approx([0.3, 0.6, 0.8, 0.8])
    assert value == 0.8


def test_damping_stays_within_bounds() -> None:
    assert Script("damping", [0.0]).run(StepControl(), FIPA(), SMALLEST).value == SMALLEST
    trial = Script("damping", [2.0] * 3).run(StepControl(trials=3), FIPA(), LARGEST / 2)
    assert trial.value == trial.used == LARGEST


def test_which_setting_is_adapted() -> None:
    assert StepControl().parameter(FIPA()) == "damping"
    assert StepControl().parameter(FedAvg()) == "step"
    assert StepControl("step").parameter(FIPA()) == "step"
    with pytest.raises(FipaError, match="control: FedAvg has no damping to adapt"):
        StepControl("damping").parameter(FedAvg())
    assert StepControl().parameter(FedAvgM()) == "lr"
    with pytest.raises(FipaError, match="has no damping to adapt"):
        StepControl().parameter(lambda cohort, state: None)


def test_first_value() -> None:
    assert StepControl().start(FIPA(damping=0.4)) == 0.4
    assert StepControl().start(FIPA()) == 0.01
    assert StepControl(initial=3.0).start(FIPA(damping=0.4)) == 3.0
    assert StepControl().start(FedAvg(0.7)) == 0.7
    assert StepControl("step").start(CompletedFIPA(damping=0.4, step=0.6)) == 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"caution": 1.0}, "caution"),
        ({"boldness": 0.0}, "boldness"),
        ({"boldness": 1.5}, "boldness"),
        ({"trials": 0}, "trials"),
        ({"initial": 0.0}, "initial must be positive, got 0"),
        ({"initial": float("inf")}, "initial"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(FipaError, match=f"control: .*{message}"):
        StepControl(**settings)


# --- in a round ---


class Counting(Executor):
    """Counts what clients are asked to do."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.asked = Counter[str]()

    def start(self, method: str, *args: Any, **settings: Any) -> Rows:
        self.asked[method] += 1
        return super().start(method, *args, **settings)


def test_rejected_fedavg_steps_are_halved_from_the_same_updates() -> None:
    """Clients overshoot with a learning rate of 9: the step shrinks by 4 until the loss falls."""
    clients, theta = numbers(), np.array(START)
    mean = fedavg([c.sgd(theta, 9.0, 1) for c in clients], [c.n for c in clients])
    before = mean_loss(clients, theta)
    steps = (4.0**-i for i in range(20))
    expected = next(step for step in steps if mean_loss(clients, theta + step * mean) < before)
    assert expected < 1  # else there is nothing to see here
    arm = Arm("a", (stage(FedAvg(), SGD(lr=9.0, steps=1), control=StepControl()),))
    with Counting(lines) as executor:
        federation = Federation(arm, 0, executor)
        state, typed = federation.round(federation.start())
        record = typed.plain()
        trials = 1 + round(np.log(1 / expected) / np.log(4))
        assert (executor.asked["work"], executor.asked["losses"]) == (1, trials)
    np.testing.assert_allclose(state.theta.numpy(), theta + expected * mean, rtol=1e-12)
    assert record["step"] == expected
    assert record["damping"] is None
    assert record["accepted"]
    assert record["trials"] == trials
    assert state.control_value == 2 * expected
    # a model of two numbers to each of three clients, once and for every trial; a loss back for every trial
    assert record["downlink_bytes"] == 3 * 16 * (1 + trials)
    assert record["uplink_bytes"] == 3 * (16 + 8) + 3 * 8 * trials


def test_damping_of_a_controlled_round_by_hand() -> None:
    """Local training that overshoots; H (H + b)^-1 shrinks the step as the damping grows."""
    clients, theta = numbers(), np.array(START)
    deltas, counts = [c.sgd(theta, 9.0, 1) for c in clients], [c.n for c in clients]
    H = [c.curvature for c in clients]
    control = StepControl(initial=0.1, trials=12)
    before = mean_loss(clients, theta)
    dampings = [0.1 * 4**i for i in range(12)]
    falls = [mean_loss(clients, theta + fipa_step(H, deltas, counts, b)) < before for b in dampings]
    trials = 1 + falls.index(True)
    damping = dampings[trials - 1]
    assert trials > 1
    first = stage(FIPA(damping=7.0), SGD(lr=9.0, steps=1), 2, SketchPlan(rank=None), control=control)
    (state, record), (_, second) = run(first)
    np.testing.assert_allclose(state.theta.numpy(), theta + fipa_step(H, deltas, counts, damping), rtol=1e-9)
    assert record["damping"] == pytest.approx(damping)
    assert record["trials"] == trials
    assert state.control_value == pytest.approx(damping / 2)
    assert second["damping"] == pytest.approx(damping / 2 * 4 ** (second["trials"] - 1))


def test_rolled_back_at_the_minimum() -> None:
    """Where no step can lower the loss, the model stays to the last bit, and the rule forgets the attempt."""
    clients = numbers()
    X = np.concatenate([c.X for c in clients])
    best = np.linalg.lstsq(X, np.concatenate([c.y for c in clients]), rcond=None)[0]
    start = State(torch.from_numpy(best), rule_state={"kept": torch.ones(1)}, round_number=1)
    rounds = stage(FedAvg(), SGD(lr=0.1, steps=3), 3, control=StepControl(trials=2))
    (state, record), (_, second) = run(rounds, state=start)
    assert torch.equal(state.theta, start.theta)
    assert state.rule_state == start.rule_state
    assert not record["accepted"]
    assert record["trials"] == 2
    assert record["step"] == 0.25
    assert record["step_length"] == 0.0
    assert record["cosine_with_fedavg"] is None
    assert (None, "no step of 2 lowered the clients' loss: rolled back") in texts(record)
    assert state.control_value == 1 / 16
    assert second["step"] == 1 / 64


OVERSHOOT = SGD(lr=8.0, steps=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "local"),
    [
        (FIPA(), GaussNewton()),
        (FIPA(), OVERSHOOT),
        (CompletedFIPA(damping=1e-4), OVERSHOOT),
        (FedAvg(), OVERSHOOT),
    ],
    ids=["gauss-newton", "fipa", "completed", "fedavg"],
)
def test_loss_never_rises_under_control(rule: Rule, local: SGD | GaussNewton) -> None:
    """On a network, where undamped steps overshoot: rejections do happen."""
    rejected = fell = 0
    for seed in range(2):
        plan = None if isinstance(rule, FedAvg) else SketchPlan(rank=6)
        records = [r for _, r in run(stage(rule, local, 6, plan, control=StepControl()), small_sine, seed)]
        losses = [r["loss"] for r in records]
        assert losses == sorted(losses, reverse=True)
        fell += losses[-1] < losses[0]
        rejected += sum(r["trials"] - 1 for r in records)
    assert rejected > 0
    assert fell > 0


def small_sine(seed: int) -> Problem:
    return sine(seed, samples=10, hidden=(5,), edges=(0.0, 0.4, 1.0), grid=16)


def test_probe_of_nan_is_a_rejection_in_a_round() -> None:
    """Steps so long that the residuals overflow."""
    rounds = stage(FedAvg(step=1e200), SGD(lr=0.1, steps=1), control=StepControl(caution=1e100, trials=3))
    (_, record) = run(rounds)[0]
    assert record["trials"] == 3
    assert record["accepted"]
    assert record["step"] == pytest.approx(1.0)


def test_control_starts_anew_with_each_stage() -> None:
    first = stage(FIPA(damping=0.5), rounds=2, plan=SketchPlan(rank=None), control=StepControl())
    second = replace(first, rule=FIPA(damping=3.0), rounds=1)
    records = [r for _, r in run(Arm("a", (first, second)))]
    assert [r["damping"] for r in records] == [0.5, 0.25, 3.0]


def test_clients_judge_by_their_numbers_of_examples() -> None:
    """The small client's loss rises more than the large one's falls, but the large one counts nine times."""

    def pair(seed: int) -> Problem:
        x = torch.ones(1, 2, dtype=DOUBLE) / 2
        small = Client((Residual(misfit, x, torch.tensor([-1.0], dtype=DOUBLE)),), num_examples=1)
        large = Client((Residual(misfit, x, torch.tensor([1.0], dtype=DOUBLE)),), num_examples=9)
        model = nn.Linear(2, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(0.0)
        return Problem(model, [small, large], lambda model: 0.0)

    (state, record) = run(stage(FedAvg(), SGD(lr=1.0, steps=1), control=StepControl()), pair)[0]
    # g = -+1/2 per coordinate: the mean update is 0.4 in each, the output 0.4, the losses 0.98 and 0.18 from 0.5 each
    np.testing.assert_allclose(state.theta.numpy(), [0.4, 0.4])
    assert record["trials"] == 1
