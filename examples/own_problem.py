"""A problem of your own: `fipa run examples/own_problem.py`.

Three weather stations fit one curve of the day, each from its own hours. Replace model, residual and split by yours.
"""

import math

import torch

import fipa


def residual(model, hour, temperature):
    """What should be zero, one number per example."""
    return model(hour)[:, 0] - temperature


def truth(hour):
    """What the stations measure."""
    return torch.exp(-hour[:, 0]) * torch.sin(2 * math.pi * hour[:, 0])


def problem(seed):
    """Model, clients and metric for one seed."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for start, end in [(0.0, 0.4), (0.3, 0.7), (0.6, 1.0)]:  # what each station sees
        hour = start + (end - start) * torch.rand(100, 1, generator=generator, dtype=torch.float64)
        noise = 1e-3 * torch.randn(100, generator=generator, dtype=torch.float64)
        clients.append(fipa.Residual(residual, hour, truth(hour) + noise))
    grid = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
    return fipa.Problem(
        model=fipa.models.mlp([1, 16, 16, 1], generator=generator),
        clients=clients,
        metric=lambda model: (model(grid)[:, 0] - truth(grid)).square().mean(),
        name="test MSE",
        picture=fipa.Curves(grid[:, 0], truth(grid), lambda model: model(grid)[:, 0]),
    )
