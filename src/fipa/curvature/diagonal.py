"""The diagonal of the curvature: what Fisher merging and FedFisher send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fipa.curvature.explicit import _BLOCK_BYTES, ExplicitRows
from fipa.curvature.modes import evaluation_mode
from fipa.curvature.operator import check_finite
from fipa.curvature.routes import build_operator
from fipa.curvature.terms import LossName
from fipa.layout import Layout, ParamSelection


@dataclass(frozen=True, eq=False)
class DiagonalCurvature:
    """The diagonal of a curvature matrix (p), with the layout of the parameters it covers."""

    values: Tensor
    layout: Layout
    num_examples: int = 0


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
    with evaluation_mode(model):
        operator, layout, num_examples = build_operator(
            model,
            data,
            loss,
            params=params,
            route="rows",
            max_examples=max_examples,
            sampled_labels=sampled_labels,
            dtype=dtype,
            device=device,
            memory_limit=_BLOCK_BYTES,  # rows are used once: never hold more than a block
            generator=torch.Generator().manual_seed(seed),
        )
        assert isinstance(operator, ExplicitRows)
        values = operator.like.new_zeros(operator.parameters)
        for _, block in operator.blocks():
            values += block.square().sum(0)
    check_finite(values)
    return DiagonalCurvature(values, layout, num_examples)
