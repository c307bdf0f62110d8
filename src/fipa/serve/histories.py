"""The rounds of one arm on one seed, read while another process writes them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from fipa.federation.record import SERIES, RoundRecord
from fipa.serve.files import ODD, inside

SHOWN = ("metric", "averaged_metric", "loss", "seconds", "uplink_bytes", "downlink_bytes")
HUGE = 1e300  # numbers below it can be summed and averaged
Column = list[float | None]


class History:
    """A history.jsonl that grows: what is read once is not read again; one that is a link out of `root` is not read.

    Attributes
    ----------
    columns
        One value per round for each of `SHOWN`.
    initial
        The metric before the first round.
    broken
        What is wrong with the file; empty if nothing is.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path, self._root = path, (root or path.parent).resolve()
        self._forget()

    def _forget(self) -> None:
        self._place: tuple[int, int] | None = None
        self._offset = 0
        self._lines = 0
        self.columns: dict[str, Column] = {name: [] for name in SHOWN}
        self.initial: float | None = None
        self.diverged = False
        self.broken = self._damaged = ""
        self.changed_at = 0.0

    def __len__(self) -> int:
        return len(self.columns["metric"])

    def refresh(self) -> bool:
        """Read the complete lines that are new; true if anything has changed.

        A file that was cut or replaced, as by a run that resumes, is read anew. The last line counts once it has its
        end: until then it is still being written.
        """
        try:
            stat = self.path.stat()
        except OSError:
            known = self._place is not None
            self._forget()
            return known
        if self._place not in (None, (stat.st_dev, stat.st_ino)) or stat.st_size < self._offset:
            self._forget()
        if self._place is not None and stat.st_size == self._offset and self.broken == self._damaged:
            return False
        self._place = (stat.st_dev, stat.st_ino)
        self.changed_at = stat.st_mtime
        before = self.broken
        return self._read() or self.broken != before

    def _read(self) -> bool:
        if not inside(self._root, self.path):
            self.broken = f"{self.path.name} is a link to elsewhere"
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError as error:
            self.broken = f"{self.path.name} cannot be read: {error.strerror}"
            return False
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)
        self.broken = self._damaged
        return bool(whole)

    def _take(self, line: bytes) -> None:
        self._lines += 1
        try:
            content: dict[str, Any] = json.loads(line)
            values = {name: finite(content.get(name)) for name in SHOWN}
            events = content.get("events") or []
            self.diverged = any(str(event["text"]).startswith("diverged") for event in events)
        except ODD:
            self._damaged = f"line {self._lines} of {self.path.name} is damaged"
            return
        if not len(self):
            self.initial = finite(content.get("initial_metric"))
        for name, value in values.items():
            self.columns[name].append(value)


def whole_history(path: Path, rounds: int) -> dict[str, Any]:
    """All series, events and spectra of the first so many rounds, as results.json has them, without damaged lines."""
    found = []
    for line in path.read_bytes().splitlines():
        with suppress(*ODD):
            found.append(RoundRecord.of(json.loads(line)))
    found = found[:rounds]
    plain = [record.plain() for record in found]
    series = {key: [content[key] for content in plain] for key in SERIES}
    events = [event for record in found for event in record.events]
    return series | {"events": events, "spectra": {str(r.round): dict(r.spectra) for r in found if r.spectra}}


def finite(value: Any) -> float | None:
    """A number that can be drawn; None for all else.

    >>> finite(3), finite(float("nan")), finite(10**400), finite(True), finite("3")
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) and abs(value) < HUGE else None
    except OverflowError:
        return None
