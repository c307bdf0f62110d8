"""All runs below a folder: found, read again when asked, and known by their place only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock

from fipa.errors import FipaError
from fipa.serve.others import FlowerCheckpoint, PlainResults
from fipa.serve.sources import FipaRun, Source
from fipa.serve.states import State

DEPTH = 5  # folders below the one that is served
MOST = 2000  # runs
AFRESH = 0.8  # seconds in which nobody looks again
SEARCH = 3.0  # seconds after which folders are searched for new runs
SKIPPED = {"node_modules", "__pycache__", "arms", "warmup", "figures", "tensorboard"}


class Library:
    """The runs below `root`; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise FipaError(f"{root} is no folder")
        self._sources: dict[str, Source] = {}
        self._lock = Lock()
        self._searched = self._looked = -1e9

    def refresh(self) -> list[Source]:
        """All runs, as they are now; one that is gone is left out."""
        with self._lock:
            now = time.monotonic()
            if now - self._searched >= SEARCH:
                self._search()
                self._searched = now
            if now - self._looked >= AFRESH:
                for source in self._sources.values():
                    source.refresh()
                self._looked = now
            return [source for source in self._sources.values() if source.state is not State.DELETED]

    def pick(self, ids: Sequence[str]) -> list[Source]:
        """The runs with these names, also those that are gone by now; names that were never seen are left out."""
        self.refresh()
        with self._lock:
            return [self._sources[name] for name in dict.fromkeys(ids) if name in self._sources]

    def _search(self) -> None:
        found = {name: (path, kind) for name, path, kind in islice(_runs(self.root, self.root, DEPTH), MOST)}
        for name, (path, kind) in found.items():
            known = self._sources.get(name)
            if not isinstance(known, kind) or known.state is State.DELETED:
                fresh = kind(name, path)
                fresh.version = known.version + 1 if known is not None else 0
                self._sources[name] = fresh
                self._looked = -1e9


def _runs(root: Path, folder: Path, depth: int) -> Iterator[tuple[str, Path, type[Source]]]:
    """Folders that hold a run, without following links; nothing below a run is looked at."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    kind = _kind(files)
    if kind is not None:
        yield folder.relative_to(root).as_posix(), folder, kind
        return
    for entry in entries if depth else ():
        hidden = entry.name.startswith(".") or entry.name in SKIPPED
        if entry.is_dir(follow_symlinks=False) and not hidden:
            yield from _runs(root, Path(entry.path), depth - 1)


def _kind(files: set[str]) -> type[Source] | None:
    if "run.json" in files:
        return FipaRun
    if "results.json" in files:
        return PlainResults
    return FlowerCheckpoint if any(name.endswith(".pt") for name in files) else None
