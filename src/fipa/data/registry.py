"""Image sets by name, and where they are looked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from fipa.data.cifar import cifar10
from fipa.data.images import ImageSet
from fipa.errors import FipaError

SETS: dict[str, Callable[[Path], ImageSet]] = {"cifar10": cifar10}


def data_root(root: str | Path | None = None) -> Path:
    """The folder with the sets: the one given, else `FIPA_DATA`, else `data` here."""
    return Path(root or os.environ.get("FIPA_DATA") or "data").expanduser()


def load(name: str, root: str | Path | None = None) -> ImageSet:
    """A set by its name, from under `root`."""
    if name not in SETS:
        raise FipaError(f"there is no image set {name!r}; there are {', '.join(SETS)}")
    return _load(name, data_root(root).resolve())


@lru_cache(maxsize=1)
def _load(name: str, root: Path) -> ImageSet:
    return SETS[name](root)
