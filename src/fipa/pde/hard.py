r"""Networks that meet u = 0 on the boundary whatever their parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fipa.pde.domain import Box, Face


class Clamped(nn.Module):
    r"""A network times a window, $u(x) = w(x)\, N(x)$, that is zero on the faces with a condition.

    $w$ is the product over the axes of $4 (x_i - a_i)(b_i - x_i) / (b_i - a_i)^2$ where both ends have a condition, and
    of the distance from the end that has one, as a share of the axis, where only one has.

    Examples
    --------
    >>> u = Clamped(nn.Identity(), Box.cube(1), [(0, "low"), (0, "high")])
    >>> u(torch.tensor([[0.0], [0.25], [0.5], [1.0]])).tolist()
    [[0.0], [0.1875], [0.5], [0.0]]
    """

    slopes: Tensor
    offsets: Tensor

    def __init__(self, network: nn.Module, domain: Box, faces: Sequence[Face]) -> None:
        super().__init__()
        self.network = network
        like = next(network.parameters(), torch.zeros(()))
        slopes, offsets = like.new_zeros(len(faces), domain.axes), like.new_zeros(len(faces))
        for row, (axis, side) in enumerate(faces):
            sign = 1 if side == "low" else -1
            both = {(axis, "low"), (axis, "high")} <= set(faces)
            slopes[row, axis] = sign * (2 if both else 1) / (domain.high[axis] - domain.low[axis])
            offsets[row] = -slopes[row, axis] * domain.end((axis, side))
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, x: Any) -> Any:
        """Of tensors and jets alike."""
        distances = linear(x, self.slopes, self.offsets)
        window = reduce(mul, (distances[:, i : i + 1] for i in range(len(self.slopes))))
        return window * self.network(x)
