"""Server optimisers: numbers by hand, their state, and any rule inside."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from aggregation.strategies import DOUBLE, FAST, LAYOUT, SEEDS, random_round
from fipa import FIPA, ClientUpdate, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

OPTIMIZERS = [FedAvgM, FedAdam, FedYogi, FedAdagrad]
ADAPTIVE = [FedAdam, FedYogi, FedAdagrad]


def two_rounds(rule: fipa.Rule, *changes: float) -> list[float]:
    """Where one parameter goes from 0 when the clients' average is each of `changes` in turn."""
    theta, state, path = torch.zeros(1, dtype=DOUBLE), None, []
    for change in changes:
        # Two clients of weights 1/4 and 3/4 whose average is `change`.
        deltas = [torch.full((1,), change + 3.0, dtype=DOUBLE), torch.full((1,), change - 1.0, dtype=DOUBLE)]
        result = fipa.aggregate(theta, [ClientUpdate(d, n) for d, n in zip(deltas, (1, 3), strict=True)], rule, state)
        theta, state = result.theta, result.state
        path.append(float(theta))
    return path


def test_momentum_by_hand() -> None:
    # v: 1, then 0.5 * 1 + 2 = 2.5
    assert two_rounds(FedAvgM(momentum=0.5, lr=0.1), 1.0, 2.0) == pytest.approx([0.1, 0.35])
    assert two_rounds(FedAvgM(), 1.0, 2.0) == pytest.approx([1.0, 3.9])


def test_adam_by_hand() -> None:
    rule = FedAdam(lr=0.1, beta1=0.5, beta2=0.75, tau=0.2)
    # m: 0.5, then 0.5 * 0.5 + 0.5 * 2 = 1.25;  v: 0.75 * 0.04 + 0.25 = 0.28, then 0.75 * 0.28 + 0.25 * 4 = 1.21
    first = 0.1 * 0.5 / (math.sqrt(0.28) + 0.2)
    second = 0.1 * 1.25 / (1.1 + 0.2)
    assert two_rounds(rule, 1.0, 2.0) == pytest.approx([first, first + second])


def test_yogi_by_hand() -> None:
    rule = FedYogi(lr=0.1, beta1=0.5, beta2=0.75, tau=0.2)
    # v: 0.04 < 1, so 0.04 + 0.25 * 1 = 0.29; then 0.29 > 0.25, so 0.29 - 0.25 * 0.25 = 0.2275
    first = 0.1 * 0.5 / (math.sqrt(0.29) + 0.2)
    second = 0.1 * (0.25 + 0.25) / (math.sqrt(0.2275) + 0.2)
    assert two_rounds(rule, 1.0, 0.5) == pytest.approx([first, first + second])


def test_adagrad_by_hand() -> None:
    rule = FedAdagrad(lr=0.1, tau=0.75)
    # v: 0.5625 + 1 = 1.25^2, then 1.5625 + 4; no momentum
    first = 0.1 * 1.0 / (1.25 + 0.75)
    second = 0.1 * 2.0 / (math.sqrt(5.5625) + 0.75)
    assert two_rounds(rule, 1.0, 2.0) == pytest.approx([first, first + second])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_state_every_round_is_the_first(optimizer: type[FedAvgM]) -> None:
    """The rules are pure: what they remember is in `result.state` alone."""
    rule, updates = optimizer(), [ClientUpdate(torch.ones(2), 1)]
    once, again = (fipa.aggregate(torch.zeros(2), updates, rule) for _ in range(2))
    assert torch.equal(once.theta, again.theta)
    after = fipa.aggregate(torch.zeros(2), updates, rule, once.state)
    assert not torch.equal(after.theta, once.theta)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_wraps_fipa(optimizer: type[FedAvgM]) -> None:
    """The same as to average one client that sends FIPA's step."""
    inner = FIPA(damping=0.3)
    rounds = [random_round(inner, seed) for seed in (1, 2)]
    theta = LAYOUT.unflatten(torch.zeros(13, dtype=DOUBLE))
    direct = by_hand = None
    for clients in rounds:
        direct = fipa.aggregate(theta, clients.updates, optimizer(inner=inner), direct and direct.state)
        step = fipa.aggregate(theta, clients.updates, inner)
        by_hand = fipa.aggregate(theta, [ClientUpdate(step.theta, 1)], optimizer(), by_hand and by_hand.state)
    for name in theta:
        torch.testing.assert_close(direct.theta[name], by_hand.theta[name], rtol=0, atol=1e-12)
    assert direct.diagnostics.effective_rank == step.diagnostics.effective_rank
    assert direct.diagnostics.shares == step.diagnostics.shares
    assert not torch.equal(direct.theta["scale"], step.theta["scale"])  # the second round remembers the first


def test_wrapper_around_a_wrapper() -> None:
    """Momentum of Adam's steps; both have buffers, which must not get in each other's way."""
    adam = FedAdam(lr=0.1, beta1=0.5, beta2=0.75, tau=0.2)
    first, second = two_rounds(adam, 1.0, 2.0)
    steps = [first, second - first]
    v = [steps[0], 0.5 * steps[0] + steps[1]]
    assert two_rounds(FedAvgM(momentum=0.5, inner=adam), 1.0, 2.0) == pytest.approx([v[0], v[0] + v[1]])


def test_three_wrappers_of_one_kind() -> None:
    """v1: 1, 3/2; v2: 1, 1/2 + 3/2 = 2; v3: 1, 1/2 + 2 = 5/2."""
    rule: fipa.Rule = FedAvg()
    for _ in range(3):
        rule = FedAvgM(momentum=0.5, inner=rule)
    assert two_rounds(rule, 1.0, 1.0) == pytest.approx([1.0, 3.5])


def test_state_of_nested_wrappers_is_flat_and_complete() -> None:
    """A flat mapping of tensors goes into a checkpoint as it is."""
    result = fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], FedAvgM(inner=FedAdam()))
    assert len(result.state) == 3
    assert all(isinstance(name, str) and t.shape == (3,) for name, t in result.state.items())


@FAST
@given(seed=SEEDS, rounds=st.integers(1, 4), momentum=st.floats(0.0, 0.99))
def test_momentum_is_a_geometric_sum(seed: int, rounds: int, momentum: float) -> None:
    theta, state = torch.zeros(13, dtype=DOUBLE), None
    rule = FedAvgM(momentum)
    expected = torch.zeros(13, dtype=DOUBLE)
    for r in range(rounds):
        clients = random_round(FedAvg(), seed + r)
        # this round's average goes on to act in all later ones
        expected += clients.mean * sum(momentum**k for k in range(rounds - r))
        result = fipa.aggregate(theta, clients.updates, rule, state)
        theta, state = result.theta, result.state
    torch.testing.assert_close(theta, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_diagnostics_are_of_the_step_that_is_made(optimizer: type[FedAvgM]) -> None:
    first = fipa.aggregate(torch.zeros(2), [ClientUpdate(torch.tensor([1.0, 0.0]), 1)], optimizer())
    updates = [ClientUpdate(torch.tensor([0.0, 1.0]), 1)]
    second = fipa.aggregate(first.theta, updates, optimizer(), first.state)
    step = second.theta - first.theta
    assert second.diagnostics.step_length == pytest.approx(float(step.norm()), rel=1e-4)
    assert second.diagnostics.cosine_with_fedavg == pytest.approx(float(step[1] / step.norm()), abs=1e-4)


# --- what can go wrong ---


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_another_size(optimizer: type[FedAvgM]) -> None:
    state = fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], optimizer()).state
    with pytest.raises(fipa.LayoutError, match=r"3 elements.*4.*start with state=None"):
        fipa.aggregate(torch.zeros(4), [ClientUpdate(torch.ones(4), 1)], optimizer(), state)


def test_inner_state_of_another_size() -> None:
    rule = FedAvgM(inner=FedAdam())
    state = fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], rule).state
    mixed = {name: torch.zeros(4) if name.startswith("inner.") else t for name, t in state.items()}
    with pytest.raises(fipa.LayoutError, match=r"4 elements.*3.*start with state=None"):
        fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], rule, mixed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_another_dtype(optimizer: type[FedAvgM]) -> None:
    """A float64 checkpoint under a float32 model: an error that says so, not one from inside of torch."""
    state = fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], optimizer()).state
    double: dict[str, Tensor] = {name: t.double() for name, t in state.items()}
    with pytest.raises(fipa.LayoutError, match="float64"):
        fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], optimizer(), double)


def test_error_inside_of_a_wrapper_names_client_and_rule() -> None:
    with pytest.raises(fipa.UpdateError, match="client #0 sent no sketch, but FIPA needs a Sketch"):
        fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], FedAdam(inner=FIPA()))


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("optimizer", "setting"),
    [(FedAvgM, "momentum"), (FedAvgM, "lr")]
    + [(optimizer, name) for optimizer in ADAPTIVE for name in ("lr", "beta1", "beta2", "tau")],
)
def test_bad_settings(optimizer: type[FedAvgM], setting: str, value: float) -> None:
    with pytest.raises(fipa.FipaError, match=rf"{optimizer.__name__}\({setting}={value}\)"):
        optimizer(**{setting: value})


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_tau_must_be_positive(optimizer: type[FedAdam]) -> None:
    """With tau = 0 a parameter that has not moved yet is 0 / 0."""
    with pytest.raises(fipa.FipaError, match=rf"{optimizer.__name__}\(tau=0"):
        optimizer(tau=0.0)


@pytest.mark.parametrize(
    "make", [lambda: fipa.FedAvgM(momentum=1.0), lambda: fipa.FedAdam(beta1=1.0), lambda: fipa.FedYogi(beta2=1.5)]
)
def test_decay_rates_must_be_below_one(make) -> None:
    with pytest.raises(fipa.FipaError, match="below 1"):
        make()
