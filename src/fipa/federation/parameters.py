"""Flat parameters: in a file, where a warm-up ended and arms start, and their mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fipa.errors import FipaError


def save_theta(path: Path, theta: Tensor) -> None:
    """Write flat parameters in one step."""
    partial = path.with_suffix(".part")
    save_file({"theta": theta}, partial)
    os.replace(partial, path)


def load_theta(path: str | Path) -> Tensor:
    """What `save_theta` wrote."""
    if not Path(path).is_file():
        raise FipaError(f"{path} is missing: it holds the parameters that a warm-up ended with")
    return load_file(path)["theta"]


def mean_of(models: Sequence[Tensor]) -> Tensor:
    """Their mean, summed in double precision and in order: the same bits everywhere."""
    total = torch.zeros_like(models[0], dtype=torch.float64)
    for theta in models:
        total += theta
    return (total / len(models)).to(models[0].dtype)
