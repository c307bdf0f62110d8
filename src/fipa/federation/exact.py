r"""Arithmetic on the columns of a shared basis that gives the same bits everywhere.

What is multiplied is on a grid: products of two numbers, and all sums of such products that can occur, fit the 53 bits
of a double. So a matrix product is exact in whatever order it is computed. Rows are shared out to the cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fipa.linalg import aligned
from fipa.parallel import by_rows

GRID, FINE = 2.0**23, 2.0**28  # steps of 1 in entries of a basis, and of what it is multiplied by
BLOCK = 2**20  # bytes that have a checksum of their own


def on_grid(matrix: Tensor, steps: float) -> Tensor:
    """Rounded to whole steps."""
    return (matrix * steps).round_().div_(steps).add_(0.0)  # no negative zero: checksums are of bytes


def powers(exponents: Tensor) -> Tensor:
    """Powers of 2, exactly: torch's own may be off by a bit on some processors."""
    return torch.tensor([2.0**n for n in exponents.tolist()], dtype=torch.float64)


def gram_of(columns: Tensor) -> Tensor:
    r"""$Q^\top Q$ in double precision; for columns on the grid nothing is rounded."""
    columns = aligned(columns)

    def squares(parts: Iterator[slice]) -> Tensor:
        total = torch.zeros(columns.shape[1], columns.shape[1], dtype=torch.float64)
        for rows in parts:
            wide = columns[rows].double()
            total += wide.T @ wide
        return total

    return _sum(by_rows(len(columns), squares))


def turned(columns: Tensor, turn: Tensor) -> Tensor:
    """A basis times R, back on the grid; the same bits on every machine."""
    columns = aligned(columns)
    after = torch.empty(len(columns), turn.shape[1], dtype=torch.float32)

    def turn_some(parts: Iterator[slice]) -> None:
        for rows in parts:
            after[rows] = on_grid(columns[rows].double() @ turn, GRID)

    by_rows(len(columns), turn_some)
    return after


def joined(columns: Tensor, loose: Tensor, root: Tensor) -> Tensor:
    """A basis with more columns: `loose` (p x n, double precision) times a root (n x n'), back on the grid."""
    before = columns.shape[1]
    after = torch.empty(len(columns), before + root.shape[1], dtype=torch.float32)

    def join(parts: Iterator[slice]) -> None:
        for rows in parts:
            after[rows, :before] = columns[rows]
            after[rows, before:] = on_grid(loose[rows] @ root, GRID)

    by_rows(len(columns), join)
    return after


def outside(columns: Tensor, codes: Tensor) -> Tensor:
    """What codes (whole numbers, p x n) have outside of a basis, each about as long as 1; the same bits everywhere."""
    columns, codes = aligned(columns), aligned(codes)

    def squares(parts: Iterator[slice]) -> Tensor:
        total = torch.zeros(codes.shape[1], dtype=torch.float64)
        for rows in parts:
            total += codes[rows].double().square().sum(0)
        return total

    lengths = _sum(by_rows(len(codes), squares))
    scales = powers(torch.tensor([-(int(n).bit_length() // 2) for n in lengths.tolist()]))

    def products(parts: Iterator[slice]) -> Tensor:
        total = torch.zeros(codes.shape[1], columns.shape[1], dtype=torch.float64)
        for rows in parts:
            total += (codes[rows] * scales).T @ columns[rows].double()  # faster in BLAS than the other way round
        return total

    inside = on_grid(_sum(by_rows(len(codes), products)).T, FINE)
    given = torch.empty(codes.shape, dtype=torch.float64)

    def subtract(parts: Iterator[slice]) -> None:
        for rows in parts:
            given[rows] = on_grid(codes[rows] * scales - columns[rows].double() @ inside, GRID)

    by_rows(len(codes), subtract)
    return given


def mark_of(tensor: Tensor) -> str:
    """A checksum of a basis or a model, the same on every machine: of those of its blocks."""
    words = tensor.contiguous().numpy()
    data = words.astype(words.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data

    def digests(parts: Iterator[slice]) -> bytes:
        return b"".join(hashlib.sha256(data[part]).digest() for part in parts)

    return hashlib.sha256(b"".join(by_rows(len(data), digests, BLOCK))).hexdigest()[:32]


def _sum(matrices: Sequence[Tensor]) -> Tensor:
    return sum(matrices[1:], matrices[0])
