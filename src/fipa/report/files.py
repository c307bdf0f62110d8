"""A run directory, read and checked.

`results.json` holds what was measured, `views.json` (optional) what the final models look like. Both stay plain
dictionaries; what this module guarantees is that every key the report needs is there with the right shape.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fipa.errors import FipaError
from fipa.federation.record import NUMBERS, SERIES

FORMAT = "fipa-results-1"
GAP = "gap"  # to the reference's parameters: the one series that is not of a round's record
DEFAULTS: dict[str, Any] = {
    "fipa": "unknown",
    "experiment": "run",
    "title": "",
    "description": "",
    "command": "",
    "config_toml": "",
    "control": None,
    "reference": None,
    "figure": "generic",
}


def load_results(run: Path) -> dict[str, Any]:
    """Read and check `run/results.json`; arms without any round are left out."""
    path = Path(run) / "results.json"
    return check_results(_read(path), path)


def check_results(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """The results with every key that the report needs, of the right shape; `path` is for errors."""
    if results.get("format") != FORMAT:
        raise FipaError(f"{path}: format is {results.get('format')!r}, this version of fipa reads {FORMAT!r}")
    for key, value in DEFAULTS.items():
        results.setdefault(key, value)
    results["title"] = results["title"] or results["experiment"]
    metric = {"name": "metric", "goal": "min", "scale": "linear"} | dict(results.get("metric") or {})
    if metric["goal"] not in ("min", "max") or metric["scale"] not in ("log", "linear"):
        raise FipaError(f"{path}: metric needs goal min or max and scale log or linear, not {metric}")
    results["metric"] = metric
    arms = results.get("arms")
    if not isinstance(arms, dict):
        raise FipaError(f"{path}: 'arms' is missing or not an object")
    for arm, seeds in arms.items():
        if not isinstance(seeds, dict):
            raise FipaError(f"{path}: arm {arm!r} is not an object of seeds")
        for seed, record in seeds.items():
            _check_record(record, f"{path}: arm {arm!r}, seed {seed}")
    results["arms"] = with_rounds(arms)
    _check_warmup(results, path)
    if not results["arms"]:
        raise FipaError(f"{path}: no arm has finished a round yet; there is nothing to report")
    return results


def with_rounds(arms: dict[str, Any]) -> dict[str, Any]:
    """The arms and seeds that have finished a round."""
    kept = {arm: {s: r for s, r in seeds.items() if r["metric"]} for arm, seeds in arms.items()}
    return {arm: seeds for arm, seeds in kept.items() if seeds}


def load_views(run: Path) -> dict[str, Any]:
    """Read `run/views.json`; empty if there is none. A target may be null; a view without any values is left out."""
    path = Path(run) / "views.json"
    if not path.exists():
        return {}
    views = _read(path)
    needed = {"curves": ("x", "target", "arms"), "maps": ("extent", "target", "arms")}
    for view, keys in needed.items():
        missing = [key for key in keys if key not in views.get(view, dict.fromkeys(keys))]
        if missing:
            raise FipaError(f"{path}: {view} lacks {', '.join(missing)}")
        content = views.get(view, {"target": None, "arms": {}})
        values = {"its target": content["target"]} if content["target"] is not None else content["arms"]
        first, shape = next(((name, np.shape(value)) for name, value in values.items()), ("", ()))
        for arm, value in content["arms"].items():
            if np.shape(value) != shape:
                raise FipaError(f"{path}: {view} of arm {arm!r} has shape {np.shape(value)}, {first} {shape}")
        if not values:
            views.pop(view, None)
    regions = views.get("curves", {}).get("regions", [])
    if regions and not isinstance(regions[0], list):  # the edges between the clients, as older runs have them
        views["curves"]["regions"] = [list(pair) for pair in pairwise(regions)]
    _check_shares(views, path)
    return views


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except FileNotFoundError:
        raise FipaError(f"{path} does not exist: {path.parent} is not a run directory") from None
    except ValueError as error:
        raise FipaError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise FipaError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _check_warmup(results: dict[str, Any], path: Path) -> None:
    """A warm-up that has not finished a round is as good as none."""
    warmup = results.pop("warmup", None)
    if warmup is None:
        return
    if not isinstance(warmup, dict) or not isinstance(warmup.get("seeds"), dict):
        raise FipaError(f"{path}: 'warmup' needs an object of seeds")
    for seed, record in warmup["seeds"].items():
        _check_record(record, f"{path}: warm-up, seed {seed}")
    seeds = with_rounds({"": warmup["seeds"]}).get("")
    if seeds:
        results["warmup"] = {"name": "warm-up", **warmup, "seeds": seeds}


def _check_shares(views: dict[str, Any], path: Path) -> None:
    """Counts of clients by classes, and a name for every class; without a client or a class the view is left out."""
    if "shares" not in views:
        return
    shares = views["shares"]
    if "counts" not in shares:
        raise FipaError(f"{path}: shares lacks counts")
    try:
        counts = np.asarray(shares["counts"], dtype=float)
    except ValueError:
        raise FipaError(f"{path}: counts of shares are not a table of numbers") from None
    classes = shares.get("classes") or [str(k) for k in range(counts.shape[-1])]
    if counts.size and (counts.ndim != 2 or counts.shape[1] != len(classes)):
        raise FipaError(f"{path}: counts of shares must be clients x {len(classes)} classes, not {counts.shape}")
    if counts.size:
        views["shares"] = {"counts": np.nan_to_num(counts).astype(int).tolist(), "classes": [str(c) for c in classes]}
    else:
        del views["shares"]


def _check_record(record: Any, where: str) -> None:
    if not isinstance(record, dict) or not isinstance(record.get("metric"), list):
        raise FipaError(f"{where}: 'metric' is missing or not a list")
    rounds = len(record["metric"])
    after = record.get("after") or 0
    if not isinstance(after, int) or after < 0:
        raise FipaError(f"{where}: 'after' must be a number of rounds, not {after!r}")
    for key in (*SERIES, GAP):
        values = record.get(key) or []
        if not isinstance(values, list):
            raise FipaError(f"{where}: {key!r} is not a list")
        # The reference may have fewer rounds than the arm that is compared with it.
        complete = len(values) <= rounds if key == GAP else len(values) in (0, rounds)
        if not complete:
            raise FipaError(f"{where}: {key!r} must be a list with one entry for each of {rounds} rounds")
        if key in (*NUMBERS, GAP) and not all(v is None or isinstance(v, (int, float)) for v in values):
            raise FipaError(f"{where}: {key!r} holds something that is not a number")
