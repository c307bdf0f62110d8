"""FedAvg, the rule that every other one falls back to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fipa
from aggregation.strategies import DOUBLE, FAST, SEEDS, generator, normal
from fipa import ClientUpdate, FedAvg


@FAST
@given(seed=SEEDS, counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=6), step=st.floats(0.0, 2.0))
def test_weighted_mean(seed: int, counts: list[int], step: float) -> None:
    rng = generator(seed)
    theta, deltas = normal(7, rng=rng), normal(len(counts), 7, rng=rng)
    updates = [ClientUpdate(d, n) for d, n in zip(deltas, counts, strict=True)]
    weights = torch.tensor(counts, dtype=DOUBLE) / sum(counts)
    expected = theta + step * weights @ deltas
    torch.testing.assert_close(fipa.aggregate(theta, updates, FedAvg(step)).theta, expected, rtol=0, atol=1e-12)


def test_by_hand() -> None:
    updates = [ClientUpdate(torch.tensor([4.0, 0.0]), 1), ClientUpdate(torch.tensor([0.0, -8.0]), 3)]
    result = fipa.aggregate(torch.tensor([10.0, 10.0]), updates, FedAvg())
    assert result.theta.tolist() == [11.0, 4.0]
    assert result.state == {}
    # step (1, -6): client 0 gave (1, 0), client 1 (0, -6)
    assert result.diagnostics.shares == pytest.approx({0: 1 / 37, 1: 36 / 37})
    assert result.diagnostics.step_length == pytest.approx(37**0.5)
    assert result.diagnostics.effective_rank == 2
    assert result.diagnostics.condition_number == 1


def test_updates_may_come_from_a_generator() -> None:
    updates = (ClientUpdate(torch.full((2,), float(i)), 1) for i in (1, 3))
    assert fipa.aggregate(torch.zeros(2), updates, FedAvg()).theta.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf")])
def test_bad_step(step: float) -> None:
    """As all other rules do, and not as NaN in the first round."""
    with pytest.raises(fipa.FipaError, match=rf"FedAvg\(step={step}\)"):
        FedAvg(step)
