"""The diagonal of the curvature: what Fisher merging and FedFisher send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from fipa.curvature.explicit import ExplicitRows
from fipa.curvature.factored import FactoredRows
from fipa.curvature.operator import check_finite
from fipa.curvature.options import Options
from fipa.curvature.routes import curvature_of
from fipa.curvature.summary import CurvatureSummary, Occasion, SampledPlan, Shape, Source, wrong_shape
from fipa.curvature.terms import LossName
from fipa.layout import Layout


@dataclass(frozen=True, eq=False)
class DiagonalCurvature(CurvatureSummary):
    """The diagonal of a curvature matrix (p), with the layout of the parameters it covers."""

    values: Tensor
    layout: Layout
    num_examples: int = 0

    kind = "diagonal"
    made_by = "fipa.diagonal_fisher"

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {"values": self.values}

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        if bool((self.values < 0).any()):
            return "sent a negative diagonal: a curvature has none; use fipa.diagonal_fisher"
        return wrong_shape("values", self.values, (parameters,))

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        return {"values": (layout.numel,)}

    def sizes(self) -> dict[str, Tensor]:  # noqa: D102
        return {"curvature": self.values.abs().sum()}


def diagonal_fisher(
    model: nn.Module, data: Any, loss: LossName = "cross_entropy", **options: Unpack[Options]
) -> DiagonalCurvature:
    r"""Exact diagonal of $H_m$ (or of its sampled-label estimate), block by block; arguments as for `sketch`.

    Examples
    --------
    >>> import torch
    >>> diagonal_fisher(nn.Linear(4, 3), torch.randn(50, 4)).values.shape
    torch.Size([15])
    """
    with curvature_of(
        model, data, loss, route="rows", hold=False, **options
    ) as (operator, layout, num_examples):  # fmt: skip
        assert isinstance(operator, ExplicitRows | FactoredRows)
        values = operator.diagonal()
    check_finite(values)
    return DiagonalCurvature(values, layout, num_examples)


@dataclass(frozen=True)
class DiagonalPlan(SampledPlan):
    """The diagonal, as for `fipa.diagonal_fisher`."""

    makes = DiagonalCurvature

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> DiagonalCurvature:
        """The client's diagonal."""
        return diagonal_fisher(model, client.tensors, client.loss, **self.options(layout, occasion))
