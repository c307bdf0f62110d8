"""Vectors in 8 bits per entry: how far they are from what they stand for, and that they stand for it everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fipa.coding import BLOCK, Coded, whole_of


def vector(length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Entries whose sizes differ by orders of magnitude from block to block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (torch.rand(-(-length // BLOCK), generator=generator, dtype=dtype) * 12 - 6)
    return torch.randn(length, generator=generator, dtype=dtype) * sizes.repeat_interleave(BLOCK)[:length]


@given(
    length=st.integers(0, 3 * BLOCK), seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_each_entry_is_off_by_half_a_step_of_its_block(length: int, seed: int, dtype: torch.dtype) -> None:
    given_ = vector(length, seed, dtype)
    coded = Coded.of(given_)
    back = coded.vector(given_)
    assert back.dtype == dtype
    for entries, found in zip(given_.split(BLOCK), back.split(BLOCK), strict=True):
        most = float(entries.abs().max()) / 127 if len(entries) else 0.0
        assert float((entries - found).abs().max() if len(entries) else 0.0) <= 0.5001 * most
    assert coded.nbytes == length + 4 * -(-length // BLOCK)


@given(length=st.integers(1, 2 * BLOCK), seed=st.integers(0, 2**31 - 1))
def test_what_was_coded_is_coded_again_without_loss(length: int, seed: int) -> None:
    once = Coded.of(vector(length, seed)).vector(torch.zeros(length))
    assert torch.allclose(Coded.of(once).vector(once), once, rtol=1e-6, atol=0)


def test_nothing_is_nothing() -> None:
    zeros = torch.zeros(BLOCK + 1)
    assert torch.equal(Coded.of(zeros).vector(zeros), zeros)


def test_strides_and_addresses_do_not_matter() -> None:
    plain = vector(700)
    strided = torch.zeros(700, 3)
    strided[:, 1] = plain
    odd = torch.zeros(701)[1:]
    odd.copy_(plain)
    for other in (strided[:, 1], odd):
        assert torch.equal(Coded.of(other).codes, Coded.of(plain).codes)
        assert torch.equal(Coded.of(other).vector(odd), Coded.of(plain).vector(plain))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_become_one(bad: float) -> None:
    """Clients see to it that this is not sent; should it be, the server sees it."""
    given_ = vector(300)
    given_[7] = bad
    assert not bool(Coded.of(given_).vector(given_).isfinite().all())


def test_parts_add_up() -> None:
    parts = [vector(500, seed) for seed in range(3)]
    whole = whole_of([Coded.of(part) for part in parts], parts[0])
    torch.testing.assert_close(whole, sum(Coded.of(part).vector(part) for part in parts), rtol=1e-6, atol=1e-6)
