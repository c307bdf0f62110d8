r"""Curvature in a basis that all clients share: $Q^\top H_m Q$, a small matrix in the place of eigenvectors.

The columns of Q (p x k) are known to the server and to every client. With the rows $A_m$ of the Gauss-Newton matrix,
$H_m = A_m^\top A_m$, the answer is $(A_m Q)^\top (A_m Q)$: one product with each column, and no eigen-solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fipa.curvature.operator import check_finite
from fipa.curvature.options import Options
from fipa.curvature.routes import MEMORY_LIMIT, Route, curvature_of
from fipa.curvature.summary import CurvatureSummary, Occasion, SampledPlan, Shape, Source, wrong_shape
from fipa.curvature.terms import LossName
from fipa.errors import SketchError
from fipa.layout import Layout
from fipa.linalg import aligned

_STEPS = 127  # the largest of the whole numbers in 8 bits
_NEGATIVE = 1e-4  # of the largest eigenvalue: how far rounding may take a matrix below zero


@dataclass(frozen=True, eq=False)
class BasisCurvature(CurvatureSummary):
    r"""A client's curvature, seen through a basis.

    Attributes
    ----------
    matrix
        $S_m = Q^\top H_m Q$ (k x k).
    moment
        $Q^\top H_m \Delta\theta_m$ (k), for clients that train; empty for those that send their gradient.
    basis
        Q (p x k), which every party has: it does not travel with the answer.
    layout
        Names and shapes of the parameters that the rows of Q stand for, in order.
    """

    matrix: Tensor
    moment: Tensor
    basis: Tensor
    layout: Layout

    kind = "basis"
    made_by = "fipa.basis_curvature"
    roughest = "float32"  # `packed` knows a better way to send it in few bits
    unlike = "a curvature in another basis"

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {"matrix": self.matrix, "moment": self.moment, "basis": self.basis}

    def sent(self) -> dict[str, Tensor]:
        """The tensors that travel: of a symmetric matrix one half."""
        return {"half": pack(self.matrix), "moment": self.moment}

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        k = self.basis.shape[-1]
        flaw = wrong_shape("basis", self.basis, (parameters, k)) or wrong_shape("matrix", self.matrix, (k, k))
        if flaw is None and self.moment.shape != (0,):
            flaw = wrong_shape("moment", self.moment, (k,))
        if flaw is None and _negative(self.matrix):
            flaw = f"sent {_negative(self.matrix)}"
        return flaw

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        raise SketchError("has a matrix in a shared basis where none was asked for: it is the answer to a second trip")

    def packed(self, bits: int = 8) -> Tensor:
        r"""All that travels, in bytes (uint8): one half of the matrix, and the moment.

        In 8 bits it is the triangle L of $S_m = L L^\top$ that travels, each of its rows as whole numbers with a scale
        of their own. What arrives is a curvature again, never negative, whatever the rounding.
        """
        if bits == 32:
            return _bytes(torch.cat([pack(self.matrix), self.moment]))
        rows = _triangle(self.matrix.double().cpu())
        scales = (
            (rows.abs().amax(dim=1) / _STEPS).to(self.matrix.dtype)
            if len(rows)
            else rows.new_zeros(0).to(self.matrix.dtype)
        )
        whole = rows / scales.double().clamp(min=torch.finfo(scales.dtype).tiny)[:, None]
        half = pack(whole.round().clamp(-_STEPS, _STEPS)).to(torch.int8)
        return torch.cat([half.view(torch.uint8), _bytes(torch.cat([scales, self.moment.cpu()]))])

    @classmethod
    def unpacked(cls, answer: Tensor, basis: Tensor, layout: Layout, bits: int = 8, trained: bool = False) -> Self:
        """The summary from `packed`, of a client that trains with a moment; what cannot be is a `SketchError`."""
        k, dtype = basis.shape[1], basis.dtype
        length = packed_length(k, bits, dtype, trained)
        if answer.dtype != torch.uint8 or answer.shape != (length,):
            raise SketchError(f"has {answer.numel()} bytes for a basis of {k} columns, expected {length}")
        half = k * (k + 1) // 2
        numbers = _numbers(answer[half if bits == 8 else 0 :], dtype)
        if not bool(numbers.isfinite().all()):
            raise SketchError("has NaN or infinity in it")
        if bits == 8:
            whole = torch.zeros(k, k, dtype=torch.float64)
            whole[torch.tril_indices(k, k).unbind()] = answer[:half].view(torch.int8).double()
            rows = whole * numbers[:k].double()[:, None]
            matrix, moment = (rows @ rows.T).to(dtype), numbers[k:]
            matrix = (matrix + matrix.T) / 2
        else:
            matrix, moment = unpack(numbers[:half], k), numbers[half:]
        summary = cls(aligned(matrix), aligned(moment), basis, layout)
        if not bool(summary.matrix.isfinite().all()):  # finite scales may have an infinite product
            raise SketchError("has NaN or infinity in it")
        flaw = _negative(summary.matrix)
        if flaw:
            raise SketchError(f"has {flaw}")
        return summary


def packed_length(size: int, bits: int, dtype: torch.dtype, trained: bool = False) -> int:
    """Bytes of `BasisCurvature.packed` in a basis of that size, with a moment if clients train."""
    half, word, moment = size * (size + 1) // 2, dtype.itemsize, size * trained
    return half + word * (size + moment) if bits == 8 else word * (half + moment)


def _triangle(matrix: Tensor) -> Tensor:
    """L with L L^T = S, lower triangular; of a matrix without inverse as near as rounding allows."""
    unit = torch.eye(len(matrix), dtype=matrix.dtype) * float(matrix.diagonal().clamp(min=0).sum() or 1.0)
    for shift in (1e-9, 1e-8, 1e-7, 1e-6, 1e-5):  # rounding is no curvature
        found, failed = torch.linalg.cholesky_ex(matrix + shift * unit)
        if not int(failed):
            return found
    raise SketchError(f"has {_negative(matrix) or 'a matrix that is not positive'}")


def _bytes(numbers: Tensor) -> Tensor:
    """Little-endian, on every machine."""
    words = numbers.detach().cpu().contiguous().numpy()
    return torch.from_numpy(np.frombuffer(words.astype(words.dtype.newbyteorder("<")).tobytes(), np.uint8).copy())


def _numbers(given: Tensor, dtype: torch.dtype) -> Tensor:
    word = torch.zeros((), dtype=dtype).numpy().dtype
    return torch.from_numpy(np.frombuffer(given.numpy().tobytes(), word.newbyteorder("<")).astype(word))


def pack(matrix: Tensor) -> Tensor:
    """One half of a symmetric matrix, row by row (k (k + 1) / 2)."""
    rows, columns = torch.tril_indices(*matrix.shape)
    return matrix[rows, columns]


def unpack(half: Tensor, size: int) -> Tensor:
    """The symmetric matrix of which `pack` took one half."""
    rows, columns = torch.tril_indices(size, size)
    matrix = half.new_zeros(size, size)
    matrix[rows, columns] = half
    matrix[columns, rows] = half
    return matrix


def basis_curvature(
    model: nn.Module,
    data: Any,
    loss: LossName = "cross_entropy",
    *,
    basis: Tensor,
    delta: Tensor | None = None,
    route: Route = "auto",
    memory_limit: int = MEMORY_LIMIT,
    **options: Unpack[Options],
) -> BasisCurvature:
    r"""$Q^\top H_m Q$ at the model's present parameters, in eval mode.

    Parameters
    ----------
    model, data, loss, route, memory_limit, **options
        As for `fipa.sketch`.
    basis
        Q (p x k), the same for all clients of a round.
    delta
        The flat update of a client that trains, whose $Q^\top H_m \Delta\theta_m$ is then told as well.

    Examples
    --------
    >>> model = nn.Linear(4, 3)
    >>> Q, _ = torch.linalg.qr(torch.randn(15, 6))
    >>> basis_curvature(model, torch.randn(50, 4), basis=Q).matrix.shape
    torch.Size([6, 6])
    """
    with curvature_of(
        model, data, loss, route=route, memory_limit=memory_limit, hold=False, **options
    ) as (operator, layout, _):  # fmt: skip
        like = operator.like
        if basis.dim() != 2 or len(basis) != layout.numel:
            raise SketchError(f"basis has shape {tuple(basis.shape)}, expected {layout.numel} rows: one per parameter")
        if delta is not None and delta.numel() != layout.numel:
            raise SketchError(f"delta has {delta.numel()} elements, expected {layout.numel}: one per parameter")
        basis = aligned(basis.to(like))
        seen = basis if delta is None else torch.cat([basis, delta.reshape(-1, 1).to(like)], dim=1)
        product = operator.forward(seen)
    k = basis.shape[1]
    inside = product[:, :k]
    matrix = inside.T @ inside
    matrix = (matrix + matrix.T) / 2  # exact symmetry: only one half travels
    moment = (inside.T @ product[:, k:])[:, 0] if delta is not None else matrix.new_zeros(0)
    check_finite(matrix)
    return BasisCurvature(matrix, moment, basis, layout)


@dataclass(frozen=True)
class BasisPlan(SampledPlan):
    """A matrix in the shared basis, as for `fipa.basis_curvature`."""

    route: Route = "auto"

    makes = BasisCurvature

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> BasisCurvature:
        """The client's matrix in the occasion's basis."""
        if occasion.basis is None:
            raise SketchError("a curvature in a shared basis needs one: give Occasion(..., basis=...)")
        return basis_curvature(
            model, client.tensors, client.loss, basis=occasion.basis, delta=occasion.delta, route=self.route,
            **self.options(layout, occasion),
        )  # fmt: skip


def _negative(matrix: Tensor) -> str | None:
    """Words for a matrix that cannot be a curvature, or None."""
    if not bool(matrix.isfinite().all()):
        return None  # others say so
    values = torch.linalg.eigvalsh(matrix.double())
    if len(values) and bool(values[0] < -_NEGATIVE * values.abs().max()):
        return f"a matrix with the eigenvalue {float(values[0]):.3g}: a curvature is not negative"
    return None
