r"""The stacked sketches of a round, $A^\top = [\sqrt{w_1} U_1 \Lambda_1^{1/2}, \dots]$, without stacking them.

$\hat H = A^\top A$ has at most $R = \sum_m r_m$ eigenvalues that are not zero, those of the small matrix $A A^\top$.
`spectrum` finds them in one of three ways, by how small an eigenvalue must still be told from zero:

- products in the sketches' own dtype, summed in float64: half of the cost of float64, safe under strong damping;
- the same in float64: safe while the Gram matrix, which squares the condition number, still resolves the damping, or
  the cut-off of a pseudo-inverse to the digits that the sketches have;
- the triangular factor of a thin QR of $A^\top$, which does not square it: always safe, at several times the cost.

All three read the sketches in blocks of rows, so that they need little memory beyond the sketches themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations_with_replacement, pairwise

import torch
from torch import Tensor

from fipa.curvature.sketch import Sketch
from fipa.linalg import eigh
from fipa.parallel import at_once
from fipa.spill import Passing, release

_BLOCK_ROWS = 16384
_MANY = 16  # clients from which on their sketches are put side by side, and sums of products widened
_PANEL = 256  # columns of such a panel, at least
_WORTH_THREADS = 10**8  # products
SAFE_IN_OWN_DTYPE = 1e-3
_SAFE_AS_GRAM = 1e-9
_MARGIN = 100  # what eigenvalues close to the cut-off make of rounding


class Stack:
    """A (R x p) as a list of clients' blocks; `resolution` is the smallest relative eigenvalue that matters."""

    def __init__(self, sketches: Sequence[Sketch], weights: Sequence[float]) -> None:
        self.vectors = Passing([s.eigenvectors for s in sketches])
        self.scales = [(w * s.eigenvalues.double()).sqrt() for w, s in zip(weights, sketches, strict=True)]
        self.ranks = [s.rank for s in sketches]
        self.nbytes = sum(U.nbytes for U in self.vectors)
        self._backwards = False  # the last pass of `applied`
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sketches; their rounding is the noise of the spectrum."""
        return self.vectors[0].dtype

    @property
    def largest_possible(self) -> float:
        """An upper bound of the largest eigenvalue of H."""
        return sum(float(s.square().max()) for s in self.scales if len(s))

    def times(self, vector: Tensor) -> Tensor:
        """$A v$ (R), in float64."""
        return torch.cat(self.times_each([vector] * len(self.vectors)))

    def times_each(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Client m's rows of A applied to its own vector."""
        return [scale * (U.T @ v).double() for U, scale, v in zip(self.vectors, self.scales, vectors, strict=True)]

    def transposed(self, z: Tensor) -> Tensor:
        r"""$A^\top z$ (p), in the sketches' dtype."""
        total = self.vectors[0].new_zeros(len(self.vectors[0]))
        for U, scale, part in zip(self.vectors, self.scales, z.split(self.ranks), strict=True):
            total.addmv_(U, (scale * part).to(U.dtype))
        return total

    def response(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        r"""$y_m$, client m's rows of A applied to its own vector, and $b = A^\top y$ (p); in float64, in one pass."""
        own, total = [], self.scales[0].new_zeros(len(self.vectors[0]))
        for U, scale, v in zip(self.vectors, self.scales, vectors, strict=True):
            own.append(scale * (U.T @ v).double())
            total += U @ (scale * own[-1]).to(U.dtype)
        return own, total

    def applied(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        r"""$\hat H V$ for V (p x s), in one pass: products in the given dtype, sums of many in float64.

        Every other pass is backwards: what was read last from files that are larger than memory is still there.
        """
        total, block = torch.zeros_like(block), block.to(dtype)
        some = torch.zeros_like(block)
        self._backwards = not self._backwards
        order = reversed if self._backwards else iter
        for i, (U, scale) in enumerate(zip(order(self.vectors), order(self.scales), strict=True), 1):
            U = U.to(dtype)
            some.addmm_(U, (scale.square()[:, None] * (U.T @ block).double()).to(dtype))
            if i % _MANY == 0:
                total += some
                some.zero_()
        return total.add_(some)

    def cut(self, cutoff: float) -> float:
        """The resolution at which a cut at this share of the largest eigenvalue loses nothing that the sketches have.

        A Gram matrix in float64 is off by rounding of its largest eigenvalue, and a pseudo-inverse divides that by the
        smallest one that it keeps. That must be well below the sketches' own rounding, as it is for float32.
        """
        lost = torch.finfo(torch.float64).eps / cutoff if cutoff else math.inf
        return _SAFE_AS_GRAM if lost <= torch.finfo(self.dtype).eps / _MARGIN else 0.0

    def spectrum(self, resolution: float) -> tuple[Tensor, Tensor]:
        r"""Eigenvalues (descending) and eigenvectors (R x R) of $A A^\top$, in float64; each way is computed once."""
        if sum(self.ranks) == 0:
            empty = self.scales[0].new_zeros(0)
            return empty, empty.reshape(0, 0)
        way = "own" if resolution >= SAFE_IN_OWN_DTYPE else "gram" if resolution >= _SAFE_AS_GRAM else "factor"
        if way not in self._known:
            if way == "factor":
                _, singular, right = torch.linalg.svd(self._triangular_factor())
                values = singular.new_zeros(len(right))  # more rows than parameters: the rest are zero
                values[: len(singular)] = singular.square()
                self._known[way] = values, right.T
            else:
                gram = self._gram(self.dtype if way == "own" else torch.float64)
                values, vectors = eigh(gram)
                self._known[way] = values.flip(0).clamp(min=0), vectors.flip(1)
        return self._known[way]

    def _gram(self, dtype: torch.dtype) -> Tensor:
        """Upper blocks only, client by client, or several at once where there are many: the rest by symmetry."""
        R = sum(self.ranks)
        gram = self.scales[0].new_zeros(R, R)
        for blocks in self._row_blocks():
            blocks = [block.to(dtype) for block in blocks]
            blocks = _panels(blocks) if len(blocks) > _MANY else blocks
            _add_products(gram, blocks)
        gram = gram.triu()
        gram = gram + gram.triu(1).T
        scale = torch.cat(self.scales)
        return scale[:, None] * gram * scale

    def _triangular_factor(self) -> Tensor:
        scale = torch.cat(self.scales)
        factor = scale.new_zeros(0, len(scale))
        for blocks in self._row_blocks():
            rows = torch.cat([block.double() for block in blocks], dim=1) * scale
            factor = torch.linalg.qr(torch.cat([factor, rows]), mode="r").R
        return factor

    def _row_blocks(self) -> Iterator[list[Tensor]]:
        p = len(self.vectors[0])
        for i in range(0, p, _BLOCK_ROWS):
            yield [U[i : i + _BLOCK_ROWS] for U in self.vectors]
            release(*self.vectors)


def _add_products(gram: Tensor, blocks: Sequence[Tensor]) -> None:
    """Add the products of all columns of some rows, to the upper blocks only."""
    ends = list(accumulate((block.shape[1] for block in blocks), initial=0))
    places = [slice(*both) for both in pairwise(ends)]

    def add(pair: tuple[int, int]) -> None:
        a, b = pair
        gram[places[a], places[b]] += blocks[a].T @ blocks[b]

    pairs = list(combinations_with_replacement(range(len(blocks)), 2))
    if len(blocks[0]) * len(gram) ** 2 < _WORTH_THREADS:
        for pair in pairs:
            add(pair)
    else:
        at_once(add, pairs)


def _panels(blocks: Sequence[Tensor]) -> list[Tensor]:
    """The same columns in the same order, in fewer and wider matrices."""
    panels: list[Tensor] = []
    some: list[Tensor] = []
    width = 0
    for block in blocks:
        some.append(block)
        width += block.shape[1]
        if width >= _PANEL:
            panels.append(torch.cat(some, dim=1))
            some, width = [], 0
    return [*panels, torch.cat(some, dim=1)] if some else panels
