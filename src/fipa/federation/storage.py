"""One arm on one seed on disk: a line of history per round and the state after the last one, safe against kill -9."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fipa.errors import FipaError
from fipa.federation.checkpoint import load_state, save_state
from fipa.federation.coordinator import State
from fipa.federation.record import RoundRecord
from fipa.folders import HISTORY


class Saved(NamedTuple):
    """What is on disk of an arm on a seed: the last state, all rounds, how it stands, and the metric before them."""

    state: State
    records: list[RoundRecord]
    status: str
    initial_metric: float | None


class RunFolder:
    """Folder of one arm on one seed.

    A round is first appended to the history, then the checkpoint is replaced in one step. Whatever was written after
    the last checkpoint is cut off on loading, so that a killed run loses the round in flight and nothing else.
    """

    def __init__(self, path: Path, keep_thetas: bool = False, after: int = 0) -> None:
        self.path = path
        self._keep_thetas = keep_thetas
        self._after = after  # rounds of a warm-up, which are kept elsewhere

    @property
    def history(self) -> Path:
        """One JSON object per round."""
        return self.path / HISTORY

    @property
    def checkpoint(self) -> Path:
        """The state after the last round."""
        return self.path / "checkpoint.pt"

    def start(self, round_number: int) -> Path:
        """The parameters after a round of a warm-up, from which arms start."""
        return self.path / f"theta-{round_number}.safetensors"

    @property
    def thetas(self) -> Path:
        """The parameters after each round, as raw numbers one after the other."""
        return self.path / "thetas.bin"

    def save(self, state: State, record: RoundRecord, status: str, initial_metric: float | None = None) -> None:
        """Add a round."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record.plain() | {"initial_metric": initial_metric})) + "\n")
        if self._keep_thetas:
            with self.thetas.open("ab") as binary:
                binary.write(state.theta.numpy().tobytes())
        save_state(self.checkpoint, state, status=status)

    def load(self, repair: bool = False) -> Saved | None:
        """All up to the last complete round, or None if there is none.

        `repair` cuts off what a killed run wrote after that: for the one who resumes, not for those who only read.
        """
        try:
            loaded = load_state(self.checkpoint)
        except FipaError as error:
            raise FipaError(f"{error}: delete {self.path} to run this arm again") from error
        if loaded is None:
            if repair:
                self.history.unlink(missing_ok=True)
                self.thetas.unlink(missing_ok=True)
            return None
        state, content = loaded
        lines = self.history.read_text("utf-8").splitlines(keepends=True) if self.history.exists() else []
        rounds = state.round_number - self._after
        if len(lines) < rounds:
            raise FipaError(
                f"{self.history} has {len(lines)} rounds, its checkpoint {rounds}: delete {self.path} to "
                "run this arm again"
            )
        late = len(lines) > rounds
        lines = lines[:rounds]
        if late and repair:
            partial = self.history.with_suffix(".part")
            partial.write_text("".join(lines), "utf-8")
            os.replace(partial, self.history)
        if self._keep_thetas:
            size = rounds * state.theta.numel() * state.theta.element_size()
            if not self.thetas.exists() or self.thetas.stat().st_size < size:
                raise FipaError(f"{self.thetas} is missing or too short: delete {self.path} to run this arm again")
            if repair:
                os.truncate(self.thetas, size)
        try:
            found = [json.loads(line) for line in lines]
            initial = found[0].get("initial_metric") if found else None
            return Saved(state, [RoundRecord.of(line) for line in found], content["status"], initial)
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            raise FipaError(f"{self.history} is damaged: delete {self.path} to run this arm again") from error


def finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, content: Any) -> None:
    """Write in one step: readers see the old file or the new one."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(partial, path)
