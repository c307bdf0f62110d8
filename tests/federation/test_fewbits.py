"""Columns in few bits: what is lost, and that all who unpack them have the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fipa.federation.fewbits import BLOCK, LEVELS, _codes, _four, _two, entries, lengths, pack

SEEDS = st.integers(0, 2**20)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=dtype)


@pytest.mark.parametrize("parameters", [1, 2, 3, 6, 7, 33, 100])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_length_tells_how_many_bits(parameters: int, bits: int) -> None:
    column = randn(parameters, 2)
    packed = pack(column, bits)
    assert len(packed) == lengths(parameters)[-1 if bits == 2 else 0]
    assert max(lost(column, entries(packed, parameters))) < 0.3


@given(rows=st.integers(1, 9), columns=st.integers(1, 4), seed=SEEDS)
def test_two_codes_in_a_byte(rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(-LEVELS, LEVELS + 1, (rows, columns), generator=rng(seed)).to(torch.int8)
    packed = _two(codes)
    assert packed.shape == ((rows + 1) // 2, columns)
    assert packed.dtype == torch.uint8
    assert torch.equal(entries(packed, rows), codes)


def lost(columns: Tensor, found: Tensor) -> list[float]:
    """The share of each column's energy that its best multiple of the entries leaves out."""
    given, told = columns.double(), found.double()
    return (1 - (given * told).sum(0) ** 2 / (given.square().sum(0) * told.square().sum(0))).tolist()


@given(parameters=st.integers(7, 1500), count=st.integers(1, 3), seed=SEEDS)
def test_two_bits_lose_little_of_layers_of_any_size(parameters: int, count: int, seed: int) -> None:
    """Gradients of layers differ in size."""
    sizes = 10.0 ** torch.randint(-3, 1, (parameters // BLOCK + 1, 1), generator=rng(seed)).repeat_interleave(BLOCK, 0)
    columns = randn(parameters, count, seed=seed) * sizes[:parameters]
    packed = _four(columns)
    assert packed.dtype == torch.uint8
    assert packed.shape == (math.ceil(parameters / 4) + math.ceil(parameters / BLOCK), count)
    found = entries(packed, parameters)
    assert int(found.abs().max()) <= 3 * 7 * 2**8
    assert max(lost(columns, found)) < 0.3  # nearly all of it may be in a few entries


def test_two_bits_of_zeros_are_zeros() -> None:
    column = torch.zeros(3 * BLOCK, 1)
    column[BLOCK : 2 * BLOCK] = randn(BLOCK, 1)
    found = entries(_four(column), 3 * BLOCK)
    assert not bool(found[:BLOCK].any())
    assert not bool(found[2 * BLOCK :].any())
    assert lost(column, found)[0] < 0.2


def test_codes_cut_off_few_largeentries() -> None:
    """Of a column with one entry far from the others a finer step is nearer than one that reaches it."""
    column = randn(1000, 1, dtype=torch.float64)
    column[0] = 12.0
    codes = _codes(column).double()
    step = float((codes * column).sum() / (codes * codes).sum())
    coarse = (column / (12 / LEVELS)).round() * 12 / LEVELS
    assert float((column - step * codes).norm()) < 0.7 * float((column - coarse).norm())
