"""Random crops, flips and rotations of a batch of images, in one gather."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.errors import FipaError


@dataclass(frozen=True)
class Augment:
    """What is drawn anew for every image of a batch. Beyond the edge, the nearest pixel is repeated.

    Parameters
    ----------
    crop
        Shift by up to this many pixels in each direction: pad, and cut at random.
    flip
        Mirror left and right, with probability one half.
    rotation
        Turn by up to this many degrees in either direction, to the nearest pixel.
    """

    crop: int = 4
    flip: bool = True
    rotation: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0 or not 0 <= self.rotation <= 180:
            raise FipaError("augment: crop must not be negative, and rotation lie between 0 and 180 degrees")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The images (n x channels x height x width), varied."""
        n, channels, height, width = images.shape
        rows, columns = self.places(n, height, width, generator)
        pixels = images.permute(0, 2, 3, 1).reshape(-1, channels)
        flat = (torch.arange(n) * (height * width))[:, None, None] + rows * width + columns
        return pixels.index_select(0, flat.reshape(-1)).reshape(n, height, width, channels).permute(0, 3, 1, 2)

    def places(self, n: int, height: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Where the pixels of n images come from: rows (n x height x 1) and columns (n x 1 x width).

        With a rotation both are (n x height x width).
        """
        shifts = self._shifts(n, generator)
        rows = (torch.arange(height) + shifts[0]).clamp_(0, height - 1)[:, :, None]
        columns = (torch.arange(width) + shifts[1]).clamp_(0, width - 1)[:, None, :]
        if self.rotation:
            rows, columns = self._turned(rows, columns, height, width, generator)
        if self.flip:
            columns = torch.where(self._mirrored(n, generator), width - 1 - columns, columns)
        return rows, columns

    def moves(self, n: int, generator: torch.Generator) -> Tensor:
        """The same draws in short, without a rotation: shifts of rows and columns, and 1 if mirrored (n x 3)."""
        shifts = self._shifts(n, generator)[:, :, 0]
        mirrored = self._mirrored(n, generator)[:, 0, 0] if self.flip else torch.zeros(n)
        return torch.stack([*shifts, mirrored], dim=1).long()

    def _shifts(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randint(-self.crop, self.crop + 1, (2, n, 1), generator=generator)

    def _mirrored(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.rand(n, 1, 1, generator=generator) < 0.5

    def _turned(
        self, rows: Tensor, columns: Tensor, height: int, width: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        angle = (2 * torch.rand(len(rows), 1, 1, generator=generator) - 1) * math.radians(self.rotation)
        y, x = rows - (height - 1) / 2, columns - (width - 1) / 2
        turned_y = angle.cos() * y + angle.sin() * x + (height - 1) / 2
        turned_x = angle.cos() * x - angle.sin() * y + (width - 1) / 2
        return (
            turned_y.round().long().clamp_(0, height - 1),
            turned_x.round().long().clamp_(0, width - 1),
        )
