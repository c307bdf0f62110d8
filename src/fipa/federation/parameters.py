"""Flat parameters: in a file, where a warm-up ended and arms start, and their mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fipa.errors import FipaError

Seen = Mapping[int, tuple[int, Tensor]]  # of each client, its examples and its last update as a gradient


def save_theta(path: Path, theta: Tensor, seen: Seen | None = None) -> None:
    """Write flat parameters in one step, and what is known of the clients that led there."""
    partial = path.with_suffix(".part")
    tensors = {"theta": theta}
    if seen:
        counts = [[client, examples] for client, (examples, _) in seen.items()]
        tensors["clients"] = torch.tensor(counts, dtype=torch.int64)
        tensors["gradients"] = torch.stack([gradient for _, gradient in seen.values()])
    save_file(tensors, partial)
    os.replace(partial, path)


def load_seen(path: str | Path) -> dict[int, tuple[int, Tensor]]:
    """What `save_theta` wrote about clients."""
    tensors = load_file(path)
    rows = zip(tensors.get("clients", ()), tensors.get("gradients", ()), strict=True)
    return {int(client): (int(examples), gradient.clone()) for (client, examples), gradient in rows}


def load_theta(path: str | Path) -> Tensor:
    """What `save_theta` wrote."""
    if not Path(path).is_file():
        raise FipaError(f"{path} is missing: it holds the parameters that a warm-up ended with")
    return load_file(path)["theta"]


def mean_of(models: Sequence[Tensor]) -> Tensor:
    """The mean of several models, summed in double precision and in order: the same bits everywhere."""
    total = torch.zeros_like(models[0], dtype=torch.float64)
    for theta in models:
        total += theta
    return (total / len(models)).to(models[0].dtype)
