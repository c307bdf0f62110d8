r"""Additive statistics: curvature in a form that servers only ever need to sum.

Instead of eigenpairs a client sends $H_m \Omega$ and $H_m \Delta\theta_m$ for a random matrix $\Omega$ (p x L) that all
clients draw from the round's seed. Both, and the update, enter the server's solve as plain weighted sums, so secure
aggregation, streaming and trees of aggregators work, and the server's memory does not grow with the number of clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fipa.curvature.operator import check_finite
from fipa.curvature.options import Options
from fipa.curvature.routes import MEMORY_LIMIT, Route, curvature_of
from fipa.curvature.summary import Arrived, CurvatureSummary, Occasion, SampledPlan, Shape, Source, wrong_shape
from fipa.curvature.terms import LossName
from fipa.errors import LayoutError, SketchError, UpdateError
from fipa.layout import Layout


@dataclass(frozen=True, eq=False)
class AdditiveStatistics(CurvatureSummary):
    r"""Example-weighted means over one client, or over a pool of clients.

    Attributes
    ----------
    products
        Mean of $H_m \Omega$ (p x L).
    response
        Mean of $H_m \Delta\theta_m$ (p).
    delta
        Mean of $\Delta\theta_m$ (p).
    num_examples
        Weight of these means: $\sum_m N_m$.
    test_seed
        Of $\Omega$, see `random_test_matrix`.
    """

    products: Tensor
    response: Tensor
    delta: Tensor
    num_examples: int
    test_seed: int
    layout: Layout

    kind = "additive"
    made_by = "fipa.additive_statistics"
    is_sum = True

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {"products": self.products, "response": self.response, "delta": self.delta}

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        return (
            wrong_shape("products", self.products, (parameters, self.products.shape[-1]))
            or wrong_shape("response", self.response, (parameters,))
            or wrong_shape("delta", self.delta, (parameters,))
        )

    def about(self) -> dict[str, Any]:  # noqa: D102
        return {"test-seed": self.test_seed}

    def sent(self) -> dict[str, Tensor]:  # noqa: D102
        return {"products": self.products, "response": self.response}

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        return {"products": (layout.numel, plan.width), "response": (layout.numel,)}

    @classmethod
    def restore(cls, arrived: Arrived) -> Self:  # noqa: D102
        seed, used = arrived.shared_seed, arrived.about.get("test-seed")
        if used != seed:
            raise SketchError(f"used the test matrix of seed {used!r}, not {seed}")
        return cls(
            **arrived.tensors, delta=arrived.delta, num_examples=arrived.num_examples, test_seed=seed,
            layout=arrived.layout,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Number of columns L of the test matrix."""
        return self.products.shape[1]

    def mismatch(self, other: AdditiveStatistics) -> str | None:
        """Why two statistics cannot be pooled, or None."""
        if self.test_seed != other.test_seed or self.width != other.width:
            return (
                f"used the test matrix (seed {other.test_seed}, width {other.width}), others "
                f"(seed {self.test_seed}, width {self.width}): all clients of a round must share both"
            )
        if self.layout != other.layout:
            odd = sorted(set(self.layout.names) ^ set(other.layout.names))
            what = odd[0] if odd else "their shapes"
            return f"covers other parameters than the others ({what}): use the same params=... everywhere"
        if self.products.dtype != other.products.dtype:
            return f"has dtype {other.products.dtype}, others {self.products.dtype}: convert with .to(...)"
        return None


def pool(statistics: Iterable[AdditiveStatistics]) -> AdditiveStatistics:
    """The statistics of all clients together, one pass, in constant memory: feed it a generator.

    Partial pools can be pooled again, in a tree.
    """
    total: AdditiveStatistics | None = None
    examples = 0
    for i, one in enumerate(statistics):
        if one.num_examples <= 0:
            raise UpdateError(f"statistics #{i} have {one.num_examples} examples: leave out clients without data")
        if total is None:
            total = AdditiveStatistics(
                one.products * one.num_examples,
                one.response * one.num_examples,
                one.delta * one.num_examples,
                one.num_examples,
                one.test_seed,
                one.layout,
            )
        else:
            flaw = total.mismatch(one)
            if flaw:
                raise UpdateError(f"statistics #{i} {flaw}")
            total.products.add_(one.products, alpha=one.num_examples)
            total.response.add_(one.response, alpha=one.num_examples)
            total.delta.add_(one.delta, alpha=one.num_examples)
        examples += one.num_examples
    if total is None:
        raise UpdateError("no statistics to pool")
    return AdditiveStatistics(
        total.products.div_(examples),
        total.response.div_(examples),
        total.delta.div_(examples),
        examples,
        total.test_seed,
        total.layout,
    )


def random_test_matrix(parameters: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""The shared $\Omega$: Gaussian, columns of norm about 1, the same for everyone who knows the seed.

    Drawn on the CPU in float64, whatever the dtype, so that float32 and float64 parties agree.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(parameters, width, generator=generator, dtype=torch.float64)
    return matrix.div_(float(parameters) ** 0.5).to(dtype)


def additive_statistics(
    model: nn.Module,
    data: Any,
    loss: LossName = "cross_entropy",
    *,
    delta: Tensor | Mapping[str, Tensor],
    width: int,
    test_seed: int,
    num_examples: int,
    route: Route = "auto",
    memory_limit: int = MEMORY_LIMIT,
    **options: Unpack[Options],
) -> AdditiveStatistics:
    r"""What one client adds to a round of additive FIPA: L + 1 products with its curvature, one pass over its data.

    Parameters
    ----------
    model, data, loss, route, memory_limit, **options
        As for `sketch`. The model must hold the broadcast parameters, not the trained ones.
    delta
        The update of local training, flat or by name.
    width, test_seed
        L and the seed of the round's test matrix, the same for all clients. A little more than the rank that matters
        suffices.
    num_examples
        The client's weight $N_m$ (all its examples, also when the curvature is taken on a sub-sample).

    Examples
    --------
    >>> model = nn.Linear(4, 3)
    >>> x, delta = torch.randn(50, 4), torch.zeros(15)
    >>> one = additive_statistics(model, x, delta=delta, width=6, test_seed=1, num_examples=50)
    >>> one.products.shape, one.num_examples
    (torch.Size([15, 6]), 50)
    """
    if width < 1 or num_examples < 1:
        raise SketchError(f"width and num_examples must be at least 1, got width {width}, num_examples {num_examples}")
    with curvature_of(model, data, loss, route=route, memory_limit=memory_limit, **options) as (operator, layout, _):
        like = operator.like
        flat = layout.flatten(delta) if isinstance(delta, Mapping) else delta.detach().reshape(-1)
        flat = flat.to(device=like.device, dtype=options.get("dtype"))  # where the model is, if nobody says otherwise
        if flat.shape != (layout.numel,) or flat.dtype != like.dtype:
            raise LayoutError(
                f"delta has length {flat.numel()} and {flat.dtype}, the selected parameters {layout.numel} and "
                f"{like.dtype}: train and send the same parameters"
            )
        omega = random_test_matrix(layout.numel, width, test_seed, like.dtype).to(like.device)
        products = operator.product(torch.cat([omega, flat[:, None]], dim=1))
    check_finite(products)
    whole, response = products[:, :-1].contiguous(), products[:, -1].contiguous()  # as they are after a journey
    return AdditiveStatistics(whole, response, flat, num_examples, test_seed, layout)


@dataclass(frozen=True)
class AdditivePlan(SampledPlan):
    """Sums with a random test matrix of `width` columns, as for `fipa.additive_statistics`."""

    width: int = 40

    makes = AdditiveStatistics

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> AdditiveStatistics:
        """The client's statistics, with the test matrix of the round's shared seed."""
        if occasion.delta is None:
            raise SketchError("additive statistics are of the client's update: give Occasion(..., delta=...)")
        return additive_statistics(
            model, client.tensors, client.loss, delta=occasion.delta, width=self.width,
            test_seed=occasion.shared_seed, num_examples=client.num_examples, **self.options(layout, occasion),
        )  # fmt: skip
