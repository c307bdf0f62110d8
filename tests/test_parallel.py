"""Rows shared out to cores: every row once, and the same shares on any number of cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fipa import parallel
from fipa.parallel import PART, SHARE, by_rows, inside, spanned
from fipa.threads import threads


def listed(parts: Iterator[slice]) -> list[slice]:
    return list(parts)


@given(st.integers(0, 5 * PART * SHARE))
def test_every_row_once_and_in_order(count: int) -> None:
    shares = by_rows(count, listed)
    parts = [part for share in shares for part in share]
    assert [part.start for part in parts] == list(range(0, count, PART))
    assert all(part.stop == min(part.start + PART, count) for part in parts)
    assert len(shares) == max(1, -(-count // (PART * SHARE)))


def test_shares_are_the_same_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores in (1, 2, 7):
        monkeypatch.setattr(parallel, "cores", lambda cores=cores: cores)
        with threads(1):
            found.append(by_rows(4 * PART * SHARE + 1, listed))
    assert found[0] == found[1] == found[2]


def test_several_cores_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    both = threading.Barrier(2, timeout=60)
    with threads(1):
        by_rows(2 * PART * SHARE, lambda parts: both.wait())


def test_cores_that_torch_uses_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    with threads(2):
        found = by_rows(2 * PART * SHARE, lambda parts: threading.current_thread())
    assert found == 2 * [threading.current_thread()]


def test_few_rows_stay_in_this_thread() -> None:
    assert by_rows(PART * SHARE, lambda parts: threading.current_thread()) == [threading.current_thread()]


def test_errors_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)

    def fails(parts: Iterator[slice]) -> None:
        if next(parts).start:
            raise ArithmeticError("of a share")

    with threads(1), pytest.raises(ArithmeticError, match="of a share"):
        by_rows(3 * PART * SHARE, fails)


@given(st.integers(1, 3 * PART), st.integers(0, 4), st.sampled_from([(), (1,), (3,)]))
def test_products_with_the_columns_of_a_basis(rows: int, width: int, several: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(rows)
    columns = torch.randn(rows, width, generator=generator)
    vectors = torch.randn(*several, rows, generator=generator)
    within = inside(columns, vectors)
    torch.testing.assert_close(within.double(), vectors.double() @ columns.double(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(spanned(columns, within), within @ columns.T)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_threads_have_the_modes_of_the_one_that_asks(
    mode: type[torch.no_grad], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    with threads(1), mode():
        here = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads()
        asked = lambda _: (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads())  # noqa: E731
        assert parallel.at_once(asked, [1, 2]) == [here, here]


def test_products_are_the_same_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(2 * PART * SHARE + 5, 3, dtype=torch.float64, generator=generator)
    vector = torch.randn(len(columns), dtype=torch.float64, generator=generator)
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(parallel, "cores", lambda cores=cores: cores)
        with threads(1):
            found.append((inside(columns, vector), spanned(columns, inside(columns, vector))))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][1], columns @ (columns.T @ vector))
