r"""Route 1 for small CNNs: the rows of linear layers are outer products, and stay factored.

The gradient of one image in the weight of a linear layer is $s h^\top$: the slope at what comes out, times what goes
in. So n such rows take $n (o + i)$ numbers instead of $n o i$, and their Gram matrix is
$(S S^\top) \circ (H H^\top)$. What convolutions have is little, and held as it is. Products take one unit of a layer
at a time: its parameters lie side by side, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fipa.curvature.functional import Params
from fipa.curvature.operator import Eigenpairs, TermsOperator
from fipa.curvature.terms import Term
from fipa.kernels.small_cnn import BLOCK, Factors, SmallCNN

MANY, MOST = 64, 0.9  # columns from which on, and share of examples up to which, it pays to pick some


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
            rows, weights = out.unflatten(0, slopes.shape[:2]), V[where].unflatten(0, (slopes.shape[2], -1))
            for weight, (some, along, into) in zip(weights, _units(slopes, incoming, V.shape[1]), strict=True):
                product = into @ weight
                for row, slope in zip(rows.unbind(1), along.unbind(1), strict=True):
                    row.index_add_(0, some, slope[:, None] * product)
        return out

    def adjoint(self, Z: Tensor) -> Tensor:  # noqa: D102
        out = Z.new_empty(self.parameters, Z.shape[1])
        torch.mm(self._factors.convolutions.T, Z, out=out[: self._start])
        for where, slopes, incoming in self._linear():
            rows, weights = Z.unflatten(0, slopes.shape[:2]), out[where].unflatten(0, (slopes.shape[2], -1))
            for weight, (some, along, into) in zip(weights, _units(slopes, incoming, Z.shape[1]), strict=True):
                total = sum(
                    slope[:, None] * row[some] for row, slope in zip(rows.unbind(1), along.unbind(1), strict=True)
                )
                torch.mm(into.T, total, out=weight)
        return out

    def gram(self) -> Tensor:  # noqa: D102
        out = self._factors.convolutions @ self._factors.convolutions.T
        for _, slopes, incoming in self._linear():
            n, k, _ = slopes.shape
            among = (slopes.flatten(0, 1) @ slopes.flatten(0, 1).T).reshape(n, k, n, k)
            out += (among * (incoming @ incoming.T)[:, None, :, None]).reshape(n * k, n * k)
        return out

    def diagonal(self) -> Tensor:  # noqa: D102
        pieces = [self._factors.convolutions.square().sum(0)]
        for _, slopes, incoming in self._linear():
            pieces.append((slopes.square().sum(1).T @ incoming.square()).reshape(-1))
        return torch.cat(pieces)

    def trace(self, generator: torch.Generator, kept: Eigenpairs | None = None) -> float:  # noqa: D102
        total = float(torch.linalg.vector_norm(self._factors.convolutions)) ** 2
        for _, slopes, incoming in self._linear():
            total += float(slopes.square().sum((1, 2)) @ incoming.square().sum(1))
        return total

    def _linear(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which parameters a layer has, slopes (n x k x o) and what goes in (n x i)."""
        start = self._start
        for slopes, incoming in self._factors.linear:
            stop = start + slopes.shape[2] * incoming.shape[1]
            yield slice(start, stop), slopes, incoming
            start = stop


def _units(slopes: Tensor, incoming: Tensor, columns: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each unit of a layer: the examples that reach it, their slopes there (n' x k), and what goes in (n' x i).

    ReLU leaves many units without a slope. With many columns, products with these examples cost more than to pick the
    others.
    """
    everybody = torch.arange(len(incoming))
    for along in slopes.unbind(2):
        some = along.any(1).nonzero()[:, 0] if columns >= MANY else everybody
        if len(some) > MOST * len(everybody):
            some = everybody
        whole = some is everybody
        yield some, along if whole else along[some], incoming if whole else incoming[some]
