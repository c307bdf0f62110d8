"""Linear algebra that does not give up."""

from __future__ import annotations

import torch
from torch import Tensor


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
