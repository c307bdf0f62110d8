"""A node's copies of the shared basis, in files: every message runs in a process of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fipa.federation.basis import mark_of

FOLDER = "FIPA_CACHE"  # environment variable: where copies are kept
OLD = 30 * 24 * 3600.0  # seconds after which a copy of a run that has ended is deleted


def folder() -> Path:
    """Where this machine keeps copies."""
    return Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "fipa") / "bases"


class Copies:
    """The copies of one client in one run, by the checksum of their columns.

    Two are kept: a server that was killed and restarts asks again from where it was.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def load(self, mark: str, parameters: int) -> Tensor | None:
        """The copy with that checksum (p x k); None if there is none, or a damaged one."""
        empty = torch.zeros(parameters, 0)
        if mark == mark_of(empty):
            return empty
        try:
            columns = load_file(self._file(mark))["columns"]
        except (OSError, SafetensorError, KeyError):
            return None
        return columns if len(columns) == parameters and mark_of(columns) == mark else None

    def save(self, columns: Tensor, mark: str, besides: str) -> None:
        """Keep a copy, in one step, and the one that it came from; delete all others.

        Where the disk is full or not to be written to, the server sends all columns again next time.
        """
        with contextlib.suppress(OSError):
            self._save(columns, mark, besides)

    def _save(self, columns: Tensor, mark: str, besides: str) -> None:
        place = self._file(mark)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{place.name}.{os.getpid()}")
        save_file({"columns": columns.contiguous()}, partial)
        os.replace(partial, place)
        self._delete(lambda path: path not in (place, self._file(besides)))
        limit = time.time() - OLD
        for path in folder().glob("*.safetensors*"):  # partial ones of processes that were killed, too
            with contextlib.suppress(FileNotFoundError):  # other clients on this machine look for old ones as well
                if path.stat().st_mtime < limit:
                    path.unlink()

    def clear(self) -> None:
        """Delete all copies of this client."""
        self._delete(lambda _: True)

    def _delete(self, chosen: Callable[[Path], bool]) -> None:
        for path in folder().glob(f"{self._owner}-*.safetensors"):
            if chosen(path):
                path.unlink(missing_ok=True)

    def _file(self, mark: str) -> Path:
        return folder() / f"{self._owner}-{mark}.safetensors"
