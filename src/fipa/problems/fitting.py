"""Function fitting (paper Fig. 2): every client sees the target on its own part of the domain only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from fipa.curvature.terms import Residual
from fipa.errors import FipaError
from fipa.federation.problem import Curves, Maps, Problem
from fipa.models import mlp
from fipa.randomness import generator_for

# amplitude, centre and width in x and y of the Gaussians of the 2D target
GAUSSIANS = (
    (1.40, 0.18, 0.28, 0.06, 0.05),
    (0.90, 0.50, 0.28, 0.10, 0.06),
    (0.95, 0.82, 0.28, 0.11, 0.07),
    (0.75, 0.18, 0.72, 0.07, 0.06),
    (0.70, 0.50, 0.82, 0.07, 0.07),
    (0.80, 0.82, 0.74, 0.10, 0.07),
)


def misfit(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The residual of a fit."""
    return model(x)[:, 0] - y


def sine(
    seed: int,
    *,
    waves: int = 2,
    edges: Sequence[float] = (0.0, 0.5, 1.0),
    samples: int = 400,
    hidden: Sequence[int] = (20, 20, 20),
    grid: int = 1024,
) -> Problem:
    """u(x) = sin(waves pi x) on [0, 1], cut at `edges` into one part per client; test MSE on a uniform grid.

    Parameters
    ----------
    waves
        The target is sin(waves pi x).
    edges
        Ends of the clients' parts, from 0 to 1.
    samples
        Points of each client.
    hidden
        Widths of the network's hidden layers.
    grid
        Points of the test grid.
    """
    _check_sizes(samples=samples, grid=grid, hidden=min(hidden, default=1))
    if len(edges) < 2 or any(low >= high for low, high in pairwise(edges)):
        raise FipaError(f"edges must rise from one to the next, got {list(edges)}")

    def target(x: Tensor) -> Tensor:
        return torch.sin(waves * math.pi * x[:, 0])

    clients = []
    for client, (low, high) in enumerate(pairwise(edges)):
        x = low + (high - low) * _uniform(samples, 1, seed, client)
        clients.append(Residual(misfit, x, target(x)))
    x = torch.linspace(edges[0], edges[-1], grid, dtype=torch.float64)[:, None]
    u = target(x)
    return Problem(
        mlp([1, *hidden, 1], generator=generator_for(seed, "model")),
        clients,
        lambda model: misfit(model, x, u).square().mean(),
        name="test MSE",
        picture=Curves(x[:, 0], u, lambda model: model(x)[:, 0], tuple(pairwise(edges))),
    )


def mixture2d(
    seed: int,
    *,
    boxes: int = 3,
    samples: int = 1000,
    hidden: Sequence[int] = (20, 20, 20, 20),
    grid: int = 256,
    picture: int = 64,
) -> Problem:
    """Six Gaussians on the unit square, cut into `boxes` x `boxes` clients; test MSE on a `grid` x `grid` grid.

    Parameters
    ----------
    boxes
        Clients along each axis.
    samples
        Points of each client.
    hidden
        Widths of the network's hidden layers.
    grid
        Test points along each axis.
    picture
        Points along each axis of the report's picture.
    """
    _check_sizes(boxes=boxes, samples=samples, grid=grid, picture=picture, hidden=min(hidden, default=1))

    def target(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), dtype=x.dtype)
        for a, mx, my, sx, sy in GAUSSIANS:
            total += a * torch.exp(-0.5 * (((x[:, 0] - mx) / sx) ** 2 + ((x[:, 1] - my) / sy) ** 2))
        return total

    corners = [(column / boxes, row / boxes) for row, column in product(range(boxes), repeat=2)]
    clients = []
    for client, corner in enumerate(corners):
        x = torch.tensor(corner, dtype=torch.float64) + _uniform(samples, 2, seed, client) / boxes
        clients.append(Residual(misfit, x, target(x)))
    x, coarse = _square(grid), _square(picture)
    u = target(x)
    return Problem(
        mlp([2, *hidden, 1], generator=generator_for(seed, "model")),
        clients,
        lambda model: misfit(model, x, u).square().mean(),
        name="test MSE",
        picture=Maps(
            (0.0, 1.0, 0.0, 1.0),
            target(coarse).reshape(picture, picture),
            lambda model: model(coarse).reshape(picture, picture),
            tuple((left, left + 1 / boxes, low, low + 1 / boxes) for left, low in corners),
        ),
    )


def teacher(
    seed: int, *, dimension: int = 4, hidden: int = 4, samples: int = 400, distance: float = 0.05, test: int = 1000
) -> Problem:
    r"""A network of the same shape is the target, on $[-1, 1]^d$, of which each of two clients sees one half.

    The paper's theorem assumes that the residual vanishes at a solution where the Jacobian has full column rank, and
    holds near it. Here it does: 25 parameters meet 800 samples, and the start is at a relative `distance` from them.

    Parameters
    ----------
    dimension
        Number of inputs d.
    hidden
        Width of the hidden layer.
    samples
        Points of each client.
    distance
        Relative distance of the start from the solution.
    test
        Number of test points.
    """
    _check_sizes(dimension=dimension, hidden=hidden, samples=samples, test=test)
    generator = generator_for(seed, "model")
    truth, model = (mlp([dimension, hidden, 1], generator=generator) for _ in range(2))
    with torch.no_grad():
        for own, other in zip(truth.parameters(), model.parameters(), strict=True):
            own.copy_(2 * torch.randn(own.shape, generator=generator, dtype=own.dtype))
            other.copy_(torch.randn(own.shape, generator=generator, dtype=own.dtype))
        target, away = (torch.cat([t.reshape(-1) for t in one.parameters()]) for one in (truth, model))
        start = target + distance * float(target.norm() / away.norm()) * away
        nn.utils.vector_to_parameters(start, model.parameters())

    def values(x: Tensor) -> Tensor:
        with torch.no_grad():
            return truth(x)[:, 0]

    clients = []
    for client, side in enumerate((-1.0, 1.0)):
        x = 2 * _uniform(samples, dimension, seed, client) - 1
        x[:, 0] = side * x[:, 0].abs()
        clients.append(Residual(misfit, x, values(x)))
    x = 2 * _uniform(test, dimension, seed, len(clients)) - 1
    u = values(x)
    return Problem(model, clients, lambda model: misfit(model, x, u).square().mean(), name="test MSE")


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise FipaError(f"problem.{name} must be at least 1, got {size}")


def _uniform(rows: int, columns: int, seed: int, client: int) -> Tensor:
    return torch.rand(rows, columns, generator=generator_for(seed, "data", client=client), dtype=torch.float64)


def _square(side: int) -> Tensor:
    """Points of a grid on the unit square, rows of ascending y."""
    line = torch.linspace(0, 1, side, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.reshape(-1), y.reshape(-1)], dim=1)
