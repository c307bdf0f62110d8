"""How clients choose rank and steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps

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
