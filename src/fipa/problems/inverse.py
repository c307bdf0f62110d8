r"""An inverse problem: clients estimate together the coefficient a of $-a u'' + u^3 = f$ from readings of u.

Every client knows f on its part of [0, 1]; only some have sensors there, whose readings carry noise. Nobody knows a or
the values of u at the ends. The coefficient is a parameter of the shared model, aggregated like all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fipa.curvature.terms import Residual
from fipa.errors import FipaError
from fipa.federation.problem import Problem
from fipa.models import mlp
from fipa.pde import PDE, Box, Field, Points, Region, federated, grid_split
from fipa.problems.fitting import misfit
from fipa.randomness import generator_for


class WithCoefficient(nn.Module):
    """A network for u, and a number beside it: the two columns of the output."""

    def __init__(self, network: nn.Module, start: float) -> None:
        super().__init__()
        self.network = network
        self.coefficient = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        zero = torch.zeros_like(self.coefficient)
        first = torch.eye(2, 1, dtype=self.coefficient.dtype, device=self.coefficient.device)
        return linear(self.network(x), first, torch.stack([zero, self.coefficient]))


def diffusion(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-a u'' + u³ = f with a the second output of the model."""
    return -u[1].value * u.dd(0) + u.value**3 - f


def inverse(
    seed: int,
    *,
    coefficient: float = 0.7,
    start: float = 2.0,
    sensors: int = 10,
    sensing: Sequence[int] | None = None,
    noise: float = 0.01,
    cuts: Sequence[Sequence[float]] = ((0.25, 0.5, 0.75),),
    regions: Sequence[Region] | None = None,
    points: Points = Points(interior=200),
    penalty: float = 100.0,
    hidden: Sequence[int] = (32, 32, 32),
) -> Problem:
    """Estimate a diffusion coefficient; the metric is its relative error.

    Parameters
    ----------
    cuts
        Where each axis is cut; a list for each axis, and a strip or box for each client.
    regions
        Boxes of the clients instead of cuts; they may overlap.
    points
        How many points each client has.
    hidden
        Widths of the network's hidden layers.
    coefficient, start
        The truth, and the model's first guess.
    sensors, noise
        Readings per sensing client, and the standard deviation of their error.
    sensing
        Which clients have sensors; None for all.
    penalty
        Weight of the readings.
    """
    if not coefficient > 0 or sensors < 1 or noise < 0:
        raise FipaError("problem: coefficient must be positive, sensors at least 1, noise not negative")

    def exact(x: Any) -> Any:
        return torch.sin(math.pi * x[:, 0]) + 0.5 * x[:, 0]

    def source(x: Tensor) -> Tensor:
        u = Field(lambda y: exact(y)[:, None], x)
        return -coefficient * u.dd(0) + u.value**3

    pde = PDE(Box.cube(1), diffusion, source, exact, faces=())
    split = grid_split(pde.domain, cuts) if regions is None else tuple(regions)
    chosen = range(len(split)) if sensing is None else sensing
    if not penalty > 0:
        raise FipaError(f"problem.penalty must be positive, got {penalty}")
    if not chosen or not set(chosen) <= set(range(len(split))):
        raise FipaError(f"problem.sensing must name clients 0 to {len(split) - 1}, at least one, got {list(chosen)}")

    def readings(client: int, region: Region) -> list[Residual]:
        if client not in chosen:
            return []
        generator = generator_for(seed, "sensors", client=client)
        x = region.box.uniform(sensors, generator)
        y = exact(x) + noise * torch.randn(sensors, generator=generator, dtype=torch.float64)
        return [Residual(misfit, x, y, weight=penalty)]

    def error(model: nn.Module) -> float:
        assert isinstance(model, WithCoefficient)
        return abs(float(model.coefficient) - coefficient) / coefficient

    return federated(
        pde,
        split,
        WithCoefficient(mlp([1, *hidden, 1], generator=generator_for(seed, "model")), start),
        points,
        seed=seed,
        extra=readings,
        metric=error,
        name="relative error of the coefficient",
        labels=("x", "y"),
    )
