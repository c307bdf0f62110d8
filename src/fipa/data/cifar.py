"""CIFAR-10 and CIFAR-100 in their official binary form: label bytes, then 3072 pixels, for one image after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fipa.data.images import Images, ImageSet
from fipa.errors import FipaError

PIXELS = 3 * 32 * 32
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(root: Path) -> ImageSet:
    """50,000 training and 10,000 test images of 10 classes."""
    folder = root / "cifar-10-batches-bin"
    train = [folder / f"data_batch_{i}.bin" for i in range(1, 6)]
    return ImageSet(
        "CIFAR-10",
        _read(train, labels=1),
        _read([folder / "test_batch.bin"], labels=1),
        CIFAR10,
        (0.491, 0.482, 0.447),
        (0.247, 0.243, 0.262),
    )


def _read(files: Sequence[Path], labels: int) -> Images:
    """The last of `labels` bytes before each image is its class."""
    parts = []
    for file in files:
        content = np.fromfile(file, dtype=np.uint8)
        if content.size == 0 or content.size % (labels + PIXELS):
            raise FipaError(f"{file} has {content.size} bytes, no multiple of {labels + PIXELS}: get it again")
        parts.append(content.reshape(-1, labels + PIXELS))
    rows = np.concatenate(parts)
    pixels = torch.from_numpy(rows[:, labels:].copy()).reshape(-1, 3, 32, 32)
    return Images(pixels, torch.from_numpy(rows[:, labels - 1].astype(np.int64)))
