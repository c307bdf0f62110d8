"""Eigenpairs of float32 matrices on which LAPACK gives up."""

from __future__ import annotations

import pytest
import torch

from fipa.linalg import eigh


def symmetric(n: int, dtype: torch.dtype) -> torch.Tensor:
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return (a @ a.T).to(dtype)


def test_single_precision_falls_back_to_double(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch.linalg.eigh, []

    def fails_in_single(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_single)
    matrix = symmetric(6, torch.float32)
    values, vectors = eigh(matrix)
    assert asked == [torch.float32, torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(vectors * values @ vectors.T, matrix)


def test_double_precision_has_nowhere_to_fall_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(matrix: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(torch.linalg.LinAlgError):
        eigh(symmetric(3, torch.float64))
