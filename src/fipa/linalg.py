"""Linear algebra that does not give up, and numbers where it always finds them alike."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, the widest vector register, and what torch allocates by


def aligned(tensor: Tensor) -> Tensor:
    """The same numbers row by row, from an address that 64 divides; a copy only of what is not so already.

    Matrix products round by strides and addresses: in this form equal numbers give equal bits, whatever way they came.
    """
    sizes = (max(size, 1) for size in reversed(tensor.shape[1:]))
    rows = tuple(accumulate(sizes, mul, initial=1))[::-1]  # `is_contiguous` overlooks strides of axes of length one
    if tensor.stride() == rows[: tensor.dim()] and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix; in double precision where single does not converge.

    LAPACK fails, rarely, on harmless float32 matrices with clusters of eigenvalues at the level of rounding.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if matrix.dtype == torch.float64:
            raise
        values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix), vectors.to(matrix)
