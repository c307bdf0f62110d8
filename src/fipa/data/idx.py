"""MNIST and Fashion-MNIST in their official IDX form, gzipped or plain."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fipa.data.download import Remote
from fipa.data.images import Images, ImageSet
from fipa.data.source import Source
from fipa.errors import FipaError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BYTES = 8  # how IDX calls the type of a byte
GARMENTS = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


def read_mnist(folder: Path) -> ImageSet:
    """Handwritten digits."""
    return ImageSet("MNIST", *_parts(folder), tuple("0123456789"), (0.1307,), (0.3081,))


def read_fashion_mnist(folder: Path) -> ImageSet:
    """Pictures of garments."""
    return ImageSet("Fashion-MNIST", *_parts(folder), GARMENTS, (0.2860,), (0.3530,))


def read_idx(file: Path) -> Tensor:
    """The bytes of an IDX file, in the shape that it states."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FipaError(f"{file} cannot be unpacked: {error}. Get it again") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, BYTES]):
        raise FipaError(f"{file} does not begin as an IDX file of bytes does: get it again")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise FipaError(f"{file} has {len(content)} bytes, not {start} + {' x '.join(map(str, shape))}: get it again")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy())


def _parts(folder: Path) -> tuple[Images, Images]:
    images, labels, test_images, test_labels = (read_idx(_either(folder / file)) for file in FILES)
    return Images(images[:, None], labels.long()), Images(test_images[:, None], test_labels.long())


def _either(file: Path) -> Path:
    return file if file.exists() else file.with_name(f"{file.name}.gz")


def _source(name: str, title: str, folders: tuple[str, ...], url: str, digests: tuple[str, str, str, str]) -> Source:
    return Source(
        name,
        title,
        classes=10,
        images=(60_000, 10_000),
        shape=(1, 28, 28),
        read=read_mnist if name == "mnist" else read_fashion_mnist,
        folders=folders,
        files=FILES,
        endings=("", ".gz"),
        remote=tuple(Remote(f"{url}/{file}.gz", digest) for file, digest in zip(FILES, digests, strict=True)),
    )


MNIST = _source(
    "mnist",
    "MNIST",
    ("mnist", "MNIST/raw"),
    "https://ossci-datasets.s3.amazonaws.com/mnist",  # PyTorch's mirror; the authors' page no longer serves the files
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
FASHION_MNIST = _source(
    "fashion-mnist",
    "Fashion-MNIST",
    # the last is where Debian's package dataset-fashion-mnist puts it
    ("fashion-mnist", "FashionMNIST/raw", "/usr/share/datasets/fashion-mnist"),
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
