"""Who is asked, who answers, and how often."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fipa import FipaError
from fipa.federation.participation import Faults, Participation


def test_full() -> None:
    assert Participation().select([3, 1, 2], 5, 9) == [0, 1, 2]


@settings(deadline=None, max_examples=50)
@given(
    kind=st.sampled_from(["uniform", "weighted"]),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_draws_distinct_clients_in_order(kind: str, sizes: list[int], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    participation = Participation(kind, count)
    chosen = participation.select(sizes, seed, 3)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    assert set(chosen) <= set(range(len(sizes)))
    assert chosen == participation.select(sizes, seed, 3)


def test_rounds_and_seeds_differ() -> None:
    participation = Participation("uniform", 5)
    by_round = {tuple(participation.select([1] * 50, 0, k)) for k in range(1, 21)}
    by_seed = {tuple(participation.select([1] * 50, seed, 1)) for seed in range(20)}
    assert len(by_round) == len(by_seed) == 20


def frequencies(participation: Participation, sizes: list[int], rounds: int = 4000) -> list[float]:
    counts = Counter(c for k in range(1, rounds + 1) for c in participation.select(sizes, 0, k))
    return [counts[c] / rounds for c in range(len(sizes))]


def test_uniform_clients_are_asked_alike() -> None:
    """2 of 4, whatever their sizes: 1/2 each; four standard deviations are 0.032."""
    assert frequencies(Participation("uniform", 2), [1, 1, 1, 97]) == pytest.approx([0.5] * 4, abs=0.032)


def test_weighted_clients_are_asked_in_proportion() -> None:
    """1 of 3 with 1, 3 and 6 examples; four standard deviations are at most 0.032."""
    assert frequencies(Participation("weighted", 1), [1, 3, 6]) == pytest.approx([0.1, 0.3, 0.6], abs=0.032)


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("full", 3, "count"),
        ("uniform", None, "count"),
        ("weighted", None, "count"),
        ("uniform", 0, "count must be at least 1, got 0"),
    ],
)
def test_bad_participation(kind: str, count: int | None, message: str) -> None:
    with pytest.raises(FipaError, match=f"participation: .*{message}"):
        Participation(kind, count)


def test_more_clients_than_there_are() -> None:
    with pytest.raises(FipaError, match="count = 4, but there are only 3 clients"):
        Participation("uniform", 4).select([1, 1, 1], 0, 1)


def test_no_faults_by_default() -> None:
    assert {Faults().delay(0, k, c) for k in range(20) for c in range(20)} == {0}


def test_delays_are_seeded_per_round_and_client() -> None:
    faults = Faults(drop=0.3, late=0.3)
    delays = [[faults.delay(0, k, c) for c in range(8)] for k in range(8)]
    assert delays == [[faults.delay(0, k, c) for c in range(8)] for k in range(8)]
    assert delays != [[faults.delay(1, k, c) for c in range(8)] for k in range(8)]
    assert len({tuple(row) for row in delays}) > 4


def test_distribution_of_delays() -> None:
    """Drop 0.2, late 0.3 spread over 1 to 3 rounds; four standard deviations are below 0.032."""
    faults = Faults(drop=0.2, late=0.3, max_delay=3)
    counts = Counter(faults.delay(0, k, c) for k in range(400) for c in range(10))
    shares = {delay: count / 4000 for delay, count in counts.items()}
    assert shares == pytest.approx({None: 0.2, 0: 0.5, 1: 0.1, 2: 0.1, 3: 0.1}, abs=0.032)


def test_certain_faults() -> None:
    assert {Faults(drop=1.0).delay(0, k, 0) for k in range(50)} == {None}
    assert {Faults(late=1.0, max_delay=1).delay(0, k, 0) for k in range(50)} == {1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": -0.1}, "drop"),
        ({"late": -0.1}, "late"),
        ({"drop": 0.6, "late": 0.5}, "add up to 1"),
        ({"drop": float("nan")}, "drop"),
        ({"max_delay": 0}, "max_delay"),
        ({"discount": 0.0}, "discount"),
        ({"discount": 1.1}, "discount"),
    ],
)
def test_bad_faults(settings: dict[str, float], message: str) -> None:
    with pytest.raises(FipaError, match=f"faults: .*{message}"):
        Faults(**settings)
