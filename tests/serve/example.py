"""Run directories as `fipa run` leaves them, without any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fipa.folders import arm_folder, warmup_folder

METRIC = {"name": "test accuracy, %", "goal": "max", "scale": "linear"}


def config(arms: dict[str, int], seeds: list[int], warmup: int = 0, **changes: Any) -> dict[str, Any]:
    """The settings of a run whose arms have so many rounds."""
    content: dict[str, Any] = {
        "title": "A title",
        "rounds": 4,
        "seeds": seeds,
        "control": next(iter(arms)),
        "problem": {"name": "sine"},
        "arms": [{"name": arm, "rounds": rounds} for arm, rounds in arms.items()],
    }
    if warmup:
        content["warmup"] = {"name": "warm-up", "rounds": warmup}
    return content | changes


def start(directory: Path, content: dict[str, Any], metric: dict[str, str] | None = METRIC) -> Path:
    """Write run.json."""
    directory.mkdir(parents=True, exist_ok=True)
    run = {"format": "fipa-results-1", "name": "e", "command": "fipa run e --quiet", "config": content}
    (directory / "run.json").write_text(json.dumps(run | ({"metric": metric} if metric else {})))
    return directory


def line(k: int, **changes: Any) -> str:
    """One round."""
    content = {"round": k, "metric": 50.0 + k, "loss": 1.0, "seconds": 2.0, "uplink_bytes": 2**20}
    return json.dumps(content | {"downlink_bytes": 2**19, "initial_metric": 10.0} | changes) + "\n"


DIVERGED = line(2, metric=None, events=[{"round": 2, "client": None, "text": "diverged: NaN"}])


def write_rounds(directory: Path, place: int, arm: str, seed: int, rounds: int, more: str = "") -> Path:
    """The history of an arm on a seed."""
    return _history(arm_folder(directory, place, arm, seed), rounds, more)


def write_warmup(directory: Path, seed: int, rounds: int) -> Path:
    """The history of the warm-up."""
    return _history(warmup_folder(directory, seed), rounds, "")


def _history(folder: Path, rounds: int, more: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "history.jsonl"
    path.write_text("".join(line(k) for k in range(1, rounds + 1)) + more)
    return path


def finished(directory: Path, **changes: Any) -> Path:
    """A run of two arms on two seeds that is over."""
    start(directory, config({"FedAvg": 4, "FIPA": 4}, [0, 1], **changes))
    for place, arm in enumerate(("FedAvg", "FIPA")):
        for seed in (0, 1):
            write_rounds(directory, place, arm, seed, 4)
    return directory
