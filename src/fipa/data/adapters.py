"""Image sets from other libraries' data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fipa.data.images import Images, ImageSet
from fipa.errors import FipaError, instead_of

CHANNELS = (1, 3, 4)


class Examples(Protocol):
    """A `torch.utils.data.Dataset` of (image, label), or anything else with a length and an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def from_torch(
    train: Examples,
    test: Examples,
    *,
    name: str = "images",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> ImageSet:
    """Read data sets of (image, label) into memory.

    An image may be a PIL image, an array (height x width x channels), or a tensor (channels x height x width); of
    bytes, or of floats in [0, 1]. All must have one size. Grey ones among coloured ones are made coloured.

    Parameters
    ----------
    classes
        Names; those in `train.classes` by default, or else "class 0" and so on.
    mean, std
        Mean and standard deviation of each channel in [0, 1]; computed from the training images by default.
    """
    for part, examples in (("train", train), ("test", test)):
        if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
            raise FipaError(
                f"{name}, {part}: a data set must have a length and an index; make a list of an iterable one"
            )
    names = classes if classes is not None else getattr(train, "classes", None)
    return _assemble(
        name,
        (_pair(train[i], f"{name}, train, example {i}") for i in range(len(train))),
        (_pair(test[i], f"{name}, test, example {i}") for i in range(len(test))),
        names,
        mean,
        std,
    )


def from_huggingface(
    splits: Mapping[str, Any],
    *,
    image: str = "img",
    label: str = "label",
    train: str = "train",
    test: str = "test",
    name: str = "images",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> ImageSet:
    """Read what `datasets.load_dataset` returns into memory.

    Parameters
    ----------
    image, label
        The columns. Names of the classes are taken from the label's feature, if it has them.
    train, test
        The splits.
    mean, std
        As for `from_torch`.
    """
    for split in (train, test):
        if split not in splits:
            raise FipaError(f"{name}: there is no split {split!r}: {instead_of(split, splits)}")
        for column in (image, label):
            if column not in splits[split].features:
                there = instead_of(column, splits[split].features)
                raise FipaError(f"{name}, {split}: there is no column {column!r}: {there}")

    def examples(split: str) -> Iterable[tuple[Any, Any]]:
        return ((row[image], row[label]) for row in splits[split])

    names = getattr(splits[train].features[label], "names", None)
    return _assemble(name, examples(train), examples(test), names, mean, std)


def _assemble(
    name: str,
    train: Iterable[tuple[Any, Any]],
    test: Iterable[tuple[Any, Any]],
    classes: Sequence[str] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> ImageSet:
    training, testing = _images(train, f"{name}, train"), _images(test, f"{name}, test")
    if training.pixels.shape[1:] != testing.pixels.shape[1:]:
        raise FipaError(
            f"{name}: training images are {tuple(training.pixels.shape[1:])}, test images "
            f"{tuple(testing.pixels.shape[1:])} (channels, height, width); give both one shape"
        )
    if classes is None:
        classes = [f"class {i}" for i in range(int(max(training.labels.max(), testing.labels.max())) + 1)]
    if mean is None or std is None:
        means, spreads = _moments(training.pixels)
        mean, std = mean or means, std or spreads
    channels = training.pixels.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise FipaError(f"{name}: mean and std need a number for each of {channels} channels")
    return ImageSet(name, training, testing, tuple(classes), tuple(mean), tuple(std))


def _pair(example: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise FipaError(f"{where}: expected (image, label), got {type(example).__name__}")
    return example[0], example[1]


def _images(examples: Iterable[tuple[Any, Any]], where: str) -> Images:
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for i, (image, label) in enumerate(examples):
        pixels.append(_bytes(image, f"{where}, example {i}"))
        labels.append(_label(label, f"{where}, example {i}"))
        if pixels[i].shape[1:] != pixels[0].shape[1:]:
            raise FipaError(
                f"{where}, example {i}: {pixels[i].shape[1:]} pixels, where the first has {pixels[0].shape[1:]}; "
                "resize them to one size"
            )
    if not pixels:
        raise FipaError(f"{where}: there are no images")
    out = np.empty((len(pixels), max(map(len, pixels)), *pixels[0].shape[1:]), dtype=np.uint8)
    for i, image in enumerate(pixels):
        if len(image) not in (1, out.shape[1]):
            raise FipaError(f"{where}, example {i}: {len(image)} channels, where others have {out.shape[1]}")
        out[i] = image  # one channel is repeated
    return Images(torch.from_numpy(out), torch.tensor(labels))


def _label(label: Any, where: str) -> int:
    try:
        number = int(label)
    except (TypeError, ValueError, RuntimeError):
        raise FipaError(f"{where}: a label must be one integer, got {label!r}") from None
    if number != label:
        raise FipaError(f"{where}: a label must be one integer, got {label!r}")
    return number


def _bytes(image: Any, where: str) -> NDArray[np.uint8]:
    """Bytes (channels x height x width)."""
    if hasattr(image, "convert"):  # PIL
        image = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    first = isinstance(image, Tensor)  # channels before height and width
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if not isinstance(array, np.ndarray):
        raise FipaError(f"{where}: an image must be a tensor, an array or a PIL image, got {type(image).__name__}")
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and not first and array.shape[2] in CHANNELS:
        array = array.transpose(2, 0, 1)
    if array.ndim != 3 or array.shape[0] not in CHANNELS:
        order = "(channels, height, width)" if first else "(height, width, channels)"
        raise FipaError(f"{where}: an image must be {order}, got {array.shape}")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating) or not (array.min() >= 0 and array.max() <= 1):
        raise FipaError(
            f"{where}: pixels must be bytes, or floats in [0, 1], got {array.dtype} in [{array.min()}, {array.max()}]; "
            "leave normalising to us"
        )
    return np.rint(array * 255).astype(np.uint8)


def _moments(pixels: Tensor) -> tuple[list[float], list[float]]:
    """Mean and spread of each channel, by counting bytes; the spread of a constant channel is set to 1."""
    means, spreads = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(pixels.shape[1]):
        share = torch.bincount(pixels[:, channel].reshape(-1), minlength=256) / pixels[:, channel].numel()
        mean = float(share.double() @ values)
        means.append(mean)
        spreads.append(float(share.double() @ (values - mean).square()) ** 0.5 or 1.0)
    return means, spreads
