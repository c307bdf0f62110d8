r"""Damped steps from sketches that are too many for an R x R system: by products with $\hat H$ alone.

$(\hat H + \beta I) d = c$ is solved in the space that $V, \hat H V, \hat H^2 V, \dots$ span, for a block V that has c
in its span (block Lanczos with all vectors kept orthogonal). One product goes through all sketches once, so that they
may be in files, and serves every damping. What is left of the equation is known, $r = (\hat H + \beta I) d - c$, and
bounds the error: $|d - d^*| \le |r| / \beta$.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.stack import Stack
from fipa.linalg import eigh

TOLERANCE = 1e-5  # of the bound of the step's error, relative to the step
WIDTH = 16  # columns of a product: hardly more expensive than one, where sketches are read from files
_PASSES = 24  # products for which there should be room
_FEWEST = 4  # products for which there must be
_NOTHING = 1e-10  # what is left of a product, relative to it, where the space has no more to give


class KrylovSpace:
    r"""An orthonormal basis of $V, H V, H^2 V, \dots$ (p x k, in float64), and $M = Q^\top H Q$ in it.

    Parameters
    ----------
    times
        H times a block of vectors (p x s).
    start
        V.
    columns
        Most columns of the basis.
    """

    def __init__(self, times: Callable[[Tensor], Tensor], start: Tensor, columns: int) -> None:
        self._times, self._columns = times, columns
        self._blocks: list[Tensor] = []
        self._matrix = start.new_zeros(0, 0)
        self._next = self._orthonormal(start)
        self._left = start.new_zeros(self._next.shape[1], 0)  # of H times the last block, in terms of the next one

    @property
    def size(self) -> int:
        """Columns of the basis so far."""
        return len(self._matrix)

    def grow(self) -> bool:
        """One more product; False where there is no room for it, or nothing to gain."""
        block, k = self._next, self.size
        if not 0 < block.shape[1] <= self._columns - k:
            return False
        image = self._times(block)
        self._blocks.append(block)
        inside = self.coordinates(image)
        matrix = image.new_zeros(len(inside), len(inside))
        matrix[:k, :k] = self._matrix
        matrix[:, k:], matrix[k:, :k] = inside, inside[:k].T
        self._matrix = (matrix + matrix.T) / 2
        self._next = self._orthonormal(image)
        self._left = self._next.T @ image
        return True

    def coordinates(self, vectors: Tensor) -> Tensor:
        r"""$Q^\top v$."""
        return torch.cat([block.T @ vectors for block in self._blocks])

    def vector(self, coordinates: Tensor) -> Tensor:
        r"""$Q z$."""
        parts = coordinates.split([block.shape[1] for block in self._blocks])
        return sum((block @ part for block, part in zip(self._blocks[1:], parts[1:], strict=True)),
                   self._blocks[0] @ parts[0])  # fmt: skip

    def solve(self, damping: float, coordinates: Tensor) -> Tensor:
        r"""$(M + \beta I)^{-1} z$."""
        shifted = self._matrix + damping * torch.eye(self.size, dtype=self._matrix.dtype)
        solved: Tensor = torch.linalg.solve(shifted, coordinates)
        return solved

    def residual(self, solved: Tensor) -> float:
        r"""$|(H + \beta I) Q z - c|$ for the z that solves it in this space, for c in the span of V."""
        return float((self._left @ solved[-self._left.shape[1] :]).norm())

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of M, ascending, and its eigenvectors."""
        values, vectors = eigh(self._matrix)
        return values.clamp(min=0), vectors

    def _orthonormal(self, vectors: Tensor) -> Tensor:
        """A basis of what the vectors have that the space has not; fewer columns where that is next to nothing."""
        scale = float(vectors.norm())
        left, sizes, _ = torch.linalg.svd(self._outside(vectors), full_matrices=False)
        kept = self._outside(left[:, sizes > _NOTHING * scale])  # once more, for rounding has grown with the scale
        return torch.linalg.qr(kept).Q

    def _outside(self, vectors: Tensor) -> Tensor:
        for block in (*self._blocks, *self._blocks):  # twice is enough
            vectors = vectors - block @ (block.T @ vectors)
        return vectors


class Iteration:
    """What products with the sketches have found for the updates of a cohort; more are made as a damping needs them."""

    def __init__(self, cohort: Cohort, stack: Stack, dtype: torch.dtype) -> None:
        self.deltas, self.dtype = cohort.deltas, dtype
        self.own, self.response = stack.response(cohort.deltas)
        self.mean = cohort.mean_delta.double()
        columns, width = _room(len(self.mean), cohort.memory_limit)
        # random columns find the largest eigenvalues, for which c alone would need more products
        generator = torch.Generator().manual_seed(0)
        self._random = torch.randn(len(self.mean), width - 2, generator=generator, dtype=torch.float64)
        self._random *= len(self.mean) ** 0.5 / self._random.norm(dim=0)
        start = torch.cat([self.response[:, None], self.mean[:, None], self._random], dim=1)
        sizes = start.norm(dim=0)
        self.space = KrylovSpace(lambda V: stack.applied(V, dtype), start / sizes.where(sizes > 0, 1), columns)

    def solve(self, damping: float, c: Tensor) -> tuple[Tensor, float]:
        r"""Coordinates of $(\hat H + \beta I)^{-1} c$, c of response and mean, and a bound of their relative error."""
        space = self.space
        while space.size or space.grow():
            solved = space.solve(damping, space.coordinates(c))
            length = float(solved.norm())
            bound = space.residual(solved) / (damping * length) if length else 0.0
            if bound <= TOLERANCE or not space.grow():
                return solved, bound
        return c.new_zeros(0), 0.0  # neither updates nor sketches

    def effective_rank(self, damping: float) -> float:
        r"""The trace of $F = \hat H (\hat H + \beta I)^{-1}$, estimated by the mean of $z^\top F z$ over random z.

        The standard error is below $\sqrt{2 k / s}$ for a rank of k and s columns.
        """
        values, vectors = self.space.spectrum()
        weights = (vectors.T @ self.space.coordinates(self._random)).square().mean(dim=1)
        return float((weights * values / (values + damping)).sum())

    def condition_number(self, damping: float) -> float:
        """Of the damped matrix on the space."""
        values, _ = self.space.spectrum()
        return float((values[-1] + damping) / (values[0] + damping))


def _room(parameters: int, memory_limit: int) -> tuple[int, int]:
    """Columns of a basis for which there is memory, and of a product; two bases may be needed at a time."""
    columns = memory_limit // 4 // (8 * parameters)
    width = max(4, min(WIDTH, columns // _PASSES))
    return max(columns, _FEWEST * width), width
