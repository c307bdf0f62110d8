"""Route 1, explicit rows: the Jacobians once, then plain matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fipa.curvature.data import Inputs
from fipa.curvature.functional import Params
from fipa.curvature.operator import Eigenpairs, TermsOperator, explain_failure
from fipa.curvature.terms import Term

BLOCK_BYTES = 32 * 2**20  # rows computed at a time: about what stays in cache between autodiff and its copy


class ExplicitRows(TermsOperator):
    """Holds A in memory if it fits `memory_limit` bytes; otherwise every product recomputes it block by block.

    `hold=False` never holds it, for one product only.
    """

    def __init__(self, terms: list[Term], params: Params, memory_limit: int, hold: bool = True) -> None:
        super().__init__(terms, params)
        self._block_bytes = min(BLOCK_BYTES, memory_limit)
        fits = self.bytes_needed(terms, params) <= memory_limit
        self.matrix = self._collect() if hold and fits else None

    @staticmethod
    def bytes_needed(terms: list[Term], params: Params) -> int:
        """Size of A."""
        like = next(iter(params.values()))
        rows = sum(term.examples * term.rows_per_example for term in terms)
        return rows * sum(t.numel() for t in params.values()) * like.element_size()

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Pieces of A from top to bottom, each with the index of its first row."""
        if self.matrix is not None:
            yield 0, self.matrix
            return
        for rows, write in self._pieces():
            block = self.like.new_empty(rows.stop - rows.start, self.parameters)
            write(block)
            yield rows.start, block

    def forward(self, V: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([block @ V for _, block in self.blocks()])

    def adjoint(self, Z: Tensor) -> Tensor:  # noqa: D102
        out = self.like.new_zeros(self.parameters, Z.shape[1])
        for start, block in self.blocks():
            out.addmm_(block.T, Z[start : start + len(block)])
        return out

    def gram(self) -> Tensor:  # noqa: D102
        return super().gram() if self.matrix is None else self.matrix @ self.matrix.T

    def dense(self) -> Tensor:  # noqa: D102
        return super().dense() if self.matrix is None else self.matrix.T @ self.matrix

    def diagonal(self) -> Tensor:
        """The diagonal of H."""
        values = self.like.new_zeros(self.parameters)
        for _, block in self.blocks():
            values += block.square().sum(0)
        return values

    def trace(self, generator: torch.Generator, kept: Eigenpairs | None = None) -> float:  # noqa: D102
        return sum(float(torch.linalg.vector_norm(block)) ** 2 for _, block in self.blocks())

    def _collect(self) -> Tensor:
        A = self.like.new_empty(self.rows, self.parameters)
        for rows, write in self._pieces():
            write(A[rows])
        return A

    def _pieces(self) -> Iterator[tuple[slice, Callable[[Tensor], None]]]:
        """Blocks of rows from top to bottom: which, and what writes them."""
        row_bytes, first = self.parameters * self.like.element_size(), 0
        for term in self.terms:
            step = max(1, self._block_bytes // (row_bytes * term.rows_per_example))
            for i in range(0, term.examples, step):
                j = min(i + step, term.examples)
                rows = slice(first, first + (j - i) * term.rows_per_example)
                yield rows, partial(self._write, term, i, j)
                first = rows.stop

    def _write(self, term: Term, start: int, stop: int, out: Tensor) -> None:
        pieces = self._rows(term, *term.part(start, stop))
        for piece, where in zip(pieces, self.layout.slices.values(), strict=True):
            out[:, where] = piece.reshape(len(piece), -1)

    def _rows(self, term: Term, inputs: Inputs, extra: Inputs) -> list[Tensor]:
        def rows_of_one(x: Inputs, e: Inputs) -> dict[str, Tensor]:
            z, pull = vjp(lambda params: term.outputs(params, _unsqueeze(x)), self.params)  # type: ignore[misc]
            cotangents = term.factor(z.detach(), _unsqueeze(e))  # (1, C, k)
            if term.rows_per_example == 1:
                rows: dict[str, Tensor] = pull(cotangents[..., 0])[0]
                return {name: row[None] for name, row in rows.items()}
            return vmap(pull)(cotangents.permute(2, 0, 1))[0]

        with (
            torch.no_grad(),
            explain_failure(
                "per-example gradients by vmap", 'route="matrix_free"', lambda: term.outputs(self.params, inputs)
            ),
        ):
            rows = vmap(rows_of_one)(inputs, extra)
        return [rows[name].flatten(0, 1) for name in self.layout.names]


def _unsqueeze(x: Inputs) -> Inputs:
    return torch.utils._pytree.tree_map(lambda t: t[None], x)
