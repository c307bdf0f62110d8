"""An equation of your own, split between four sites: `fipa run examples/own_pde.py`.

A plate with a nonlinear loss, -Δu + u³ = f on [0, 1] x [0, 1]: insulated on the right, held at given values elsewhere.
Replace residual, condition, domain and split by yours. Leave `exact` out where no solution is known: then use
`fipa.pde.PDE(domain, residual, source, values=...)`, and the metric is the residual on test points.
"""

import math

import torch

import fipa
from fipa.pde import Box, Points, federated, grid_split, manufactured


def residual(u, x, f):
    """Zero where the equation holds. `u.d(0)` and `u.dd(0)` are derivatives along the first axis."""
    return -u.laplacian + u.value**3 - f


def condition(u, x, g):
    """Zero where the boundary condition holds: the slope on the right, values on the other sides."""
    return torch.where(x[:, 0] == 1.0, u.d(0), u.value) - g


def exact(x):
    """The solution that f and g are made from; its slope is zero at x = 1."""
    return torch.sin(0.5 * math.pi * x[:, 0]) * torch.cos(math.pi * x[:, 1])


def problem(seed):
    """Model, clients and metric for one seed."""
    domain = Box.cube(2)
    return federated(
        manufactured(domain, residual, exact, condition=condition),
        grid_split(domain, cuts=[[0.5], [0.5]]),  # or any list of fipa.pde.Region
        fipa.models.mlp([2, 20, 20, 1], generator=torch.Generator().manual_seed(seed)),
        Points(interior=300, boundary=40),
        seed=seed,
        penalty=10.0,
    )
