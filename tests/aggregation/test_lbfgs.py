"""L-BFGS against the two-loop recursion in numpy, and on quadratics whose minimum is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from aggregation.strategies import DOUBLE, FAST, SEEDS, generator, normal, orthonormal
from fipa import LBFGS, ClientUpdate, FipaError, LayoutError
from fipa.aggregation.rule import aggregator

P = 7
ZERO = torch.zeros(P, dtype=DOUBLE)


def updates_of(gradient: Tensor, rng: torch.Generator) -> list[ClientUpdate]:
    """Two clients of unequal size whose gradients have this mean."""
    apart = normal(len(gradient), rng=rng).to(gradient)
    return [ClientUpdate(-gradient - 3 * apart, 10, client_id=0), ClientUpdate(-gradient + apart, 30, client_id=1)]


def two_loop(pairs: list[tuple[np.ndarray, np.ndarray]], g: np.ndarray, first: float) -> np.ndarray:
    """Algorithm 7.4 of Nocedal and Wright, Numerical Optimization; without pairs a step of length `first`."""
    if not pairs:
        return -first * g / np.linalg.norm(g)
    q, alphas = g.copy(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (y @ s))
        q -= alphas[-1] * y
    s, y = pairs[-1]
    r = s @ y / (y @ y) * q
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        r += s * (alpha - y @ r / (y @ s))
    return -r


@FAST
@given(
    memory=st.integers(1, 4), rounds=st.integers(1, 7), step=st.floats(0.1, 2.0), first=st.floats(0.1, 9.0), seed=SEEDS
)
def test_equals_the_two_loop_recursion(memory: int, rounds: int, step: float, first: float, seed: int) -> None:
    """Random gradients: about half of the pairs bend the wrong way, and are skipped."""
    rng, state, rule = generator(seed), {}, LBFGS(memory, step, first)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    before = change = np.zeros(P)
    for k in range(rounds):
        gradient = normal(P, rng=rng)
        g = gradient.numpy()
        y = g - before
        cosine = change @ y / (np.linalg.norm(change) * np.linalg.norm(y)) if k else 0.0
        if cosine > 1e-4:
            pairs = [*pairs, (change, y)][-memory:]
        result = fipa.aggregate(ZERO, updates_of(gradient, rng), rule, state)
        change, before, state = step * two_loop(pairs, g, first), g, result.state
        np.testing.assert_allclose(result.theta.numpy(), change, rtol=1e-9, atol=1e-9 * np.linalg.norm(change))
        assert result.diagnostics.effective_rank == len(pairs)
        assert result.diagnostics.cosine_with_fedavg > 0  # downhill, whatever the pairs


def dense_inverse(state: dict[str, Tensor]) -> Tensor:
    """The BFGS update of the inverse, pair by pair, as p x p matrices."""
    eye = torch.eye(P, dtype=DOUBLE)
    s, y = state["steps"], state["turns"]
    inverse = eye * (s[-1] @ y[-1]) / (y[-1] @ y[-1])
    for one, other in zip(s, y, strict=True):
        left = eye - torch.outer(one, other) / (one @ other)
        inverse = left @ inverse @ left.T + torch.outer(one, one) / (one @ other)
    return inverse


def on_a_quadratic(A: Tensor, rounds: int, rule: LBFGS) -> tuple[Tensor, dict[str, Tensor]]:
    """Exact line search along each direction: the rule is asked again for the step that it found best."""
    theta, state, rng = torch.ones(len(A), dtype=DOUBLE), {}, generator(3)
    for _ in range(rounds):
        apply = aggregator(theta, updates_of(A @ theta, rng))
        d = apply(rule, state).theta - theta
        best = float(-(d @ A @ theta) / (d @ A @ d))
        result = apply(LBFGS(rule.memory, best, rule.first), state)
        theta, state = result.theta, result.state
    return theta, state


def spd(condition: float, seed: int = 1, p: int = P) -> Tensor:
    Q = orthonormal(p, p, generator(seed))
    return (Q * torch.logspace(0, float(np.log10(condition)), p, dtype=DOUBLE)) @ Q.T


@pytest.mark.parametrize("condition", [1.5, 100.0])
def test_ends_on_a_quadratic_after_as_many_steps_as_parameters(condition: float) -> None:
    A = spd(condition)
    theta, _ = on_a_quadratic(A, P, LBFGS())
    assert float(theta.norm()) < 1e-8
    early, _ = on_a_quadratic(A, P - 2, LBFGS())
    assert float(early.norm()) > 1e-6


def test_diagnostics_against_the_dense_inverse() -> None:
    _, state = on_a_quadratic(spd(20.0), 4, LBFGS(memory=3))
    updates = updates_of(normal(P, rng=generator(5)), generator(6))
    result = fipa.aggregate(ZERO, updates, LBFGS(memory=3, step=0.5), state)
    assert len(result.state["steps"]) <= 3
    H = dense_inverse(result.state)
    parts = [w * H @ u.delta for w, u in zip((0.25, 0.75), updates, strict=True)]
    d = sum(parts)
    torch.testing.assert_close(result.theta, 0.5 * d, rtol=1e-10, atol=1e-12)
    expected = {i: float(part @ d / (d @ d)) for i, part in enumerate(parts)}
    assert result.diagnostics.shares == pytest.approx(expected)
    values = torch.linalg.eigvalsh(H)
    assert result.diagnostics.condition_number == pytest.approx(float(values[-1] / values[0]), rel=1e-8)


def test_without_line_search_it_converges_from_a_short_first_step() -> None:
    A, theta, state = spd(30.0), torch.ones(P, dtype=DOUBLE), None
    for _ in range(60):
        result = fipa.aggregate(theta, [ClientUpdate(-A @ theta, 1)], LBFGS(first=0.01), state)
        theta, state = result.theta, result.state
    assert float(theta.norm()) < 1e-8


# --- the state ---


def test_the_change_that_was_made_is_kept() -> None:
    """Trials of one round with other steps begin from the same state, and each keeps its own change."""
    rng, A, theta = generator(2), spd(5.0), torch.ones(P, dtype=DOUBLE)
    first = fipa.aggregate(theta, updates_of(A @ theta, rng), LBFGS())
    before = {name: t.clone() for name, t in first.state.items()}
    apply = aggregator(first.theta, updates_of(A @ first.theta, rng))
    changes = []
    for step in (1.0, 0.25):
        result = apply(LBFGS(step=step), first.state)
        changes.append(result.theta - first.theta)
        torch.testing.assert_close(result.state["change"], changes[-1], rtol=1e-12, atol=1e-14)
        assert all(torch.equal(t, before[name]) for name, t in first.state.items())
    torch.testing.assert_close(changes[1], changes[0] / 4)


def test_a_round_that_changed_nothing_adds_no_pair() -> None:
    """Step 0, and a gradient that did not move."""
    updates = updates_of(torch.ones(P, dtype=DOUBLE), generator(1))
    state = fipa.aggregate(ZERO, updates, LBFGS(step=0.0)).state
    again = fipa.aggregate(ZERO, updates, LBFGS(), state)
    assert len(again.state["steps"]) == 0
    assert float(again.theta.norm()) == pytest.approx(1.0)
    assert len(fipa.aggregate(ZERO, updates, LBFGS(), again.state).state["steps"]) == 0


def test_at_a_stationary_point_it_stays() -> None:
    result = fipa.aggregate(ZERO, [ClientUpdate(ZERO.clone(), 1)], LBFGS())
    assert torch.equal(result.theta, ZERO)


def test_the_state_is_its_own_and_of_the_parameters_type() -> None:
    updates = [ClientUpdate(-torch.ones(3), 1)]
    first = fipa.aggregate(torch.zeros(3), updates, LBFGS())
    second = fipa.aggregate(first.theta, [ClientUpdate(-torch.arange(3.0), 1)], LBFGS(), first.state)
    assert list(second.state) == ["gradient", "change", "steps", "turns"]
    assert {t.dtype for t in second.state.values()} == {torch.float32}
    kept = {name: t.clone() for name, t in second.state.items()}
    for tensor in (updates[0].delta, *first.state.values(), second.theta):
        assert isinstance(tensor, Tensor)
        tensor.fill_(7.0)
    assert all(torch.equal(t, kept[name]) for name, t in second.state.items())


@pytest.mark.parametrize("memory", [1, 3])
def test_only_the_last_pairs_are_kept(memory: int) -> None:
    _, state = on_a_quadratic(spd(10.0), 6, LBFGS(memory))
    _, longer = on_a_quadratic(spd(10.0), 6, LBFGS(5))
    assert state["steps"].shape == state["turns"].shape == (memory, P)
    assert len(longer["steps"]) == 5
    fewer = fipa.aggregate(ZERO, [ClientUpdate(normal(P, rng=generator(1)), 1)], LBFGS(2), longer)
    assert len(fewer.state["steps"]) == 2


# --- what it refuses ---


@pytest.mark.parametrize(
    "settings", [{"memory": 0}, {"step": -1.0}, {"step": float("nan")}, {"first": 0.0}, {"first": float("inf")}]
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(FipaError, match=rf"LBFGS\(.*{next(iter(settings))}="):
        LBFGS(**settings)


def test_a_state_of_other_parameters() -> None:
    _, state = on_a_quadratic(spd(10.0), 3, LBFGS())
    with pytest.raises(LayoutError, match=r"'steps' has 7 elements, the update 2: start with state=None"):
        fipa.aggregate(torch.zeros(2), [ClientUpdate(torch.ones(2), 3)], LBFGS(), state)
    with pytest.raises(LayoutError, match=r"'steps' is torch.float64"):
        fipa.aggregate(torch.zeros(P), [ClientUpdate(torch.ones(P), 3)], LBFGS(), state)
    with pytest.raises(LayoutError, match=r"'turns' has 1 axes, expected 2: start with state=None"):
        fipa.aggregate(ZERO, [ClientUpdate(ZERO + 1, 3)], LBFGS(), {**state, "turns": ZERO})
