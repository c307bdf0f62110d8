"""What a run sets out to do, from its run.json: the arms and seeds, and how many rounds each has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fipa.errors import FipaError
from fipa.folders import HISTORY, arm_folder, warmup_folder
from fipa.report.files import FORMAT
from fipa.serve.files import ODD

ACCURACY = {"name": "test accuracy, %", "goal": "max", "scale": "linear"}
ERROR = {"name": "test error", "goal": "min", "scale": "log"}


@dataclass(frozen=True)
class Pair:
    """An arm on a seed: where its rounds are written, how many there are to be, and how many come before them."""

    arm: str
    seed: int
    history: Path
    rounds: int
    after: int


@dataclass(frozen=True)
class Plan:
    """A run as it was started; the warm-up is the first of its pairs."""

    name: str
    command: str
    config: dict[str, Any]
    metric: dict[str, str]
    warmup: str | None
    pairs: tuple[Pair, ...]
    guessed: bool = False  # the metric, which runs of older versions do not say at their start

    @property
    def header(self) -> dict[str, Any]:
        """What results say besides the numbers."""
        config = self.config
        return {
            "format": FORMAT,
            "fipa": "",
            "experiment": self.name,
            "title": str(config.get("title") or self.name),
            "description": str(config.get("description") or "").strip(),
            "command": self.command,
            "config": config,
            "config_toml": "",
            "metric": self.metric,
            "control": config.get("control"),
            "reference": config.get("reference"),
            "figure": "generic",
        }


def read_plan(directory: Path) -> Plan:
    """Read run.json; an error says what is wrong with it."""
    path = directory / "run.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format"] != FORMAT:
            raise FipaError(f"run.json has format {content['format']!r}, this version reads {FORMAT!r}")
        config = content["config"]
        pairs = tuple(_pairs(directory, config))
        metric = {**_guess(config), **{k: str(v) for k, v in (content.get("metric") or {}).items()}}
        if metric["goal"] not in ("min", "max") or metric["scale"] not in ("log", "linear"):
            raise FipaError(f"run.json has a metric that is not known: {metric}")
        warmup = config["warmup"]["name"] if config.get("warmup") else None
        guessed = not content.get("metric")
        return Plan(str(content["name"]), str(content["command"]), config, metric, warmup, pairs, guessed)
    except OSError as error:
        raise FipaError(f"run.json cannot be read: {error.strerror}") from error
    except FipaError:
        raise
    except ODD as error:
        raise FipaError("run.json is damaged or only half written") from error


def _pairs(directory: Path, config: dict[str, Any]) -> Iterator[Pair]:
    seeds = [int(seed) for seed in config["seeds"]]
    if len(set(seeds)) < len(seeds):
        raise FipaError("run.json repeats a seed")
    warmup = config.get("warmup")
    end = int(warmup["rounds"]) if warmup else 0
    arms = [(str(arm["name"]), int(arm.get("rounds") or config["rounds"]), arm.get("start")) for arm in config["arms"]]
    begins = [end if start is None else int(start) for _, _, start in arms]
    if warmup and any(begins):
        for seed in seeds:
            yield Pair(str(warmup["name"]), seed, warmup_folder(directory, seed) / HISTORY, end, 0)
    for place, ((name, rounds, _), after) in enumerate(zip(arms, begins, strict=True)):
        for seed in seeds:
            yield Pair(name, seed, arm_folder(directory, place, name, seed) / HISTORY, rounds, after)


def _guess(config: dict[str, Any]) -> dict[str, str]:
    """The metric of a run of an older version, which did not say it at its start."""
    return ACCURACY if config["problem"]["name"] in ("images", "head", "digits") else ERROR
