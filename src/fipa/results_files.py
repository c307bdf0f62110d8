"""What a run leaves in its directory besides checkpoints: results.json, summary.csv and views.json."""

from __future__ import annotations

import csv
import math
import platform
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
import torch
from torch import Tensor

from fipa import __version__
from fipa.config.schema import dump
from fipa.federation.problem import Curves, Maps, Picture, Problem, Shares
from fipa.federation.record import SERIES
from fipa.federation.storage import Saved, write_json
from fipa.kernels.small_cnn import COMPILED
from fipa.machine import processor
from fipa.report.files import FORMAT

if TYPE_CHECKING:
    from fipa.runner import Run


def write_results(run: Run, problem: Problem) -> dict[str, Any]:
    """Put all that is on disk of a run into results.json, and a line per arm and seed into summary.csv."""
    results = collect(run, problem)
    write_json(run.directory / "results.json", results)
    _write_summary(run.directory / "summary.csv", results)
    return results


def collect(run: Run, problem: Problem) -> dict[str, Any]:
    """All that is on disk, in one piece."""
    arms: dict[str, dict[str, Any]] = {}
    for arm in run.experiment.arms:
        loaded = {seed: run.folder(arm.name, seed).load() for seed in run.experiment.seeds}
        arms[arm.name] = {str(seed): _curves(run, arm.name, seed, saved) for seed, saved in loaded.items() if saved}
    results = _header(run, problem) | {"arms": arms}
    warmup = run.experiment.warmup
    if warmup is not None and run.starts():
        loaded = {seed: run.folder(warmup.name, seed).load() for seed in run.experiment.seeds}
        seeds = {str(seed): _curves(run, warmup.name, seed, saved) for seed, saved in loaded.items() if saved}
        results["warmup"] = {"name": warmup.name, "rounds": warmup.rounds, "seeds": seeds}
    return results


def metric_of(problem: Problem) -> dict[str, str]:
    """What a problem's metric is called, which way it should go, and on which scale."""
    return {"name": problem.name, "goal": problem.goal, "scale": problem.scale}


def write_views(run: Run, problem: Problem) -> None:
    """Pictures of the final models on the first seed, whose problem this is."""
    picture = problem.picture
    if picture is None:
        return
    fits = {}
    for arm in run.experiment.arms if not isinstance(picture, Shares) else ():
        if arm.params is not None:  # what they trained is not the model that the picture takes
            continue
        saved = run.folder(arm.name, run.experiment.seeds[0]).load()
        if saved is not None:
            with torch.no_grad():
                assert not isinstance(picture, Shares)
                fits[arm.name] = picture.predict(problem.load(saved.state.theta).eval()).tolist()
    write_json(run.directory / "views.json", _view(picture, fits))


def _write_summary(path: Path, results: dict[str, Any]) -> None:
    """Small enough to keep with a paper."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        columns = ["arm", "seed", "status", "rounds", "last", "best", "seconds"]
        sums = ["uplink_bytes", "downlink_bytes", "trips"]
        writer.writerow([*columns, *sums, "mean_rank", "peak_memory_mib", "last_averaged"])
        for arm, seeds in results["arms"].items():
            for seed, run in seeds.items():
                known = [value for value in run["metric"] if value is not None]
                best = (min if results["metric"]["goal"] == "min" else max)(known, default=math.nan)
                rounds = len(run["metric"])
                totals = [
                    f"{sum(run['seconds']):.1f}",
                    *(sum(run[key]) for key in sums),
                    f"{sum(run['rank']) / rounds:.1f}",
                    max((peak for peak in run["peak_memory_mib"] if peak is not None), default=""),
                ]
                last, averaged = run["metric"][-1], run["averaged_metric"][-1]
                writer.writerow([arm, seed, run["status"], rounds, last, best, *totals, averaged])


def _header(run: Run, problem: Problem) -> dict[str, Any]:
    experiment = run.experiment
    return {
        "format": FORMAT,
        "fipa": __version__,
        "experiment": run.name,
        "title": experiment.title or run.name,
        "description": experiment.description.strip(),
        "command": run.command,
        "metric": metric_of(problem),
        "control": experiment.control,
        "reference": experiment.reference,
        "figure": experiment.figure,
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "small networks by": "numba" if COMPILED else "torch",  # which changes the last bits
            "cpu": processor(),
            "threads": experiment.engine.threads,
            "workers": experiment.engine.workers,
        },
        "config": dump(experiment),
        "config_toml": tomli_w.dumps(dump(experiment), multiline_strings=True),
    }


def _curves(run: Run, arm: str, seed: int, saved: Saved) -> dict[str, Any]:
    records = saved.records
    curves: dict[str, Any] = {"status": saved.status, "initial_metric": saved.initial_metric}
    curves["after"] = records[0].round - 1
    rounds = [record.plain() for record in records]
    curves |= {key: [content[key] for content in rounds] for key in SERIES}
    curves["events"] = [event for record in records for event in record.events]
    curves["spectra"] = {str(record.round): record.spectra for record in records if record.spectra}
    reference, arms = run.experiment.reference, {a.name: (a.start, a.params) for a in run.experiment.arms}
    if reference is not None and arm != reference and arms.get(arm) == arms[reference]:
        curves["gap"] = _gap(run, arm, reference, seed, saved.state.theta)
    return curves


def _gap(run: Run, arm: str, reference: str, seed: int, like: Tensor) -> list[float]:
    """Distance of the parameters to the reference's, round by round, relative to the latter's norm."""
    paths = [run.folder(name, seed).thetas for name in (arm, reference)]
    if not all(path.exists() for path in paths):
        return []
    own, other = (np.fromfile(path, like.numpy().dtype) for path in paths)
    rounds = min(len(own), len(other)) // like.numel()
    own, other = (numbers[: rounds * like.numel()].reshape(rounds, -1) for numbers in (own, other))
    return (np.linalg.norm(own - other, axis=1) / np.linalg.norm(other, axis=1)).tolist()


def _view(picture: Picture, fits: dict[str, Any]) -> dict[str, Any]:
    kind = {Curves: "curves", Maps: "maps", Shares: "shares"}[type(picture)]
    values = {field.name: getattr(picture, field.name) for field in fields(picture) if field.name != "predict"}
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
    return {kind: plain | {"arms": fits}}
