"""Vectors in 8 bits per entry: whole numbers from -127 to 127, with a scale for each block of entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 127  # the largest of the whole numbers
BLOCK = 256  # entries that share a scale: layers differ by orders of magnitude


@dataclass(frozen=True, eq=False)
class Coded:
    """A vector (p) as it travels, a quarter as long as in single precision.

    Attributes
    ----------
    codes
        Whole numbers (int8, p).
    scales
        What 1 stands for in each block (float32, p / 256).
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> Coded:
        """The codes that are nearest to a vector."""
        blocks = torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).reshape(-1, BLOCK)
        scales = (blocks.abs().amax(dim=1) / STEPS).float()
        whole = blocks / scales.to(vector).clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = whole.round().clamp(-STEPS, STEPS).to(torch.int8)
        return cls(codes.reshape(-1)[: len(vector)].clone(), scales)

    def vector(self, like: Tensor) -> Tensor:
        """What they stand for, the same bits on every machine, as a tensor of the kind of `like`."""
        return self.codes.to(like) * self.scales.to(like).repeat_interleave(BLOCK)[: len(self.codes)]

    @property
    def nbytes(self) -> int:
        """As it travels."""
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()


def whole_of(parts: Sequence[Coded], like: Tensor) -> Tensor:
    """The sum of some parts, one after the other."""
    total = torch.zeros_like(like)
    for part in parts:
        total += part.vector(like)
    return total
