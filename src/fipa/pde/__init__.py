"""Equations on domains that are split between clients: see `fipa.pde.PDE` and `fipa.pde.federated`."""

from fipa.pde.domain import Box, Region, grid_split
from fipa.pde.equation import PDE, Points, dirichlet, federated, manufactured, relative_error, zero
from fipa.pde.field import Field

__all__ = [
    "PDE",
    "Box",
    "Field",
    "Points",
    "Region",
    "dirichlet",
    "federated",
    "grid_split",
    "manufactured",
    "relative_error",
    "zero",
]
