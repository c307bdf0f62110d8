"""The diagonal of the curvature: what Fisher merging and FedFisher send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fipa.curvature.explicit import BLOCK_BYTES, ExplicitRows
from fipa.curvature.operator import check_finite
from fipa.curvature.routes import curvature_of
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, Occasion, Shape, Source, wrong_shape
from fipa.curvature.terms import LossName
from fipa.layout import Layout, ParamSelection


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
    model: nn.Module,
    data: Any,
    loss: LossName = "cross_entropy",
    *,
    params: ParamSelection = None,
    max_examples: int | None = None,
    sampled_labels: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> DiagonalCurvature:
    r"""Exact diagonal of $H_m$ (or of its sampled-label estimate), block by block; arguments as for `sketch`.

    >>> diagonal_fisher(nn.Linear(4, 3), torch.randn(50, 4)).values.shape
    torch.Size([15])
    """
    with curvature_of(
        model, data, loss, params=params, route="rows", max_examples=max_examples, sampled_labels=sampled_labels,
        dtype=dtype, device=device, memory_limit=BLOCK_BYTES, generator=torch.Generator().manual_seed(seed),
    ) as (operator, layout, num_examples):  # fmt: skip
        assert isinstance(operator, ExplicitRows)
        values = operator.like.new_zeros(operator.parameters)
        for _, block in operator.blocks():  # rows are used once: the limit keeps no more than a block of them
            values += block.square().sum(0)
    check_finite(values)
    return DiagonalCurvature(values, layout, num_examples)


@dataclass(frozen=True)
class DiagonalPlan(CurvaturePlan):
    """The diagonal, as for `fipa.diagonal_fisher`."""

    max_examples: int | None = None
    sampled_labels: int | None = None

    makes = DiagonalCurvature

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> DiagonalCurvature:
        """The client's diagonal."""
        return diagonal_fisher(
            model, client.tensors, client.loss, params=layout.names, max_examples=self.max_examples,
            sampled_labels=self.sampled_labels, seed=occasion.seed,
        )  # fmt: skip
