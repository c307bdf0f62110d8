"""Where an equation holds, and who owns which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Literal

import torch
from torch import Tensor

from fipa.errors import FipaError

Face = tuple[int, Literal["low", "high"]]  # axis and side


@dataclass(frozen=True)
class Box:
    """The points with low[i] <= x[i] <= high[i]."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or not self.low:
            raise FipaError(f"a box needs a low and a high end for each axis, got {self.low} and {self.high}")
        if not all(-math.inf < a < b < math.inf for a, b in zip(self.low, self.high, strict=True)):
            raise FipaError(f"a box must have finite ends, low < high on every axis, got {self.low} and {self.high}")

    @classmethod
    def cube(cls, axes: int, low: float = 0.0, high: float = 1.0) -> Box:
        """The same range on every axis."""
        return cls((low,) * axes, (high,) * axes)

    @property
    def axes(self) -> int:
        """Number of axes d."""
        return len(self.low)

    @property
    def faces(self) -> tuple[Face, ...]:
        """All 2 d faces."""
        return tuple((axis, side) for axis in range(self.axes) for side in ("low", "high"))

    def end(self, face: Face) -> float:
        """The coordinate of a face on its axis."""
        axis, side = face
        return (self.low if side == "low" else self.high)[axis]

    def uniform(self, count: int, generator: torch.Generator) -> Tensor:
        """Random points (n, d) in float64."""
        low, high = (torch.tensor(end, dtype=torch.float64) for end in (self.low, self.high))
        return low + (high - low) * torch.rand(count, self.axes, generator=generator, dtype=torch.float64)

    def on_face(self, face: Face, count: int, generator: torch.Generator) -> Tensor:
        """Points on a face; the face of an interval is a single point, drawn once."""
        points = self.uniform(count if self.axes > 1 else 1, generator)
        points[:, face[0]] = self.end(face)
        return points

    def grid(self, counts: Sequence[int]) -> Tensor:
        """Points of a regular grid with the ends, the first axis fastest."""
        lines = [
            torch.linspace(a, b, n, dtype=torch.float64) for a, b, n in zip(self.low, self.high, counts, strict=True)
        ]
        mesh = torch.meshgrid(*reversed(lines), indexing="ij")
        return torch.stack([part.reshape(-1) for part in reversed(mesh)], dim=1)

    def contains(self, other: Box) -> bool:
        """Whether the other box lies within."""
        pairs = zip(self.low, other.low, other.high, self.high, strict=True)
        return all(a <= c and d <= b for a, c, d, b in pairs)


@dataclass(frozen=True)
class Region:
    """The part of a domain that a client sees.

    Parameters
    ----------
    low, high
        Corners of its box.
    boundary
        Whether it also knows the conditions on those faces of the domain that it touches.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    boundary: bool = True

    @cached_property
    def box(self) -> Box:
        """Without the flag."""
        return Box(self.low, self.high)

    def faces(self, domain: Box, conditions: Sequence[Face]) -> list[Face]:
        """Faces of the domain with a condition that this region owns a part of."""
        if not self.boundary:
            return []
        return [face for face in conditions if self.box.end(face) == domain.end(face)]


def grid_split(domain: Box, cuts: Sequence[Sequence[float]]) -> tuple[Region, ...]:
    """Cut a domain at these places of each axis into strips or boxes; axes without an entry stay whole.

    Examples
    --------
    >>> [(region.low, region.high) for region in grid_split(Box.cube(2), [[0.5]])]
    [((0.0, 0.0), (0.5, 1.0)), ((0.5, 0.0), (1.0, 1.0))]
    """
    if len(cuts) > domain.axes:
        raise FipaError(f"problem.cuts has {len(cuts)} entries, but the domain has {domain.axes} axes")
    ranges = []
    for axis, (low, high) in enumerate(zip(domain.low, domain.high, strict=True)):
        inner = list(cuts[axis]) if axis < len(cuts) else []
        edges = [low, *inner, high]
        if any(a >= b for a, b in pairwise(edges)):
            raise FipaError(f"problem.cuts[{axis}] must rise within ({low:g}, {high:g}), got {inner}")
        ranges.append(list(pairwise(edges)))
    corners = (tuple(reversed(cell)) for cell in product(*reversed(ranges)))
    return tuple(Region(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in corners)


def check_split(domain: Box, regions: Sequence[Region], conditions: Sequence[Face]) -> None:
    """Every point of the domain and of the faces with a condition must belong to somebody."""
    if not regions:
        raise FipaError("a split needs at least one region")
    for number, region in enumerate(regions):
        if region.box.axes != domain.axes or not domain.contains(region.box):
            raise FipaError(f"region {number}, {_place(region.box)}, is no part of the domain {_place(domain)}")
    for cell in _cells(domain, regions):
        owners = [region for region in regions if region.box.contains(cell)]
        if not owners:
            raise FipaError(f"the split leaves {_place(cell)} without an owner: give it to a client, or mend the cuts")
        for face in conditions:
            if cell.end(face) == domain.end(face) and not any(region.faces(domain, [face]) for region in owners):
                raise FipaError(
                    f"nobody owns the condition on the face x{face[0] + 1} = {domain.end(face):g} next to "
                    f"{_place(cell)}: set boundary = true for a region there"
                )


def _cells(domain: Box, regions: Sequence[Region]) -> Iterator[Box]:
    """The domain cut wherever any region ends: each cell lies inside or outside of each region."""
    edges = [
        sorted({domain.low[i], domain.high[i], *(r.low[i] for r in regions), *(r.high[i] for r in regions)})
        for i in range(domain.axes)
    ]
    for cell in product(*(list(pairwise(line)) for line in edges)):
        yield Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))


def _place(box: Box) -> str:
    ends = zip(box.low, box.high, strict=True)
    return " x ".join(f"[{a:g}, {b:g}]" if f"{a:g}" != f"{b:g}" else f"[{a!r}, {b!r}]" for a, b in ends)
