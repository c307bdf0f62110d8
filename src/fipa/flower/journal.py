"""What is known of a run on Flower: records, events, metrics, a table in the log, alarms, and results.json."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import MetricRecord
from flwr.common.logger import log

from fipa.errors import FipaError
from fipa.federation.coordinator import State
from fipa.federation.record import RoundRecord, event
from fipa.federation.storage import write_json
from fipa.report.flower import CENTRAL, EVALUATE, TRAIN, flower_results

KEPT = 10_000  # events
GROWTH = 1.5  # of the loss above the lowest so far: an alarm
LEAP = 10.0  # of the step's length above what is usual: an alarm
COLUMNS = (
    ("round", 5), ("clients", 7), ("late", 4), ("missed", 6), ("refused", 7), ("loss", 9), ("after", 9), ("trials", 6),
    ("step", 9), ("MiB up", 8), ("MiB down", 8), ("trips", 5), ("seconds", 8),
)  # fmt: skip


class Journal:
    """Grows by a round at a time.

    Attributes
    ----------
    records, events
        Of all rounds so far, and what happened in them.
    metrics
        By kind and round, as Flower's `Result` has them.
    """

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.metrics: dict[str, dict[int, dict[str, Any]]] = {}
        self._said: set[tuple[Any, str]] = set()
        self._stalled = 0

    def keep(self, record: RoundRecord, state: State) -> None:
        """Log a round, and keep what is known of it."""
        alarms = [event(record.round, None, f"alarm: {text}") for text in self._alarms(record)]
        record = replace(record, events=(*record.events, *alarms))
        for happened in record.events:
            bad = "refused" in happened["text"] or happened["client"] is None or "did not" in happened["text"]
            self.say(happened, WARNING if bad else INFO)
        self.records.append(record)
        numbers = numbers_of(record) | {"alarms": len(alarms), "lr-scale": state.pace.lr_scale}
        if state.pace.examples is not None:
            numbers["examples"] = state.pace.examples
        self.metrics.setdefault(TRAIN, {})[record.round] = numbers
        if len(self.records) % 20 == 1:
            log(INFO, " ".join(f"{name:>{width}}" for name, width in COLUMNS))
        log(INFO, row(record))

    def say(self, happened: dict[str, Any], level: int) -> None:
        """Note an event; what a client has said before is not logged again."""
        self.events.append(happened)
        key = happened["client"], happened["text"]
        if key in self._said and level == INFO:
            return
        self._said.add(key)
        who = "server" if happened["client"] is None else f"client {happened['client']}"
        log(level, "round %d, %s: %s", happened["round"], who, happened["text"])

    def note(self, kind: str, k: int, metrics: MetricRecord | None) -> None:
        """Keep metrics of a round."""
        if metrics is not None:
            log(INFO, "round %d, %s: %s", k, kind, dict(metrics))
            self.metrics.setdefault(kind, {})[k] = dict(metrics)

    def _alarms(self, record: RoundRecord) -> list[str]:
        """Growth of the loss or of the step."""
        alarms = []
        losses = [r.loss for r in self.records if r.loss is not None]
        if losses and record.loss is not None and record.loss > GROWTH * min(losses):
            alarms.append(f"the clients' loss is {record.loss:.4g}, after {min(losses):.4g}: lower the learning rate")
        steps = [r.step_length for r in self.records if r.step_length > 0]
        if len(steps) >= 3 and record.step_length > LEAP * median(steps):
            alarms.append(f"a step of length {record.step_length:.3g}, where {median(steps):.3g} is usual")
        return alarms

    def check_progress(self, patience: int) -> None:
        """An error after so many rounds in a row of which nothing could be made, with the clients' own words."""
        last = self.records[-1]
        self._stalled = 0 if last.trials else self._stalled + 1
        if patience and self._stalled >= patience:
            said = [f"{_who(happened)}: {happened['text']}" for happened in last.events]
            raise FipaError(
                f"{self._stalled} rounds in a row were of no use, so the run stops: FIPA(stop_after={patience}). "
                "In the last one:\n" + "\n".join(said)
            )

    @property
    def best(self) -> bool:
        """Whether the last round has the lowest loss of all, as far as it is known."""
        losses = [self._loss(record) for record in self.records]
        known = [loss for loss in losses if loss is not None]
        return losses[-1] is not None and losses[-1] <= min(known)

    def _loss(self, record: RoundRecord) -> float | None:
        if record.loss_after is not None:
            return record.loss_after
        for kind in (CENTRAL, EVALUATE):
            numbers = self.metrics.get(kind, {}).get(record.round, {})
            found = [value for name, value in numbers.items() if "loss" in name and isinstance(value, float)]
            if found:
                return float(found[0])
        return None

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"metrics": self.metrics, "records": [replace(record, spectra={}).plain() for record in self.records]}

    def restore(self, content: Mapping[str, Any]) -> None:
        """What `plain` returned."""
        self.metrics = dict(content.get("metrics", {}))
        self.records = [RoundRecord.of(record) for record in content.get("records", [])]

    def write_results(self, folder: Path, title: str, seed: int, last: int, settings: Mapping[str, str]) -> None:
        """results.json, of which `fipa report` makes the page; `last` is the number of the last round."""
        folder.mkdir(parents=True, exist_ok=True)
        content = flower_results(self.records, self.metrics, title, seed, last, settings)
        write_json(folder / "results.json", content)


def row(record: RoundRecord) -> str:
    """A line of the log's table."""
    numbers = numbers_of(record)
    shown = (
        record.round, numbers["clients"], numbers["late"], numbers["missed"], numbers["refused"], _short(record.loss),
        _short(record.loss_after), record.trials, _short(record.step_length), f"{record.uplink_bytes / 2**20:.2f}",
        f"{record.downlink_bytes / 2**20:.2f}", record.trips, f"{record.seconds:.1f}",
    )  # fmt: skip
    return " ".join(f"{text!s:>{width}}" for text, (_, width) in zip(shown, COLUMNS, strict=True))


def numbers_of(record: RoundRecord) -> dict[str, Any]:
    """A round as Flower's metrics: what clients reported, and what it took."""
    in_time = int(record.metrics.get("pooled-clients", len(record.local_steps)))
    known = {"loss": record.loss, "loss-after": record.loss_after, "damping": record.damping, "step": record.step}
    texts = [happened["text"] for happened in record.events]
    return dict(record.metrics) | {name: value for name, value in known.items() if value is not None} | {
        "clients": in_time, "late": max(0, len(record.clients) - in_time), "trials": record.trials,
        "missed": sum("did not answer in time (work)" in text for text in texts),
        "refused": sum(text.startswith("refused") for text in texts),
        "accepted": int(record.accepted), "step-length": record.step_length, "uplink-bytes": record.uplink_bytes,
        "downlink-bytes": record.downlink_bytes, "trips": record.trips, "messages": record.messages,
        "seconds": record.seconds,
    }  # fmt: skip


def _who(happened: Mapping[str, Any]) -> str:
    return "server" if happened["client"] is None else f"client {happened['client']}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
