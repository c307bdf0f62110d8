"""Image sets by name, and where they are looked for."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from fipa.data.cifar import CIFAR10, CIFAR100
from fipa.data.digits import DIGITS
from fipa.data.download import Progress
from fipa.data.idx import FASHION_MNIST, MNIST
from fipa.data.images import ImageSet
from fipa.data.source import Source
from fipa.data.tiny_imagenet import TINY_IMAGENET
from fipa.errors import FipaError, instead_of

SETS: dict[str, Source] = {
    source.name: source for source in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100, TINY_IMAGENET)
}


def data_root(root: str | Path | None = None) -> Path:
    """The folder with the sets: the one given, else `FIPA_DATA`, else `data` here."""
    return Path(root or os.environ.get("FIPA_DATA") or "data").expanduser()


def load(name: str, root: str | Path | None = None) -> ImageSet:
    """A set by its name, from under `root`."""
    return _load(find(name), data_root(root).resolve())


def get(name: str, root: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Download a set to under `root`, unless it is there, and return its folder."""
    return find(name).get(data_root(root).resolve(), progress)


def find(name: str) -> Source:
    """What is known of a set."""
    if name not in SETS:
        raise FipaError(f"there is no image set {name!r}: {instead_of(name, SETS)}")
    return SETS[name]


@lru_cache(maxsize=1)
def _load(source: Source, root: Path) -> ImageSet:
    return source.load(root)
