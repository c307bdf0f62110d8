"""Sums of a head's inputs by class, and counts: what FedNCM's clients send, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fipa.curvature.head_data import head_data, head_shape
from fipa.curvature.operator import check_finite
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, Occasion, Shape, Source, wrong_shape
from fipa.layout import Layout

WHAT = "class means"


@dataclass(frozen=True, eq=False)
class ClassSums(CurvatureSummary):
    """Sums of the inputs (classes x d), and the number of examples of each class, as floating-point numbers."""

    sums: Tensor
    counts: Tensor
    layout: Layout
    num_examples: int = 0

    kind = "class-sums"
    made_by = "fipa.ClassSumsPlan().compute"
    roughest = "float32"  # counts are whole numbers

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {"sums": self.sums, "counts": self.counts}

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        classes, inputs, _ = head_shape(self.layout, WHAT)
        flaw = wrong_shape("sums", self.sums, (classes, inputs)) or wrong_shape("counts", self.counts, (classes,))
        if flaw is None and bool((self.counts < 0).any()):
            flaw = "sent a negative number of examples"
        return flaw

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        classes, inputs, _ = head_shape(layout, WHAT)
        return {"sums": (classes, inputs), "counts": (classes,)}


@dataclass(frozen=True)
class ClassSumsPlan(CurvaturePlan):
    """Sums and counts by class.

    Examples
    --------
    >>> from fipa import Client, Layout, Occasion, parameters_of
    >>> model = nn.Linear(4, 3)
    >>> client = Client((torch.randn(20, 4), torch.zeros(20, dtype=torch.int64)), "cross_entropy")
    >>> ClassSumsPlan().compute(model, Layout.of(parameters_of(model)), client, Occasion(seed=0)).counts
    tensor([20.,  0.,  0.])
    """

    makes = ClassSums

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> ClassSums:
        """The client's sums."""
        features, labels = head_data(model, layout, client, WHAT)
        classes, inputs, _ = head_shape(layout, WHAT)
        sums = features.new_zeros(classes, inputs).index_add_(0, labels, features)
        check_finite(sums)
        counts = torch.bincount(labels, minlength=classes).to(sums)
        return ClassSums(sums, counts, layout, client.num_examples)
