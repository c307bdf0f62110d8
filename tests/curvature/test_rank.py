"""How many eigenpairs are kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fipa import RelativeThreshold, SketchError, TraceShare

VALUES = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("share", "count"), [(1.0, 1), (0.51, 1), (0.5, 2), (0.25, 3), (0.13, 3), (0.125, 5), (0.0, 5)]
)
def test_relative_threshold(share, count):
    assert RelativeThreshold(share).count(VALUES, trace=16.0) == count


@pytest.mark.parametrize(("share", "count"), [(0.1, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.9, 4), (0.99, 5), (1.0, 5)])
def test_trace_share(share, count):
    assert TraceShare(share).count(VALUES, trace=16.0) == count


def test_trace_share_keeps_all_if_they_hold_too_little():
    assert TraceShare(0.9).count(VALUES, trace=1000.0) == 5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_trace_share_is_the_smallest_that_suffices(values, share):
    eigenvalues = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    trace = float(eigenvalues.sum())
    count = TraceShare(share).count(eigenvalues, trace)
    assert float(eigenvalues[:count].sum()) >= share * trace * (1 - 1e-9)
    assert count == 1 or float(eigenvalues[: count - 1].sum()) < share * trace


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.floats(0, 1.0))
def test_relative_threshold_splits_the_spectrum(values, share):
    eigenvalues = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    count = RelativeThreshold(share).count(eigenvalues, float(eigenvalues.sum()))
    assert all(float(v) >= share * float(eigenvalues[0]) for v in eigenvalues[:count])
    assert all(float(v) < share * float(eigenvalues[0]) for v in eigenvalues[count:])


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("kind", [RelativeThreshold, TraceShare])
def test_shares_outside_of_0_and_1_are_refused(kind, share):
    with pytest.raises(SketchError, match="share"):
        kind(share)


def test_no_share_of_the_trace_is_refused():
    with pytest.raises(SketchError, match=r"share in \(0, 1\], got 0"):
        TraceShare(0)
