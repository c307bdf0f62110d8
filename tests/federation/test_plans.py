"""What clients tell about their curvature, and how they choose rank and steps."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation.cases import DOUBLE, lines, numbers
from fipa import Layout, SketchError, TraceShare, random_test_matrix
from fipa.federation.plans import AdaptiveRank, AdaptiveSteps, AdditivePlan, CovariancePlan, DiagonalPlan, SketchPlan

LAYOUT = Layout(("weight",), ((1, 2),))


def close(a: torch.Tensor, b: np.ndarray) -> None:
    np.testing.assert_allclose(a.numpy(), b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", [0, 2])
def test_plans_against_the_dense_matrix(m: int) -> None:
    problem, H = lines(0), numbers()[m].curvature
    model, client = problem.model, problem.clients[m]
    sketch = SketchPlan(rank=None).compute(model, LAYOUT, client, 0)
    close(sketch.eigenvectors * sketch.eigenvalues @ sketch.eigenvectors.T, H)
    close(DiagonalPlan().compute(model, LAYOUT, client, 0).values, np.diag(H))
    (weight,) = CovariancePlan().compute(model, LAYOUT, client, 0).layers.items()
    assert weight[0] == "weight"
    close(weight[1][1], H)
    delta = torch.tensor([0.3, -0.7], dtype=DOUBLE)
    sums = AdditivePlan(width=5).compute(model, LAYOUT, client, 0, delta, 11)
    omega = random_test_matrix(2, 5, 11, DOUBLE).numpy()
    close(sums.products, H @ omega)
    close(sums.response, H @ delta.numpy())
    assert sums.num_examples == client.num_examples


def test_a_rank_above_what_data_support_is_no_news() -> None:
    problem = lines(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sketch = SketchPlan(rank=9).compute(problem.model, LAYOUT, problem.clients[1], 0)
    assert sketch.rank == 2
    assert SketchPlan(rank=1).compute(problem.model, LAYOUT, problem.clients[1], 0).rank == 1
    with pytest.raises(SketchError, match="rank must be at least 1, got 0"):
        SketchPlan(rank=0).compute(problem.model, LAYOUT, problem.clients[1], 0)


# --- adaptive rank: t = C / (k (|g_m| + |g|)) ---


def test_adaptive_rank_by_hand() -> None:
    threshold, note = AdaptiveRank(constant=2.0, max_rank=7).choose(4, own=1.5, total=3.5)
    assert threshold.share == pytest.approx(0.1)
    assert threshold.max_rank == 7
    assert note is None


@pytest.mark.parametrize(("own", "raw"), [(0.25, "2"), (0.0, "inf")])
def test_adaptive_rank_is_clamped(own: float, raw: str) -> None:
    threshold, note = AdaptiveRank(constant=1.0).choose(1, own, own)
    assert threshold.share == 0.99
    assert note == f"rank threshold {raw} clamped to 0.99"


@given(st.integers(1, 1000), st.floats(0, 1e6), st.floats(0, 1e6))
def test_adaptive_rank_is_always_a_share(k: int, own: float, total: float) -> None:
    threshold, note = AdaptiveRank().choose(k, own, total)
    assert 0 <= threshold.share <= 0.99
    assert (note is None) == (k * (own + total) >= 1 / 0.99)


# --- adaptive steps: ceil(log(C / (k |g|)) / log(1 - lr lambda)) ---


def test_adaptive_steps_by_hand() -> None:
    """log(0.1 / (2 * 5)) / log(1 - 0.5) = log(0.01) / log(0.5) = 6.64."""
    assert AdaptiveSteps(constant=0.1).choose(2, own=5.0, lr=0.1, smallest=5.0) == (7, None)


@pytest.mark.parametrize(
    ("own", "lr", "smallest", "steps", "words"),
    [
        (5.0, 0.1, 1e-6, 200, "clamped to 200"),
        (5.0, 0.1, 0.0, 200, "inf clamped to 200"),
        (5.0, 0.5, 2.0, 1, "= 1 is not below 1"),
        (5.0, 0.5, 8.0, 1, "= 4 is not below 1"),
        (0.05, 0.1, 5.0, 1, "already within 0.1 / k"),
        (0.0, 0.1, 5.0, 1, "already within 0.1 / k"),
    ],
)
def test_adaptive_steps_are_clamped(own: float, lr: float, smallest: float, steps: int, words: str) -> None:
    count, note = AdaptiveSteps().choose(2, own, lr, smallest)
    assert count == steps
    assert words in note


@given(st.integers(1, 100), st.floats(1e-9, 1e6), st.floats(1e-6, 10), st.floats(0, 1e3), st.integers(1, 50))
def test_adaptive_steps_stay_in_range(k: int, own: float, lr: float, smallest: float, most: int) -> None:
    count, note = AdaptiveSteps(most=most).choose(k, own, lr, smallest)
    assert 1 <= count <= most
    if note is None:  # so many steps shrink the slowest direction to C / k, and one less would not
        assert (1 - lr * smallest) ** count * own * k <= 0.1 * (1 + 1e-9)
        assert count == 1 or (1 - lr * smallest) ** (count - 1) * own * k >= 0.1 * (1 - 1e-9)
    assert math.isfinite(count)


def test_all_settings_reach_the_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr("fipa.federation.plans.sketch", lambda *args, **settings: seen.update(settings, rank=args[3]))
    problem = lines(0)
    plan = SketchPlan(TraceShare(0.5), "krylov", "matrix_free", 3, 7, 11, 2)
    plan.compute(problem.model, LAYOUT, problem.clients[0], 5)
    assert seen == {
        "rank": TraceShare(0.5),
        "params": ("weight",),
        "route": "matrix_free",
        "solver": "krylov",
        "oversampling": 3,
        "iterations": 7,
        "max_examples": 11,
        "sampled_labels": 2,
        "seed": 5,
    }
