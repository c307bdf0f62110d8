r"""Leading eigenpairs of $H = A^\top A$.

Each solver takes an operator and returns orthonormal eigenvectors (p x r) and eigenvalues (r, descending).

- `exact`: a Gram matrix on the shorter side of A. For small problems, and as the oracle of the others.
- `subspace_iteration`: the paper's reference path (its section on the client-side sketch).
- `block_krylov`: keeps all blocks that subspace iteration throws away, so it needs far fewer products for the same
  accuracy (Musco and Musco, 2015), and works on the shorter side of A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fipa.curvature.operator import CurvatureOperator, Eigenpairs, check_finite
from fipa.errors import SketchError
from fipa.linalg import eigh

AT_ONCE = 4096  # rows of eigenvectors
ORTHOGONAL = 1e-5  # to how much eigenvectors have to be
EXACT_LIMIT = 4096  # a Gram matrix of this side is the largest we decompose


def exact(operator: CurvatureOperator, rank: int) -> Eigenpairs:
    """All eigenpairs by a Gram matrix of side min(rows, p); the `rank` largest are returned."""
    short = min(operator.rows, operator.parameters)
    if short > EXACT_LIMIT:
        raise SketchError(
            f"the exact solver would decompose a {short} x {short} matrix (limit {EXACT_LIMIT}): "
            'use solver="krylov" or "subspace", or fewer examples (max_examples)'
        )
    like = operator.like
    if operator.rows <= operator.parameters:
        gram = operator.gram()
        values, Z = _leading(gram, rank, like.dtype)
        more = gram.dtype != like.dtype
        if more and _orthogonal(values, like.dtype):
            return operator.adjoint((Z * values.rsqrt()).to(like)), values.to(like)
        columns, values = operator.adjoint(Z.to(like)), values.to(like)
        if not more:
            columns, values, _ = _refine(columns, values, Z)
        return _normalise(columns, values)
    values, U = _leading(operator.dense(), rank, like.dtype)
    _, values, U = _refine(operator.forward(U), values, U)
    return U, values


def subspace_iteration(
    operator: CurvatureOperator, rank: int, *, oversampling: int, iterations: int, generator: torch.Generator
) -> Eigenpairs:
    r"""Paper's subspace iteration, $V \leftarrow \mathrm{orth}(H V)$ q times, then Rayleigh-Ritz.

    `oversampling` is s, `iterations` is q; the block has L = r + s columns.
    """
    columns = min(rank + oversampling, operator.parameters)
    V = operator.random(operator.parameters, columns, generator)
    for _ in range(iterations):
        V = torch.linalg.qr(operator.product(V)).Q
    return _from_basis(operator, V if iterations else torch.linalg.qr(V).Q, rank)


def block_krylov(
    operator: CurvatureOperator, rank: int, *, oversampling: int, iterations: int, generator: torch.Generator
) -> Eigenpairs:
    """Rayleigh-Ritz on the span of `iterations` + 1 Krylov blocks of (rank + oversampling) / 2 columns.

    Works in the space of rows when A has fewer rows than columns: the blocks that must be kept orthogonal are shorter.
    """
    by_rows = operator.rows <= operator.parameters
    side = min(operator.rows, operator.parameters)
    columns = min(-(-(rank + oversampling) // min(2, iterations + 1)), side)
    out = operator.adjoint if by_rows else operator.forward
    back = operator.forward if by_rows else operator.adjoint

    Q = torch.linalg.qr(operator.random(side, columns, generator)).Q
    long = max(operator.rows, operator.parameters)
    image = Q.new_empty(long, min(side, columns * (iterations + 1)))  # A^T Q or A Q, which Rayleigh-Ritz needs again
    image[:, :columns] = out(Q)
    for _ in range(iterations):
        last = image[:, Q.shape[1] - columns : Q.shape[1]]
        block = back(last)[:, : side - Q.shape[1]]
        if block.shape[1] == 0:
            break
        for _ in range(3):  # once for the digits, and twice for columns that QR makes up where the block has no rank
            block = torch.linalg.qr(block - Q @ (Q.T @ block)).Q
        image[:, Q.shape[1] : Q.shape[1] + block.shape[1]] = out(block)
        Q = torch.cat([Q, block], dim=1)
        columns = block.shape[1]
    if by_rows:
        return _from_columns(image, rank)
    _, values, right = _right_singular(image, rank)
    return Q @ right, values


def _from_basis(operator: CurvatureOperator, V: Tensor, rank: int) -> Eigenpairs:
    """Rayleigh-Ritz on the span of the orthonormal columns of V (p x L)."""
    _, values, right = _right_singular(operator.forward(V), rank)
    return V @ right, values


def _from_columns(C: Tensor, rank: int) -> Eigenpairs:
    r"""Leading eigenpairs of $C C^\top$ for C (p x m)."""
    columns, values, _ = _right_singular(C, rank)
    return _normalise(columns, values)


def _normalise(columns: Tensor, values: Tensor) -> Eigenpairs:
    """Eigenvectors from columns of length sqrt(value), orthogonal up to rounding, which one Cholesky-QR mends.

    They may take the memory of the columns. Where rounding has left little of small eigenvalues, Householder's QR does
    the same, slower.
    """
    scale = values.rsqrt()
    lower, failed = torch.linalg.cholesky_ex(columns.T @ columns * scale * scale[:, None])
    if bool(failed) or bool((lower.diagonal() < 0.5).any()):  # far from orthogonal: Cholesky is not to be trusted
        Q, R = torch.linalg.qr(columns * scale)
        return torch.where(R.diagonal() < 0, -Q, Q), values
    turn = torch.linalg.solve_triangular(lower, scale.diag(), upper=False)
    for part in columns.split(AT_ONCE):  # in place: as much memory again would take as long as the products
        part.copy_(part @ turn.T)
    return columns, values


def _right_singular(C: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """$C R$, the leading squared singular values, and the right singular vectors R, leaving out the null space."""
    values, vectors = _leading(C.T @ C, rank, C.dtype)
    return _refine(C @ vectors, values, vectors)


def _refine(image: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where a Gram matrix has lost half of the digits of small eigenvalues, take them from the vectors' image."""
    if len(values) and values[-1] < torch.finfo(image.dtype).eps ** 0.5 * values[0]:
        _, sigma, turn = torch.linalg.svd(torch.linalg.qr(image, mode="r").R)
        return image @ turn.T, sigma.square(), vectors @ turn.T
    return image, values, vectors


def _orthogonal(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether the images of eigenvectors that are known in more digits need no mending.

    Each is off by the rounding of the largest.
    """
    return not len(values) or torch.finfo(dtype).eps * float((values[0] / values[-1]).sqrt()) <= ORTHOGONAL


def _leading(gram: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Leading eigenvalues and eigenvectors, without those that this dtype does not tell from zero."""
    check_finite(gram)
    values, vectors = eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    check_finite(values.to(dtype))
    about = torch.finfo(dtype)
    supported = int((values > max(16 * about.eps * float(values[0]), about.tiny)).sum()) if len(values) else 0
    return values[:supported], vectors[:, :supported]
