"""Elliptic equations with manufactured solutions (paper Fig. 3): f is whatever makes the chosen u a solution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.problem import Problem
from fipa.models import mlp
from fipa.pde import PDE, Box, Field, Points, Region, federated, grid_split, manufactured
from fipa.randomness import generator_for

RADIUS, CENTRE, WIDTH = 0.3, (0.45, 0.55), 0.1  # of the bubble in two dimensions, and of its interface
DIFFUSION = 1 / 16  # above 1 / (2 pi^2), where the solution is unique


def allen_cahn(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-u'' + u³ - u = f."""
    return -u.laplacian + u.value**3 - u.value - f


def bratu(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-u'' - exp(u) = f."""
    return -u.laplacian - u.value.exp() - f


def fisher(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-u'' + u (1 - u) = f."""
    return -u.laplacian + u.value * (1 - u.value) - f


def reaction_diffusion(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-u'' + u² = f."""
    return -u.laplacian + u.value**2 - f


def bubble(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-D Δu + u³ - u = f: Allen and Cahn's equation with a diffusion coefficient."""
    return -DIFFUSION * u.laplacian + u.value**3 - u.value - f


def poisson_residual(u: Field, x: Tensor, f: Tensor) -> Tensor:
    """-Δu = f."""
    return -u.laplacian - f


def _bubble(x: Any) -> Any:
    """One inside of a circle, minus one outside, with a smooth interface between them."""
    squares = (x - torch.tensor(CENTRE, dtype=torch.float64)).square().sum(dim=1)
    return torch.tanh((RADIUS**2 - squares) / (2 * RADIUS) / (math.sqrt(2) * WIDTH))


@dataclass(frozen=True)
class Equation:
    """A residual, and a solution that is written for tensors and jets alike."""

    residual: Callable[[Field, Tensor, Tensor], Tensor]
    exact: Callable[[Any], Any]
    axes: int = 1

    @property
    def pde(self) -> PDE:
        """The equation on the unit cube."""
        return manufactured(Box.cube(self.axes), self.residual, self.exact, laplacian=True)


EQUATIONS = {
    "allen-cahn": Equation(allen_cahn, lambda x: torch.sin(math.pi * x[:, 0])),
    "bratu": Equation(bratu, lambda x: x[:, 0] * (1 - x[:, 0])),
    "fisher": Equation(fisher, lambda x: x[:, 0] ** 2 * (1 - x[:, 0])),
    "reaction-diffusion": Equation(reaction_diffusion, lambda x: torch.sin(2 * math.pi * x[:, 0])),
    "allen-cahn-2d": Equation(bubble, _bubble, 2),
}
SOLUTIONS: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: torch.sin(math.pi * x).prod(dim=1),
    "sum": lambda x: torch.sin(math.pi * x).sum(dim=1),
}


def elliptic(
    seed: int,
    *,
    equation: Literal["allen-cahn", "bratu", "fisher", "reaction-diffusion", "allen-cahn-2d"] = "allen-cahn",
    cuts: Sequence[Sequence[float]] = ((0.5,),),
    regions: Sequence[Region] | None = None,
    points: Points = Points(interior=400, boundary=20),
    penalty: float = 10.0,
    hidden: Sequence[int] = (32, 32, 32),
    hard_boundary: bool = False,
) -> Problem:
    r"""A nonlinear equation on [0, 1] or the unit square, cut at `cuts` or into `regions`; relative L2 error.

    Parameters
    ----------
    equation
        Which equation.
    cuts
        Where each axis is cut; a list for each axis, and a strip or box for each client.
    regions
        Boxes of the clients instead of cuts; they may overlap.
    points
        How many points each client has.
    penalty
        Weight $\lambda$ of the boundary condition in the loss.
    hidden
        Widths of the network's hidden layers.
    hard_boundary
        Multiply the network by a function that is zero on the boundary, so that u = 0 holds there without a penalty.
    """
    return _solve(EQUATIONS[equation], seed, cuts, regions, points, penalty, hidden, hard_boundary)


def poisson(
    seed: int,
    *,
    dimension: int = 2,
    solution: Literal["product", "sum"] = "product",
    cuts: Sequence[Sequence[float]] = ((0.5,),),
    regions: Sequence[Region] | None = None,
    points: Points = Points(interior=2000, boundary=200),
    penalty: float = 100.0,
    hidden: Sequence[int] = (32, 32, 32),
    hard_boundary: bool = False,
) -> Problem:
    r"""-Δu = f on the unit cube with u = Π sin(π xᵢ), or their sum as in the published code; relative L2 error.

    Parameters
    ----------
    dimension
        Number of axes d.
    solution
        The product of sines, or their sum.
    cuts
        Where each axis is cut; a list for each axis, and a strip or box for each client.
    regions
        Boxes of the clients instead of cuts; they may overlap.
    points
        How many points each client has.
    penalty
        Weight $\lambda$ of the boundary condition in the loss.
    hidden
        Widths of the network's hidden layers.
    hard_boundary
        Multiply the network by a function that is zero on the boundary, so that u = 0 holds there without a penalty.
    """
    if dimension < 1:
        raise FipaError(f"problem.dimension must be at least 1, got {dimension}")
    equation = Equation(poisson_residual, SOLUTIONS[solution], dimension)
    return _solve(equation, seed, cuts, regions, points, penalty, hidden, hard_boundary)


def _solve(
    equation: Equation,
    seed: int,
    cuts: Sequence[Sequence[float]],
    regions: Sequence[Region] | None,
    points: Points,
    penalty: float,
    hidden: Sequence[int],
    hard: bool,
) -> Problem:
    pde = equation.pde
    model = mlp([pde.domain.axes, *hidden, 1], generator=generator_for(seed, "model"))
    split = grid_split(pde.domain, cuts) if regions is None else regions
    labels = ("x", "y") if pde.domain.axes < 3 else ("x₁", "x₂")
    return federated(pde, split, model, points, seed=seed, penalty=penalty, hard_boundary=hard, labels=labels)
