r"""Statistics of a ridge regression on a head's inputs: what Fed3R's clients send, once.

With $\phi_i$ the input of example i, and a 1 at its end if the head has a bias: $A_m = \sum_i \phi_i \phi_i^\top$ and
$b_m = \sum_i \phi_i e_{y_i}^\top$, $e_y$ the unit vector of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fipa.curvature.basis import pack, unpack
from fipa.curvature.head_data import head_data, head_shape
from fipa.curvature.operator import check_finite
from fipa.curvature.summary import Arrived, CurvaturePlan, CurvatureSummary, Occasion, Shape, Source, wrong_shape
from fipa.layout import Layout

WHAT = "ridge statistics"


@dataclass(frozen=True, eq=False)
class RidgeStatistics(CurvatureSummary):
    """$A_m$ (s x s) and $b_m$ (s x classes), s the head's inputs and 1 more with a bias."""

    gram: Tensor
    moments: Tensor
    layout: Layout
    num_examples: int = 0

    kind = "ridge"
    made_by = "fipa.RidgePlan().compute"
    roughest = "float32"  # what is solved with their sum is as exact as they are

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {"gram": self.gram, "moments": self.moments}

    def sent(self) -> dict[str, Tensor]:
        """The tensors that travel: of a symmetric matrix one half."""
        return {"half": pack(self.gram), "moments": self.moments}

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        classes, inputs, bias = head_shape(self.layout, WHAT)
        side = inputs + bias
        flaw = wrong_shape("gram", self.gram, (side, side)) or wrong_shape("moments", self.moments, (side, classes))
        if flaw is None and bool((self.gram.diagonal() < 0).any()):
            flaw = "sent a negative sum of squares"
        return flaw

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        classes, inputs, bias = head_shape(layout, WHAT)
        side = inputs + bias
        return {"half": (side * (side + 1) // 2,), "moments": (side, classes)}

    @classmethod
    def restore(cls, arrived: Arrived) -> Self:  # noqa: D102
        moments = arrived.tensors["moments"]
        return cls(unpack(arrived.tensors["half"], len(moments)), moments, arrived.layout, arrived.num_examples)


@dataclass(frozen=True)
class RidgePlan(CurvaturePlan):
    """A head's ridge statistics.

    Examples
    --------
    >>> from fipa import Client, Layout, Occasion, parameters_of
    >>> model = nn.Linear(4, 3)
    >>> client = Client((torch.randn(20, 4), torch.randint(3, (20,))), "cross_entropy")
    >>> RidgePlan().compute(model, Layout.of(parameters_of(model)), client, Occasion(seed=0)).gram.shape
    torch.Size([5, 5])
    """

    makes = RidgeStatistics

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> RidgeStatistics:
        """The client's sums."""
        features, labels = head_data(model, layout, client, WHAT)
        classes, _, bias = head_shape(layout, WHAT)
        if bias:
            features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
        gram = features.T @ features
        moments = features.new_zeros(classes, features.shape[1]).index_add_(0, labels, features).T.contiguous()
        check_finite(gram)
        return RidgeStatistics((gram + gram.T) / 2, moments, layout, client.num_examples)
