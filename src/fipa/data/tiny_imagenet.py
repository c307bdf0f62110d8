"""Tiny ImageNet in its official folders: JPEG files of 64 x 64 pixels, a folder for each class."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fipa.data.download import Remote
from fipa.data.images import Images, ImageSet
from fipa.data.source import Source
from fipa.errors import FipaError

SIDE = 64
CACHE = ".fipa-cache"
BLOCK = 500  # images that a thread decodes at a time


def read_tiny_imagenet(folder: Path) -> ImageSet:
    """However many images each class has; the validation images are for the test, as the test images have no labels.

    Decoded images are kept in `.fipa-cache` in the folder, if it can be written to. Processes that read them from there
    share the memory.
    """
    classes = (folder / "wnids.txt").read_text("utf-8").split()
    if len(set(classes)) != len(classes):
        raise FipaError(f"{folder / 'wnids.txt'} names a class twice: get it again")
    return ImageSet(
        "Tiny ImageNet",
        _images(folder, "train", list(_training(folder, classes)), classes),
        _images(folder, "val", list(_validation(folder)), classes),
        _names(folder, classes),
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
    )


TINY_IMAGENET = Source(
    "tiny-imagenet",
    "Tiny ImageNet",
    classes=200,
    images=(100_000, 10_000),
    shape=(3, SIDE, SIDE),
    read=read_tiny_imagenet,
    folders=("tiny-imagenet-200",),
    files=("wnids.txt", "train", "val/images", "val/val_annotations.txt"),
    remote=(Remote("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
)


def _training(folder: Path, classes: Sequence[str]) -> Iterator[tuple[Path, str]]:
    for name in classes:
        images = folder / "train" / name / "images"
        if not images.is_dir():
            raise FipaError(f"{images}, the folder of a class in wnids.txt, is not there: get the set again")
        yield from ((file, name) for file in sorted(images.iterdir()) if file.suffix == ".JPEG")


def _validation(folder: Path) -> Iterator[tuple[Path, str]]:
    annotations = folder / "val" / "val_annotations.txt"
    for line in annotations.read_text("utf-8").splitlines():
        file, tab, rest = line.partition("\t")
        if not tab:
            raise FipaError(f"{annotations} has the line {line!r}, without a class: get it again")
        yield folder / "val" / "images" / file, rest.split("\t")[0]


def _names(folder: Path, classes: Sequence[str]) -> tuple[str, ...]:
    """The first word for each class."""
    file = folder / "words.txt"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    words = {name: text.split(",")[0] for name, _, text in (line.partition("\t") for line in lines)}
    return tuple(words.get(name, name) for name in classes)


def _images(folder: Path, part: str, listed: Sequence[tuple[Path, str]], classes: Sequence[str]) -> Images:
    if not listed:
        raise FipaError(f"{folder / part} has no images: get the set again")
    number = {name: i for i, name in enumerate(classes)}
    for file, name in listed:
        if name not in number:
            raise FipaError(f"{file} is of class {name}, which is not in {folder / 'wnids.txt'}: get the set again")
    labels = torch.tensor([number[name] for _, name in listed])
    return Images(_pixels([file for file, _ in listed], folder / CACHE, part), labels)


def _pixels(files: Sequence[Path], cache: Path, part: str) -> Tensor:
    """From the cache, if it was made from these very files."""
    stored = cache / f"{part}-{_digest(files)}.npy"
    if (pixels := _stored(stored, len(files))) is None:
        pixels = _decode(files)
        with suppress(OSError):  # a folder that cannot be written to, or a full disk
            _store(pixels, stored, part)
            shared = _stored(stored, len(files))
            pixels = pixels if shared is None else shared
    return torch.from_numpy(pixels)


def _digest(files: Sequence[Path]) -> str:
    """Changes whenever a file's name, size or time does."""
    digest = hashlib.md5(usedforsecurity=False)
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise FipaError(f"{file} cannot be read: {error.strerror}; get the set again") from error
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _stored(file: Path, count: int) -> NDArray[np.uint8] | None:
    """Mapped, and copied only where someone writes."""
    try:
        pixels: NDArray[np.uint8] = np.load(file, mmap_mode="c")
    except (OSError, ValueError, EOFError):
        return None
    return pixels if pixels.dtype == np.uint8 and pixels.shape == (count, 3, SIDE, SIDE) else None


def _store(pixels: NDArray[np.uint8], file: Path, part: str) -> None:
    """Whole or not at all; what was decoded from other files goes."""
    file.parent.mkdir(exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.save(stream, pixels)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
    for old in file.parent.glob(f"{part}-*.npy"):
        if old != file:
            old.unlink(missing_ok=True)


def _decode(files: Sequence[Path]) -> NDArray[np.uint8]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise FipaError("JPEG files need Pillow: pip install 'fipa[images]'") from None

    pixels = np.empty((len(files), 3, SIDE, SIDE), dtype=np.uint8)

    def decode(start: int) -> None:
        for i, file in enumerate(files[start : start + BLOCK], start):
            try:
                with Image.open(file) as image:
                    rgb = np.asarray(image.convert("RGB"))  # some are grey
            except (OSError, UnidentifiedImageError, SyntaxError) as error:
                raise FipaError(f"{file} cannot be decoded: {error}; get the set again") from error
            if rgb.shape != (SIDE, SIDE, 3):
                raise FipaError(f"{file} has {rgb.shape[1]} x {rgb.shape[0]} pixels, not {SIDE} x {SIDE}")
            pixels[i] = rgb.transpose(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(decode, range(0, len(files), BLOCK)))
    return pixels
