"""Runs that are not of `fipa run`: a results.json alone, as a Flower server writes it, and a server's checkpoint."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fipa.errors import FipaError
from fipa.federation.record import RoundRecord
from fipa.report.files import check_results, load_results
from fipa.report.flower import flower_results
from fipa.serve.files import ODD, stamp, told
from fipa.serve.histories import SHOWN, finite
from fipa.serve.sources import RESULTS, Source
from fipa.serve.states import State, quiet_for
from fipa.serve.tracks import Track


@dataclass
class OneFile(Source):
    """A run of which one file is read, whenever it is another one."""

    _stamp: tuple[int, int, int] | None = None
    _error: str = ""  # of the file with this stamp

    @property
    @abstractmethod
    def file(self) -> Path:
        """The file."""

    @abstractmethod
    def read(self) -> dict[str, Any]:
        """Its content as results."""

    def whole(self) -> dict[str, Any]:
        """The results with all that the report shows."""
        return check_results(self._content(), self.file)

    def look(self) -> bool:
        """Read the file if it is another one; a process is known to be alive by its writing only."""
        stat = self.file.stat()
        changed = stamp(stat) != self._stamp
        if changed:
            self._stamp, self._error = stamp(stat), ""
            try:
                content = self._content()
                self.tracks = _tracks(content, stat.st_mtime)
                self.header = {key: value for key, value in content.items() if key != "arms"}
            except OSError:  # which may pass without the file being another one
                self._stamp = None
                raise
            except ODD as error:
                self._error = told(error)
        if self._error:
            raise FipaError(self._error)
        self.state, self.note = self._standing(stat.st_mtime)
        return changed

    def _content(self) -> dict[str, Any]:
        if not self.holds(self.file):
            raise FipaError(f"{self.file.name} is a link to elsewhere")
        content = self.read()
        if not isinstance(content.get("config") or {}, dict):
            raise FipaError(f"{self.file.name}: 'config' is not an object")
        return content

    def _standing(self, changed_at: float) -> tuple[State, str]:
        if all(track.over for track in self.tracks):
            return (State.DIVERGED if any(t.diverged for t in self.tracks) else State.FINISHED), ""
        if not quiet_for(changed_at, (s for track in self.tracks for s in track.columns["seconds"][-5:])):
            return State.RUNNING, ""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed_at))
        return State.STOPPED, f"nothing was written since {since}"


@dataclass
class PlainResults(OneFile):
    """A folder with a results.json and nothing else of a run."""

    kind: ClassVar[str] = "results"

    @property
    def file(self) -> Path:
        """The results."""
        return self.path / RESULTS

    def read(self) -> dict[str, Any]:
        """The results, checked."""
        return load_results(self.path)


@dataclass
class FlowerCheckpoint(OneFile):
    """The checkpoint of a Flower server, with all its rounds."""

    kind: ClassVar[str] = "flower"

    @property
    def file(self) -> Path:
        """The last state; those of single rounds and the best one have longer names beside it."""
        return checkpoint_in([path for path in self.path.iterdir() if path.suffix == ".pt"])

    def read(self) -> dict[str, Any]:
        """The rounds as results."""
        from fipa.federation.checkpoint import load_state

        loaded = load_state(self.file)
        if loaded is None or "records" not in loaded[1]:
            raise FipaError(f"{self.file.name} is no checkpoint of a Flower server")
        _, content = loaded
        try:
            rounds = [RoundRecord.of(record) for record in content["records"]]
            title, settings = self.file.stem, {str(k): str(v) for k, v in content.get("settings", {}).items()}
            return flower_results(rounds, content.get("metrics", {}), title, 0, content.get("last"), settings)
        except (TypeError, AttributeError, KeyError) as error:
            raise FipaError(f"{self.file.name} cannot be understood") from error


def checkpoint_in(paths: list[Path]) -> Path:
    """The checkpoint among its copies: `run.pt` beside `run-3.pt` and `run-best.pt`.

    >>> checkpoint_in([Path("run-3.pt"), Path("run.pt"), Path("run-best.pt")]).name
    'run.pt'
    """
    if not paths:
        raise FipaError("there is no checkpoint any more")
    return min(paths, key=lambda path: (len(path.stem), path.name))


def _tracks(content: dict[str, Any], changed_at: float) -> list[Track]:
    found = []
    for arm, seeds in content["arms"].items():
        for seed, record in seeds.items():
            rounds = len(record["metric"])
            columns = {name: [finite(v) for v in record.get(name) or [None] * rounds] for name in SHOWN}
            status, total = record.get("status", "finished"), content.get("rounds")
            found.append(
                Track(
                    arm, seed, columns, total if isinstance(total, int) else None if status == "running" else rounds,
                    int(record.get("after") or 0), finite(record.get("initial_metric")), status == "diverged",
                    status == "finished", False, changed_at,
                )
            )  # fmt: skip
    return found
