"""A set of labelled images in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.errors import FipaError


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels (n x channels x height x width, bytes) and labels (n)."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.dim() != 4:
            raise FipaError(
                f"images must be bytes (n, channels, height, width), got {self.pixels.dtype} {tuple(self.pixels.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            raise FipaError(
                f"{len(self.pixels)} images need as many int64 labels, got {self.labels.dtype} "
                f"{tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Training and test images, the names of the classes, and the mean and spread of each channel in [0, 1]."""

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            if len(part) and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < len(self.classes):
                raise FipaError(f"{self.name}: a label is none of the {len(self.classes)} classes")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train.pixels.shape[1:]
        return channels, height, width


@dataclass(frozen=True)
class Normalise:
    """Bytes to numbers of mean 0 and variance 1, with the channels innermost in memory, which convolutions like."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Numbers from bytes (n x channels x height x width)."""
        mean = torch.tensor(self.mean)[:, None, None] * 255
        std = torch.tensor(self.std)[:, None, None] * 255
        return ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)
