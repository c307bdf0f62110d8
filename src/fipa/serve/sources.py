"""A run on disk that is read again and again, whoever writes it: `fipa run`, `fipa.run`, or a Flower server."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fipa.errors import FipaError
from fipa.folders import ERROR, LOCK
from fipa.report.files import DEFAULTS, check_results, load_results
from fipa.serve.files import ODD, inside, stamp, told
from fipa.serve.histories import History, whole_history
from fipa.serve.plans import Pair, Plan, read_plan
from fipa.serve.states import State, locked, quiet_for
from fipa.serve.tracks import Track, current, records

RESULTS = "results.json"
REST = 5.0  # seconds between two looks at the histories of a run that no process works on
MARKS = 50  # moments at which rounds were seen to end


@dataclass
class Source(ABC):
    """A run in its folder.

    Attributes
    ----------
    id
        Its place below the folder that is served.
    state, note
        How it stands, and why where that needs to be said.
    version
        Grows with every change that can be seen.
    """

    id: str
    path: Path
    state: State = State.STOPPED
    note: str = ""
    version: int = 0
    tracks: list[Track] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = ""

    @abstractmethod
    def look(self) -> bool:
        """Read what is new; true if anything changed."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The results with all that the report shows; an error if no round is over."""

    def refresh(self) -> None:
        """Read what is new; a folder that is gone, or that cannot be read, is a state and no error."""
        before = self.state, self.note
        changed = False
        if not self.path.is_dir():
            self.state, self.note = State.DELETED, "the folder is gone"
        else:
            try:
                changed = self.look()
            except (OSError, *ODD) as error:
                self.state, self.note = State.BROKEN, told(error)
        if changed or before != (self.state, self.note):
            self.version += 1

    def holds(self, path: Path) -> bool:
        """Whether a file is really in this folder, and no link to elsewhere."""
        return inside(self.path.resolve(), path)

    @property
    def changed_at(self) -> float:
        """When a round was last written; 0 if none was."""
        return max((track.changed_at for track in self.tracks), default=0.0)

    @property
    def overhead(self) -> float:
        """How much longer rounds take than they say."""
        return 1.0

    def results(self) -> dict[str, Any] | None:
        """What the charts draw; None as long as no round is over."""
        arms = records(self.tracks)
        return {**DEFAULTS, **self.header, "arms": arms} if arms else None


@dataclass
class FipaRun(Source):
    """A run of `fipa run` or `fipa.run`: a run.json, and a history for each arm and seed."""

    kind: ClassVar[str] = "fipa"
    plan: Plan | None = None
    _stamp: tuple[int, int, int] | None = None
    _histories: dict[Path, History] = field(default_factory=dict)
    _looked: float = 0.0
    _alive: bool | None = None
    _marks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MARKS))

    def look(self) -> bool:
        """Read what is new: run.json if it is another one, and the histories while a process works on them."""
        changed = self._read_plan()
        assert self.plan is not None
        alive = locked(self.path / LOCK)
        resting = not alive and not self._alive and not changed and self.state is not State.BROKEN
        if resting and time.monotonic() - self._looked < REST:
            return False
        self._alive, self._looked = alive, time.monotonic()
        grown = [history.refresh() for history in self._histories.values()]
        afresh = changed or len(self.tracks) != len(grown)  # as after an error
        if any(grown) or afresh:
            before = [None] * len(grown) if afresh else self.tracks
            self.tracks = [
                self._track(self.plan, pair) if new or old is None else old
                for pair, new, old in zip(self.plan.pairs, grown, before, strict=True)
            ]
            self._marks.append((time.monotonic(), sum(track.sum("seconds") for track in self.tracks)))
        if changed and self.plan.guessed and self.holds(self.path / RESULTS):
            with suppress(FipaError):
                self.header["metric"] = load_results(self.path)["metric"]
        self.state, self.note = self._standing(alive)
        return changed or any(grown)

    def whole(self) -> dict[str, Any]:
        """What the run wrote at its end, if nothing came after it; else all rounds that are on disk."""
        if self.plan is None or self.state is State.BROKEN:
            raise FipaError(self.note or "run.json was not read")
        pairs, tracks = self.plan.pairs, list(self.tracks)  # as they are now: others may look meanwhile
        if [(pair.arm, str(pair.seed)) for pair in pairs] != [(track.arm, track.seed) for track in tracks]:
            raise FipaError("the run has just changed; ask again")
        written = _changed_at(self.path / RESULTS) if self.holds(self.path / RESULTS) else 0.0
        if written and written >= max((_changed_at(pair.history) for pair in pairs), default=0.0):
            return load_results(self.path)
        arms: dict[str, dict[str, Any]] = {}
        for pair, track in zip(pairs, tracks, strict=True):
            if track.done and not track.warmup:
                arms.setdefault(pair.arm, {})[str(pair.seed)] = track.record() | whole_history(pair.history, track.done)
        return check_results({**self.header, "arms": arms}, self.path)

    @property
    def overhead(self) -> float:
        """How much longer rounds took than they say, as long as they were watched."""
        if len(self._marks) < 2:
            return 1.0
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        return min(max((end - begin) / (after - before), 1.0), 20.0) if after > before else 1.0

    def _read_plan(self) -> bool:
        try:
            stat = (self.path / "run.json").stat()
        except OSError as error:
            self._stamp = None
            raise FipaError("run.json is gone") from error
        if stamp(stat) == self._stamp and self.plan is not None:
            return False
        if not self.holds(self.path / "run.json"):
            raise FipaError("run.json is a link to elsewhere")
        self.plan = read_plan(self.path)
        self._stamp, self.header = stamp(stat), self.plan.header
        self._histories = {pair.history: History(pair.history, self.path) for pair in self.plan.pairs}
        self._marks.clear()
        return True

    def _track(self, plan: Plan, pair: Pair) -> Track:
        """What a history holds now, in lists of its own: others may read them while it grows."""
        h = self._histories[pair.history]
        columns = {name: list(column) for name, column in h.columns.items()}
        finished, warmup = len(h) >= pair.rounds and not h.diverged, pair.arm == plan.warmup
        return Track(
            pair.arm, str(pair.seed), columns, pair.rounds, pair.after, h.initial, h.diverged, finished, warmup,
            h.changed_at,
        )  # fmt: skip

    def _standing(self, alive: bool | None) -> tuple[State, str]:
        broken = [f"{h.path.parent.parent.name}/{h.path.parent.name}: {h.broken}" for h in self._histories.values()
                  if h.broken]  # fmt: skip
        note = "; ".join(broken[:3])
        last = current(self.tracks)
        if alive is None:
            alive = last is not None and not quiet_for(last.changed_at, last.columns["seconds"][-5:])
            alive = alive and not all(track.over for track in self.tracks)
        if alive:
            return State.RUNNING, note
        if self.holds(self.path / ERROR) and (reason := _text(self.path / ERROR)):
            return State.FAILED, reason
        if all(track.over for track in self.tracks):
            return (State.DIVERGED if any(t.diverged for t in self.tracks) else State.FINISHED), note
        return State.STOPPED, note or f"resume with: fipa resume {self.path}"


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()[:2000]
    except OSError:
        return ""
