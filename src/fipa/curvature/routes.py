"""The choice between the three routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fipa.curvature.explicit import ExplicitRows
from fipa.curvature.factored import FactoredRows
from fipa.curvature.linear_head import LinearHead
from fipa.curvature.matrix_free import MatrixFree
from fipa.curvature.modes import evaluation_mode
from fipa.curvature.operator import CurvatureOperator
from fipa.curvature.options import Options, check_options
from fipa.curvature.terms import LossName, Term, terms_of
from fipa.errors import SketchError, instead_of
from fipa.kernels.small_cnn import MOST, SmallCNN
from fipa.layout import Layout, parameters_of

Route = Literal["auto", "rows", "matrix_free", "linear_head"]

MEMORY_LIMIT = 2 * 2**30  # bytes; a constant, so that the route, and with it the last bits, do not vary by machine


@contextmanager
def curvature_of(
    model: nn.Module,
    data: Any,
    loss: LossName = "cross_entropy",
    *,
    route: Route = "auto",
    memory_limit: int = MEMORY_LIMIT,
    generator: torch.Generator | None = None,
    hold: bool = True,
    **options: Unpack[Options],
) -> Iterator[tuple[CurvatureOperator, Layout, int]]:
    """The curvature as an operator, the layout of its parameters, and the number of examples behind it.

    A context, since the operator evaluates the model, which is in eval mode inside. Arguments as for `sketch`;
    a `generator` takes the place of the seed where others draw from it, too. Without `hold`, explicit
    rows are not kept for a second product.
    """
    check_options(options)
    generator = generator or torch.Generator().manual_seed(options.get("seed", 0))
    dtype, device = options.get("dtype"), options.get("device")
    with evaluation_mode(model):
        chosen = parameters_of(model, options.get("params"))
        values = {name: t.to(dtype=dtype, device=device) for name, t in chosen.items()}
        kinds = {(t.dtype, t.device) for t in values.values()}
        if len(kinds) > 1 or not next(iter(values.values())).is_floating_point():
            raise SketchError(f"the selected parameters must share one floating dtype and device, got {kinds}")
        if next(iter(values.values())).dtype not in (torch.float32, torch.float64):
            (kind,) = {t.dtype for t in values.values()}
            raise SketchError(f"eigenpairs cannot be computed in {kind}: give dtype=torch.float32 or torch.float64")
        terms = terms_of(
            model,
            data,
            loss,
            values,
            max_examples=options.get("max_examples"),
            sampled_labels=options.get("sampled_labels"),
            generator=generator,
        )
        operator = _operator(model, terms, values, route, memory_limit, hold)
        yield operator, Layout.of(values), sum(term.examples for term in terms)


def _operator(
    model: nn.Module, terms: list[Term], values: dict[str, Tensor], route: Route, memory_limit: int, hold: bool
) -> CurvatureOperator:
    if route in ("auto", "linear_head"):
        try:
            return LinearHead(model, terms, values, memory_limit)
        except SketchError:
            if route == "linear_head":
                raise
    if route in ("auto", "rows"):
        small = _small(model, terms, values)
        if small is not None and FactoredRows.bytes_needed(terms, small) <= memory_limit:
            return FactoredRows(terms, values, small)
        if route == "rows" or ExplicitRows.bytes_needed(terms, values) <= memory_limit:
            return ExplicitRows(terms, values, memory_limit, hold)
        route = "matrix_free"
    if route == "matrix_free":
        return MatrixFree(terms, values, memory_limit)
    raise SketchError(f"there is no route {route!r}: {instead_of(route, get_args(Route))}")


def _small(model: nn.Module, terms: list[Term], values: dict[str, Tensor]) -> SmallCNN | None:
    """A faster way to the rows of a small CNN on images; residuals may be any function of it."""
    tensors = [*values.values(), *(term.inputs for term in terms)]
    if not all(isinstance(t, Tensor) and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors):
        return None
    if any(term.inputs.dim() != 4 for term in terms):
        return None
    return SmallCNN.of(model, Layout.of(values), MOST)
