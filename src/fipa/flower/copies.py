"""What a node keeps in files, by checksum: every message runs in a process of its own."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fipa.federation.exact import mark_of
from fipa.linalg import aligned

FOLDER = "FIPA_CACHE"  # environment variable: where copies are kept
OLD = 30 * 24 * 3600.0  # seconds after which a copy of a run that has ended is deleted
EVERY = 3600.0  # seconds between two looks for old ones, of a process that lasts
_swept: dict[Path, float] = {}  # when they were last looked for, by folder


def folder() -> Path:
    """Where this machine keeps copies."""
    return Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "fipa")


class Copies:
    """The copies of one client in one run: of the shared basis (p x k), or of models (p).

    Parameters
    ----------
    owner
        Run and client.
    kind
        The folder for them.
    most
        How many are kept, those that were used last. Two of a basis: a server that was killed and restarts asks again
        from where it was.
    """

    def __init__(self, owner: str, kind: str = "bases", most: int = 2) -> None:
        self._owner, self._folder, self._most = owner, folder() / kind, most

    def load(self, mark: str, parameters: int) -> Tensor | None:
        """The copy with that checksum; None if there is none, or a damaged one."""
        empty = torch.zeros(parameters, 0)
        if mark == mark_of(empty):
            return empty
        try:
            tensor = load_file(self._file(mark))["tensor"]
            _touch(self._file(mark))
        except (OSError, SafetensorError, KeyError):
            return None
        return aligned(tensor) if len(tensor) == parameters and mark_of(tensor) == mark else None

    def save(self, tensor: Tensor, mark: str) -> None:
        """Keep a copy, in one step, and delete those of long ago.

        Where the disk is full or not to be written to, the server sends all of it again next time.
        """
        with contextlib.suppress(OSError):
            self._save(tensor, mark)

    def _save(self, tensor: Tensor, mark: str) -> None:
        place = self._file(mark)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{place.name}.{os.getpid()}")
        save_file({"tensor": tensor.contiguous()}, partial)
        _touch(partial)
        os.replace(partial, place)
        mine = sorted(self._folder.glob(f"{self._owner}-*.safetensors"), key=lambda path: -path.stat().st_mtime_ns)
        for path in mine[self._most :]:
            path.unlink(missing_ok=True)
        if time.time() - _swept.get(self._folder, -EVERY) >= EVERY:
            _swept[self._folder] = time.time()
            _sweep(self._folder)

    def clear(self) -> None:
        """Delete all copies of this client."""
        for path in self._folder.glob(f"{self._owner}-*.safetensors"):
            path.unlink(missing_ok=True)

    def _file(self, mark: str) -> Path:
        return self._folder / f"{self._owner}-{mark}.safetensors"


def _sweep(place: Path) -> None:
    """Delete old copies, also partial ones of processes that were killed."""
    limit = time.time() - OLD
    for path in place.glob("*.safetensors*"):
        with contextlib.suppress(FileNotFoundError):  # other clients on this machine look for old ones as well
            if path.stat().st_mtime < limit:
                path.unlink()


def _touch(path: Path) -> None:
    """Say that it was used just now; clocks of file systems are too coarse to tell."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
