"""Tensors as arrays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from fipa.errors import FipaError
from fipa.flower.codec import PayloadError, check_precision, nbytes, pack, tensors_in, unpack


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_columns", [False, True])
def test_exact_and_in_the_one_form_of_memory(dtype: torch.dtype, by_columns: bool) -> None:
    matrix = torch.randn(5, 3, generator=rng(), dtype=dtype)
    matrix = matrix.T.contiguous().T if by_columns else matrix
    tensors = unpack(pack({"m": matrix, "v": matrix[0]}), {"m": (5, None), "v": (3,)}, dtype)
    assert torch.equal(tensors["m"], matrix)
    assert tensors["m"].stride() == (3, 1)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())
    assert torch.equal(tensors["v"], matrix[0])


@given(st.integers(1, 40), st.integers(0, 6), st.sampled_from(["bfloat16", "int8"]), st.floats(-6, 6))
def test_errors_of_compression_are_bounded(rows: int, columns: int, precision: Any, size: float) -> None:
    matrix = torch.randn(rows, columns, generator=rng(rows)) * 10**size
    record = pack({"m": matrix}, precision)
    back = unpack(record, {"m": (rows, columns)}, torch.float32)["m"]
    largest = matrix.abs().amax(dim=0)
    bound = largest / 254 * 1.001 if precision == "int8" else matrix.abs() * 2.0**-8
    assert bool(((back - matrix).abs() <= bound).all())
    assert nbytes(record) == rows * columns * (1 if precision == "int8" else 2) + (
        4 * columns if precision == "int8" else 0
    )


def test_a_column_of_zeros() -> None:
    back = unpack(pack({"m": torch.zeros(4, 2)}, "int8"), {"m": (4, 2)}, torch.float32)["m"]
    assert torch.equal(back, torch.zeros(4, 2))


def test_what_cannot_be_sent_or_read() -> None:
    with pytest.raises(FipaError, match="cannot be sent"):
        pack({"n": torch.ones(3, dtype=torch.complex64)})
    with pytest.raises(PayloadError, match="in the format"):  # part of a model, never of an answer
        unpack(pack({"n": torch.ones(3, dtype=torch.int64)}), {"n": (3,)}, torch.float32)
    with pytest.raises(FipaError, match="there is no precision 'int4'"):
        check_precision("int4")
    scales = ArrayRecord({**pack({"m": torch.ones(4, 2)}, "int8"), "m.scale": Array("int8", (3,), "fipa.rows", b"abc")})
    with pytest.raises(PayloadError, match=r"m\.scale"):
        unpack(scales, {"m": (4, 2)}, torch.float32)


def test_parts_of_a_model_come_back_as_they_were() -> None:
    parts = {
        "weight": torch.randn(3, 2, generator=rng()), "half": torch.ones(2, dtype=torch.bfloat16),
        "batches": torch.tensor(7), "mask": torch.tensor([True, False]), "none": torch.zeros(0),
    }  # fmt: skip
    back = tensors_in(pack(parts))
    assert list(back) == list(parts)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in parts.items())


def test_one_large_entry_does_not_round_the_others_away() -> None:
    column = torch.randn(100_000, 1, generator=rng())
    column[7] = column.norm() / 3**0.5  # half of the length
    column /= column.norm()
    back = unpack(pack({"m": column}, "int8"), {"m": (100_000, 1)}, torch.float32)["m"]
    assert float(back.norm()) == pytest.approx(1, abs=1e-3)
    assert float((back * column).sum() / back.norm()) > 0.999
