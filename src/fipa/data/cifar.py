"""CIFAR-10 and CIFAR-100 in their official binary form: label bytes, then 3072 pixels, image after image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fipa.data.download import Remote
from fipa.data.images import Images, ImageSet
from fipa.data.source import Source
from fipa.errors import FipaError

PIXELS = 3 * 32 * 32
BLOCK = 5000  # images that are read at a time
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))


def read_cifar10(folder: Path) -> ImageSet:
    """Five files of training images, and one of test images."""
    return ImageSet(
        "CIFAR-10",
        _read([folder / batch for batch in BATCHES], labels=1),
        _read([folder / "test_batch.bin"], labels=1),
        CLASSES,
        (0.491, 0.482, 0.447),
        (0.247, 0.243, 0.262),
    )


def read_cifar100(folder: Path) -> ImageSet:
    """One file each. Of the two labels, the second is the class; the first is one of 20 groups of classes."""
    return ImageSet(
        "CIFAR-100",
        _read([folder / "train.bin"], labels=2),
        _read([folder / "test.bin"], labels=2),
        _names(folder / "fine_label_names.txt"),
        (0.5071, 0.4867, 0.4408),
        (0.2675, 0.2565, 0.2761),
    )


CIFAR10 = Source(
    "cifar10",
    "CIFAR-10",
    classes=10,
    images=(50_000, 10_000),
    shape=(3, 32, 32),
    read=read_cifar10,
    folders=("cifar-10-batches-bin",),
    files=(*BATCHES, "test_batch.bin"),
    remote=(Remote("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
)
CIFAR100 = Source(
    "cifar100",
    "CIFAR-100",
    classes=100,
    images=(50_000, 10_000),
    shape=(3, 32, 32),
    read=read_cifar100,
    folders=("cifar-100-binary",),
    files=("train.bin", "test.bin"),
    remote=(Remote("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
)


def _read(files: Sequence[Path], labels: int) -> Images:
    """The last of `labels` bytes before each image is its class."""
    row = labels + PIXELS
    counts = [_count(file, row) for file in files]
    pixels = np.empty((sum(counts), PIXELS), dtype=np.uint8)
    classes = np.empty(sum(counts), dtype=np.int64)
    start = 0
    for file, count in zip(files, counts, strict=True):
        with file.open("rb") as stream:
            for left in range(count, 0, -BLOCK):
                block = np.fromfile(stream, dtype=np.uint8, count=min(left, BLOCK) * row).reshape(-1, row)
                end = start + len(block)
                pixels[start:end] = block[:, labels:]
                classes[start:end] = block[:, labels - 1]
                start = end
    return Images(torch.from_numpy(pixels).reshape(-1, 3, 32, 32), torch.from_numpy(classes))


def _count(file: Path, row: int) -> int:
    size = file.stat().st_size
    if size == 0 or size % row:
        raise FipaError(f"{file} has {size} bytes, no multiple of {row}: get it again")
    return size // row


def _names(file: Path) -> tuple[str, ...]:
    if not file.exists():
        return tuple(f"class {i}" for i in range(100))
    names = tuple(file.read_text("utf-8").split())
    if len(names) != 100:
        raise FipaError(f"{file} has {len(names)} names for 100 classes: get it again, or delete it")
    return names
