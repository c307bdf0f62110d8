r"""Burgers' equation, $u_t + u u_x = \nu u_{xx}$ on $t \in [0, 1]$, $x \in [-1, 1]$ from $u(0, x) = -\sin \pi x$.

Time is the first axis: clients can own intervals of time, of space, or boxes. A client that owns a later interval of
time sees neither the initial values nor what happened before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.problem import Problem
from fipa.models import mlp
from fipa.pde import PDE, Box, Field, Points, Region, federated, grid_split
from fipa.randomness import generator_for

NODES = 128  # of the quadrature
CHUNK = 4096  # points at a time


class Burgers:
    """The residual for a viscosity."""

    def __init__(self, viscosity: float) -> None:
        if not viscosity >= 1e-3:
            raise FipaError(f"problem.viscosity must be at least 1e-3, where the reference is still exact: {viscosity}")
        self.viscosity = viscosity

    def __call__(self, u: Field, x: Tensor, f: Tensor) -> Tensor:
        """Zero where the equation holds."""
        return u.d(0) + u.value * u.d(1) - self.viscosity * u.dd(1) - f

    def solution(self, x: Tensor) -> Tensor:
        r"""The exact solution by Cole and Hopf, an integral against a Gaussian, by Gauss-Hermite quadrature.

        With $\varphi(y) = \exp(-\cos(\pi y) / (2 \pi \nu))$ and $s = \sqrt{4 \nu t}$,

        $$u(t, x) = -\frac{\int \sin \pi (x - s z)\, \varphi(x - s z)\, e^{-z^2} dz}
        {\int \varphi(x - s z)\, e^{-z^2} dz} .$$
        """
        z, weight = (torch.from_numpy(part) for part in np.polynomial.hermite.hermgauss(NODES))
        parts = []
        for t, place in ((part[:, :1], part[:, 1:]) for part in x.split(CHUNK)):
            y = place - (4 * self.viscosity * t).sqrt() * z
            power = -torch.cos(math.pi * y) / (2 * math.pi * self.viscosity)
            share = weight * torch.exp(power - power.max(dim=1, keepdim=True).values)
            parts.append(-(torch.sin(math.pi * y) * share).sum(dim=1) / share.sum(dim=1))
        return torch.cat(parts)


def burgers(
    seed: int,
    *,
    viscosity: float = 0.02,
    cuts: Sequence[Sequence[float]] = ((), (0.0,)),
    regions: Sequence[Region] | None = None,
    points: Points = Points(interior=2000, boundary=200),
    penalty: float = 100.0,
    hidden: Sequence[int] = (32, 32, 32),
) -> Problem:
    r"""Burgers' equation with a front, cut in time (first axis), in space (second) or both; relative L2 error.

    Parameters
    ----------
    viscosity
        $\nu$: the smaller, the steeper the front.
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
    """
    equation = Burgers(viscosity)
    domain = Box((0.0, -1.0), (1.0, 1.0))
    pde = PDE(
        domain,
        equation,
        exact=equation.solution,
        values=equation.solution,  # -sin(pi x) at t = 0, zero at both ends
        faces=((0, "low"), (1, "low"), (1, "high")),
    )
    model = mlp([2, *hidden, 1], generator=generator_for(seed, "model"))
    split = grid_split(domain, cuts) if regions is None else regions
    return federated(pde, split, model, points, seed=seed, penalty=penalty, labels=("t", "x"))
