"""Route 2, matrix-free: Jacobian products by automatic differentiation, for models whose rows do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fipa.curvature.functional import Params
from fipa.curvature.operator import Eigenpairs, TermsOperator, explain_failure
from fipa.curvature.terms import Term

_TRACE_PROBES = 30  # standard error of the estimate: sqrt(2 / 30) |H|_F, of the part of H that it estimates


class MatrixFree(TermsOperator):
    """Products in blocks of examples x vectors whose activations stay within `memory_limit` bytes.

    $A V$ takes one JVP per column, $A^T Z$ one VJP, each vectorised over a block of columns; nothing of size rows x p
    is made. The model must support forward-mode differentiation.
    """

    def __init__(self, terms: list[Term], params: Params, memory_limit: int) -> None:
        super().__init__(terms, params)
        self._budget = memory_limit // 4  # forward and backward each hold about two copies of the activations
        self._activation_bytes = [_activation_bytes(term, self.params) for term in terms]

    def forward(self, V: Tensor) -> Tensor:  # noqa: D102
        out = self.like.new_empty(self.rows, V.shape[1])
        for term, (start, stop), (first, last), vectors in self._blocks(V.shape[1]):
            inputs, extra = term.part(start, stop)
            for a in range(0, V.shape[1], vectors):
                tangents = self.layout.unflatten(V[:, a : a + vectors].T)

                def push(tangent: Params) -> tuple[Tensor, Tensor]:
                    z, dz = jvp(lambda p: term.outputs(p, inputs), (self.params,), (tangent,))  # type: ignore[misc]  # noqa: B023
                    return z, dz

                with (
                    torch.no_grad(),
                    explain_failure(
                        "Jacobian products by forward mode",
                        'route="rows"',
                        lambda: term.outputs(self.params, inputs),  # noqa: B023
                    ),
                ):
                    z, dz = vmap(push, out_dims=(None, 0))(tangents)  # type: ignore[arg-type]  # dz: (L, n, C)
                    rows = torch.einsum("nck,lnc->nkl", term.factor(z, extra), dz)
                out[first:last, a : a + vectors] = rows.flatten(0, 1)
        return out

    def adjoint(self, Z: Tensor) -> Tensor:  # noqa: D102
        out = self.like.new_zeros(Z.shape[1], self.parameters)
        for term, (start, stop), (first, last), vectors in self._blocks(Z.shape[1]):
            inputs, extra = term.part(start, stop)
            with torch.no_grad():
                z, pull = vjp(lambda p: term.outputs(p, inputs), self.params)  # type: ignore[misc]  # noqa: B023
                factor = term.factor(z, extra)
                for a in range(0, Z.shape[1], vectors):
                    weights = Z[first:last, a : a + vectors].unflatten(0, (stop - start, -1))
                    (pulled,) = vmap(pull)(torch.einsum("nck,nkl->lnc", factor, weights))
                    for name, where in self.layout.slices.items():
                        out[a : a + vectors, where] += pulled[name].reshape(len(pulled[name]), -1)
        return out.T

    def trace(self, generator: torch.Generator, kept: Eigenpairs | None = None) -> float:  # noqa: D102
        # The large eigenvalues are known; Hutchinson's estimate is for the complement of their eigenvectors.
        probes = self.random(self.parameters, _TRACE_PROBES, generator).sign()
        inside = 0.0
        if kept is not None:
            vectors, values = kept
            probes -= vectors @ (vectors.T @ probes)
            inside = float(values.sum())
        return inside + float(self.forward(probes).square().sum()) / _TRACE_PROBES

    def _blocks(self, columns: int) -> Iterator[tuple[Term, tuple[int, int], tuple[int, int], int]]:
        """Terms cut into (examples, rows of A), with the number of columns to take at once."""
        row = 0
        for term, size in zip(self.terms, self._activation_bytes, strict=True):
            pairs = max(1, self._budget // size)  # example-vector pairs that fit
            examples = min(term.examples, max(1, pairs // max(1, columns)), 256)
            vectors = max(1, pairs // examples)
            for start in range(0, term.examples, examples):
                stop = min(start + examples, term.examples)
                rows = (stop - start) * term.rows_per_example
                yield term, (start, stop), (row, row + rows), vectors
                row += rows


def _activation_bytes(term: Term, params: Params) -> int:
    """What a forward pass makes for one example, measured on the first one: about what autodiff keeps."""
    inputs, _ = term.part(0, 1)
    with torch.no_grad(), _BytesMade() as made:
        term.outputs(params, inputs)
    return max(made.total, 1)


class _BytesMade(TorchDispatchMode):
    """Adds up what operations return, views apart; unlike saved-tensor hooks it sees into `torch.func` transforms."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out
