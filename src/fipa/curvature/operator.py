"""The interface of the three routes to a curvature matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fipa.curvature.functional import Params
from fipa.curvature.terms import Term
from fipa.errors import NotFinite, SketchError
from fipa.layout import Layout

Eigenpairs = tuple[Tensor, Tensor]  # eigenvectors (p x r), eigenvalues (r)


class CurvatureOperator(ABC):
    r"""$H = A^\top A$, known through products with $A$ (rows x p) and its transpose.

    `parameters` is p, `rows` the number of rows of A.
    """

    parameters: int
    rows: int
    like: Tensor  # carries the dtype and device of the computation

    @abstractmethod
    def forward(self, V: Tensor) -> Tensor:
        """$A V$ for V (p x L): how the weighted outputs answer to parameter directions."""

    @abstractmethod
    def adjoint(self, Z: Tensor) -> Tensor:
        r"""$A^\top Z$ for Z (rows x L)."""

    @abstractmethod
    def trace(self, generator: torch.Generator, kept: Eigenpairs | None = None) -> float:
        """Tr H: exact where that is cheap, else estimated outside the span of the eigenvectors kept."""

    def product(self, V: Tensor) -> Tensor:
        """$H V$."""
        return self.adjoint(self.forward(V))

    def gram(self) -> Tensor:
        r"""$A A^\top$ (rows x rows)."""
        return self._by_columns(lambda block: self.forward(self.adjoint(block)), self.rows)

    def dense(self) -> Tensor:
        """H itself (p x p), for few parameters."""
        return self._by_columns(self.product, self.parameters)

    def _by_columns(self, product: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """A square matrix from its products with the columns of the identity, a few at a time."""
        identity = torch.eye(size, dtype=self.like.dtype, device=self.like.device)
        return torch.cat([product(block) for block in identity.split(64, dim=1)], dim=1)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> Tensor:
        """A Gaussian matrix at this operator's dtype and device, the same on every device for one seed."""
        return torch.randn(rows, columns, generator=generator, dtype=self.like.dtype).to(self.like.device)


class TermsOperator(CurvatureOperator):
    """An operator that differentiates the terms of a loss."""

    def __init__(self, terms: list[Term], params: Params) -> None:
        self.terms = terms
        self.params = dict(params)
        self.layout = Layout.of(params)
        self.like = next(iter(params.values()))
        self.parameters = self.layout.numel
        self.rows = sum(term.examples * term.rows_per_example for term in terms)


@contextmanager
def explain_failure(what: str, other: str, plain: Callable[[], Any]) -> Iterator[None]:
    """Name the way out when `torch.func` cannot transform a model. What `plain` raises too is the model's own error."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        with torch.no_grad():
            plain()
        reason = str(error).strip().splitlines()[0]
        raise SketchError(f"this model does not support {what} ({reason}): try {other}") from error


def check_finite(result: Tensor) -> None:
    """Raise a `SketchError` if a curvature, or a product with it, holds NaN or infinity."""
    if not bool(result.isfinite().all()):
        raise NotFinite(
            "the curvature is not finite: look for NaN or infinity in the parameters and in the data, "
            "or for outputs that overflow (dtype=torch.float64 helps there)"
        )
