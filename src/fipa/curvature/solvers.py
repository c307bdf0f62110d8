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

from fipa.curvature.explicit import ExplicitRows
from fipa.curvature.operator import CurvatureOperator, check_finite
from fipa.errors import SketchError

EXACT_LIMIT = 4096  # a Gram matrix of this side is the largest we decompose

Eigenpairs = tuple[Tensor, Tensor]


def exact(operator: CurvatureOperator, rank: int) -> Eigenpairs:
    """All eigenpairs by a Gram matrix of side min(rows, p); the `rank` largest are returned."""
    short = min(operator.rows, operator.parameters)
    if short > EXACT_LIMIT:
        raise SketchError(
            f"the exact solver would decompose a {short} x {short} matrix (limit {EXACT_LIMIT}): "
            'use solver="krylov" or "subspace", or fewer examples (max_examples)'
        )
    identity = torch.eye(short, dtype=operator.like.dtype, device=operator.like.device)
    if operator.rows <= operator.parameters:
        held = operator.matrix if isinstance(operator, ExplicitRows) else None
        return _from_columns(operator.adjoint(identity) if held is None else held.T, rank)
    return _from_basis(operator, identity, rank)


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
    images = [out(Q)]  # A^T Q or A Q, block by block: Rayleigh-Ritz needs them again
    for _ in range(iterations):
        block = back(images[-1])[:, : side - Q.shape[1]]
        if block.shape[1] == 0:
            break
        for _ in range(3):  # once for the digits, and twice for columns that QR makes up where the block has no rank
            block = torch.linalg.qr(block - Q @ (Q.T @ block)).Q
        Q = torch.cat([Q, block], dim=1)
        images.append(out(block))
    image = torch.cat(images, dim=1)
    if by_rows:
        return _from_columns(image, rank)
    values, right = _right_singular(image, rank)
    return Q @ right, values


def _from_basis(operator: CurvatureOperator, V: Tensor, rank: int) -> Eigenpairs:
    """Rayleigh-Ritz on the span of the orthonormal columns of V (p x L)."""
    values, right = _right_singular(operator.forward(V), rank)
    return V @ right, values


def _from_columns(C: Tensor, rank: int) -> Eigenpairs:
    r"""Leading eigenpairs of $C C^\top$ for C (p x m)."""
    values, right = _right_singular(C, rank)
    return (C @ right) / values.sqrt(), values


def _right_singular(C: Tensor, rank: int) -> Eigenpairs:
    """Leading squared singular values of C and their right singular vectors, leaving out the null space."""
    gram = C.T @ C
    check_finite(gram)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    eps = torch.finfo(C.dtype).eps
    supported = int((values > 16 * eps * values[0]).sum())
    values, vectors = values[:supported], vectors[:, :supported]
    if supported and values[-1] < eps**0.5 * values[0]:
        # The Gram matrix has lost half of the digits of values this small: take them from the columns instead.
        _, sigma, turn = torch.linalg.svd(torch.linalg.qr(C @ vectors, mode="r").R)
        values, vectors = sigma.square(), vectors @ turn.T
    return values, vectors
