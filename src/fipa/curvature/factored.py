r"""Route 1 for small CNNs: the rows of linear layers are outer products, and stay factored.

The gradient of one image in the weight of a linear layer is $s h^\top$: the slope at what comes out, times what goes
in. So n such rows take $n (o + i)$ numbers instead of $n o i$, and their Gram matrix is
$(S S^\top) \circ (H H^\top)$. What convolutions have is little, and held as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fipa.curvature.functional import Params
from fipa.curvature.operator import Eigenpairs, TermsOperator
from fipa.curvature.terms import Term
from fipa.kernels.small_cnn import BLOCK, Factors, SmallCNN

BLOCK_BYTES = 32 * 2**20  # of what lies between two products
MANY = 100  # columns
COLUMNS = 4096  # that are in double precision at a time


class FactoredRows(TermsOperator):
    """Rows of a small CNN, as `SmallCNN.factors` tells them."""

    def __init__(self, terms: list[Term], params: Params, small: SmallCNN) -> None:
        super().__init__(terms, params)
        flat, found = self.layout.flatten(params), []
        with torch.no_grad():
            for term in terms:
                for i in range(0, term.examples, BLOCK):
                    part = term.part(i, min(i + BLOCK, term.examples))
                    found.append(small.factors(flat, *part, term.factor))
        self._factors = Factors.joined(found)
        self._start = self._factors.convolutions.shape[1]  # of the parameters of linear layers

    @staticmethod
    def bytes_needed(terms: list[Term], small: SmallCNN) -> int:
        """Size of all factors, twice: their parts are there until they are joined."""
        return 2 * sum(term.examples * small.numbers(term.rows_per_example) for term in terms) * 4

    def forward(self, V: Tensor) -> Tensor:  # noqa: D102
        out = self._factors.convolutions @ V[: self._start]
        for where, slopes, incoming in self._linear():
            rows, wide = out.unflatten(0, slopes.shape[:2]), slopes.shape[2]
            if _by_units(slopes, V):
                for slope, weight in zip(slopes[:, 0].unbind(1), V[where].unflatten(0, (wide, -1)), strict=True):
                    there = slope.nonzero()[:, 0]
                    rows[:, 0].index_add_(0, there, slope[there, None] * (incoming[there] @ weight))
                continue
            weight = V[where].unflatten(0, (wide, -1)).movedim(1, 0).flatten(1)  # (i, o L)
            for some in self._blocks(wide * V.shape[1]):
                rows[some] += slopes[some] @ (incoming[some] @ weight).unflatten(1, (wide, -1))
        return out

    def adjoint(self, Z: Tensor) -> Tensor:  # noqa: D102
        out = Z.new_empty(self.parameters, Z.shape[1])
        torch.mm(self._factors.convolutions.T, Z, out=out[: self._start])
        for where, slopes, incoming in self._linear():
            rows, wide = Z.unflatten(0, slopes.shape[:2]), slopes.shape[2]
            weights = out[where].unflatten(0, (wide, -1))  # (o, i, L)
            if _by_units(slopes, Z):
                for slope, weight in zip(slopes[:, 0].unbind(1), weights, strict=True):
                    there = slope.nonzero()[:, 0]
                    torch.mm(incoming[there].T, slope[there, None] * rows[there, 0], out=weight)
                continue
            weight = Z.new_zeros(incoming.shape[1], wide * Z.shape[1])
            for some in self._blocks(wide * Z.shape[1]):
                weight.addmm_(incoming[some].T, (slopes[some].mT @ rows[some]).flatten(1))
            weights.copy_(weight.unflatten(1, (wide, -1)).movedim(0, 1))
        return out

    def gram(self) -> Tensor:
        r"""$A A^\top$ (rows x rows) in double precision, which costs little of rows that stay factored."""
        out = _outer(self._factors.convolutions)
        for _, slopes, incoming in self._linear():
            n, k, _ = slopes.shape
            among = _outer(slopes.flatten(0, 1)).reshape(n, k, n, k)
            out += (among * _outer(incoming)[:, None, :, None]).reshape(n * k, n * k)
        return out

    def diagonal(self) -> Tensor:  # noqa: D102
        pieces = [self._factors.convolutions.square().sum(0)]
        for _, slopes, incoming in self._linear():
            pieces.append((slopes.square().sum(1).T @ incoming.square()).reshape(-1))
        return torch.cat(pieces)

    def trace(self, generator: torch.Generator, kept: Eigenpairs | None = None) -> float:  # noqa: D102
        total = float(torch.linalg.vector_norm(self._factors.convolutions, dtype=torch.float64)) ** 2
        for _, slopes, incoming in self._linear():
            lengths = torch.linalg.vector_norm(slopes, dim=(1, 2), dtype=torch.float64)
            total += float((lengths * torch.linalg.vector_norm(incoming, dim=1, dtype=torch.float64)).square().sum())
        return total

    def _linear(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which parameters a layer has, slopes (n x k x o) and what goes in (n x i)."""
        start = self._start
        for slopes, incoming in self._factors.linear:
            stop = start + slopes.shape[2] * incoming.shape[1]
            yield slice(start, stop), slopes, incoming
            start = stop

    def _blocks(self, numbers: int) -> Sequence[slice]:
        """Of examples with so many numbers each."""
        n = len(self._factors.linear[0][1])
        step = max(1, BLOCK_BYTES // (4 * max(1, numbers)))
        return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _outer(rows: Tensor) -> Tensor:
    r"""$R R^\top$ in double precision, of a few columns of R at a time: no copy of all is made."""
    out = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(COLUMNS, dim=1):
        part = part.double()
        out.addmm_(part, part.T)
    return out


def _by_units(slopes: Tensor, columns: Tensor) -> bool:
    """Whether to go unit by unit of a layer, each with the examples that reach it: ReLU keeps many from that.

    That pays for many columns, and for one row per example: several are better taken together.
    """
    return slopes.shape[1] == 1 and columns.shape[1] >= MANY
