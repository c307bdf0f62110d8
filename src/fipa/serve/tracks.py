"""Arms on seeds with their rounds so far, wherever they were read from, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fipa.serve.histories import SHOWN, Column

RECENT = 20  # rounds that tell how long the next ones take


@dataclass(frozen=True)
class Track:
    """An arm on a seed.

    total, after
        How many rounds there are to be (None if nobody knows), and how many of a warm-up come before them.
    warmup
        True for the warm-up itself.
    """

    arm: str
    seed: str
    columns: dict[str, Column]
    total: int | None
    after: int = 0
    initial: float | None = None
    diverged: bool = False
    finished: bool = False
    warmup: bool = False
    changed_at: float = 0.0

    @property
    def done(self) -> int:
        """Rounds that are over."""
        return len(self.columns["metric"])

    @property
    def over(self) -> bool:
        """Whether no round is left to run."""
        return self.finished or self.diverged

    @property
    def status(self) -> str:
        """As results.json has it."""
        return "diverged" if self.diverged else "finished" if self.finished else "running"

    def last(self, name: str = "metric") -> float | None:
        """The last number of a column; of the metric, else the one before the first round."""
        known = (value for value in reversed(self.columns[name]) if value is not None)
        return next(known, self.initial if name == "metric" else None)

    def sum(self, name: str) -> float:
        """The total of a column."""
        return math.fsum(value or 0.0 for value in self.columns[name])

    def record(self) -> dict[str, Any]:
        """As results.json has it."""
        known = {name: list(self.columns[name]) for name in SHOWN}
        return known | {"status": self.status, "after": self.after, "initial_metric": self.initial, "events": []}


def records(tracks: Sequence[Track]) -> dict[str, dict[str, dict[str, Any]]]:
    """Arms, seeds and their series; the warm-up stands in for the arms as long as none of them has begun."""
    begun = [track for track in tracks if track.done]
    arms = [track for track in begun if not track.warmup] or begun
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for track in arms:
        found.setdefault(track.arm, {})[track.seed] = track.record()
    return found


def current(tracks: Sequence[Track]) -> Track | None:
    """The arm and seed that was written last."""
    return max((track for track in tracks if track.done), key=lambda track: track.changed_at, default=None)


def best(tracks: Iterable[Track], goal: str, besides: Sequence[str] = ()) -> tuple[str, float] | None:
    """The arm with the best mean of the last metric over its seeds, and this mean; None if no arm has a number."""
    values: dict[str, list[float]] = {}
    for track in tracks:
        last = track.last()
        if track.done and not track.diverged and not track.warmup and track.arm not in besides and last is not None:
            values.setdefault(track.arm, []).append(last)
    means = {arm: fmean(found) for arm, found in values.items()}
    if not means:
        return None
    arm = (max if goal == "max" else min)(means, key=lambda name: means[name])
    return arm, means[arm]


def seconds_left(tracks: Sequence[Track], overhead: float = 1.0) -> float | None:
    """The time that the rounds to come will take; None if that cannot be said.

    An arm's next rounds take as long as its last ones, those of an arm that has not begun as long as others. `overhead`
    is how much longer a round takes than it says: its seconds leave out the evaluation.
    """
    if any(track.total is None and not track.over for track in tracks):
        return None
    paces: dict[str, list[float]] = {}
    for track in tracks:
        known = [value for value in track.columns["seconds"][-RECENT:] if value is not None]
        paces.setdefault(track.arm, []).extend(known)
    usual = {arm: fmean(values) for arm, values in paces.items() if values}
    if not usual:
        return None
    other = fmean(usual.values())
    left = ((track, (track.total or 0) - track.done) for track in tracks if not track.over)
    return overhead * math.fsum(rounds * usual.get(track.arm, other) for track, rounds in left)
