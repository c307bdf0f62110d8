"""Synthetic run directories: plausible curves without any training."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

METRIC = {"name": "test MSE", "goal": "min", "scale": "log"}
MACHINE = {"python": "3.11.7", "torch": "2.8.0", "cpu": "Example CPU", "threads": 1, "workers": 1}


def record(metric: list[float | None], *, initial: float | None = 0.5, seconds: float = 0.1, **extra: Any) -> dict:
    """One seed with the given metrics and constant everything else."""
    rounds = len(metric)
    constant = {
        "loss": metric,
        "seconds": [seconds] * rounds,
        "uplink_bytes": [2**20] * rounds,
        "downlink_bytes": [2**19] * rounds,
        "rank": [0] * rounds,
        "ranks": [[0, 0]] * rounds,
        "local_steps": [[200, 200]] * rounds,
        "clients": [[0, 1]] * rounds,
        "damping": [None] * rounds,
        "step": [1.0] * rounds,
        "trials": [1] * rounds,
        "accepted": [True] * rounds,
        "step_length": [0.1] * rounds,
        "cosine_with_fedavg": [1.0] * rounds,
        "events": [],
        "spectra": {},
    }
    return {"status": "finished", "initial_metric": initial, "metric": metric, **constant, **extra}


def results(arms: dict[str, dict[str, dict]], **changes: Any) -> dict[str, Any]:
    """The dictionary of results.json around the arms."""
    return {
        "format": "fipa-results-1",
        "fipa": "0.2.0",
        "experiment": "fit-sin2",
        "title": "sin(2 pi x) from two halves",
        "description": "Two clients hold half of the domain each and fit one network together.",
        "command": "fipa run fit-sin2 --seeds 0,1,2",
        "config": {"rounds": 30},
        "config_toml": 'rounds = 30\n\n[problem]\nname = "sine"\n',
        "metric": dict(METRIC),
        "control": "FedAvg",
        "reference": None,
        "figure": "fit1d",
        "machine": MACHINE,
        "arms": arms,
        **changes,
    }


def write(directory: Path, content: dict[str, Any], views: dict[str, Any] | None = None) -> Path:
    """Write a run directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(content))
    if views is not None:
        (directory / "views.json").write_text(json.dumps(views))
    return directory


def decay(rate: float, floor: float, rounds: int, seed: int, start: float = 0.5) -> list[float]:
    """A noisy geometric decay to a floor."""
    noise = np.exp(0.15 * np.random.default_rng(seed).standard_normal(rounds))
    return ((start * rate ** np.arange(1, rounds + 1) + floor) * noise).tolist()


def full(seeds: int = 3, rounds: int = 30) -> dict[str, Any]:
    """Every feature at once: spectra, schedules, step control, a gap, a diverging arm and events."""
    arms: dict[str, dict[str, dict]] = {
        name: {} for name in ("FedAvg", "FIPA low rank", "FIPA adaptive", "FIPA as published", "centralised GN")
    }
    k = np.arange(1, rounds + 1)
    for seed in range(seeds):
        falling = [10.0 ** -np.arange(0, 6 + 2 * c, 0.4 + 0.1 * c) for c in range(2)]
        spectra = {str(r): {str(c): (values / r).tolist() for c, values in enumerate(falling)} for r in (1, rounds)}
        arms["FedAvg"][str(seed)] = record(decay(0.97, 0.1, rounds, seed), cosine_with_fedavg=[1.0] * rounds)
        arms["FIPA low rank"][str(seed)] = record(
            decay(0.75, 2e-4, rounds, 10 + seed),
            seconds=0.3,
            rank=[20.0] * rounds,
            ranks=[[20, 20]] * rounds,
            uplink_bytes=[6 * 2**20] * rounds,
            spectra=spectra,
            gap=(0.8 / k * np.exp(0.1 * np.sin(k + seed))).tolist(),
            cosine_with_fedavg=(0.4 + 0.3 * np.sin(k / 5)).tolist(),
        )
        steps = [[int(20 * 1.2**r), int(min(200, 30 * 1.25**r))] for r in range(rounds)]
        ranks = [[5 + r // 3, 8 + r // 2] for r in range(rounds)]
        arms["FIPA adaptive"][str(seed)] = record(
            decay(0.65, 3e-6, rounds, 20 + seed),
            seconds=0.4,
            rank=[float(np.mean(r)) for r in ranks],
            ranks=ranks,
            local_steps=steps,
            damping=(0.1 * 0.85**k).tolist(),
            trials=[3 if r % 7 == 0 else 1 for r in k.tolist()],
            accepted=[r % 9 != 0 for r in k.tolist()],
            uplink_bytes=[int(2**18 * sum(r)) for r in ranks],
            spectra=spectra,
            gap=(0.5 / k**1.2).tolist(),
            events=[{"round": r, "client": 1, "text": f"local steps {999 + r} clamped to 200"} for r in k.tolist()],
        )
        broken = [float(0.5 * 3**r) for r in range(5)]
        arms["FIPA as published"][str(seed)] = (
            record([*broken, None], status="diverged", events=[{"round": 6, "client": None, "text": "loss not finite"}])
            if seed == 0
            else record([0.6 + 0.1 * r for r in range(rounds)], rank=[20.0] * rounds)
        )
        arms["centralised GN"][str(seed)] = record(decay(0.6, 1e-7, rounds, 30 + seed), seconds=0.2)
    return results(arms, reference="centralised GN")


def views() -> dict[str, Any]:
    """Fitted curves and maps of the arms of `full`."""
    x = np.linspace(0, 1, 201)
    grid_x, grid_y = np.meshgrid(np.linspace(-1, 1, 60), np.linspace(-1, 1, 40))
    target = np.exp(-4 * ((grid_x - 0.4) ** 2 + grid_y**2)) + np.exp(-6 * ((grid_x + 0.5) ** 2 + (grid_y - 0.3) ** 2))
    sizes = {"FedAvg": 0.2, "FIPA low rank": 1e-2, "FIPA adaptive": 1e-3}
    return {
        "curves": {
            "title": "fit after the last round",
            "x_label": "x",
            "y_label": "u(x)",
            "x": x.tolist(),
            "target": np.sin(2 * np.pi * x).tolist(),
            "arms": {arm: (np.sin(2 * np.pi * x) + e * np.cos(9 * x)).tolist() for arm, e in sizes.items()},
            "regions": [[0, 0.5], [0.5, 1]],
        },
        "maps": {
            "title": "Gaussian mixture",
            "extent": [-1, 1, -1, 1],
            "target": target.tolist(),
            "arms": {arm: (target + e * np.sin(3 * grid_x) * np.cos(2 * grid_y)).tolist() for arm, e in sizes.items()},
            "boxes": [[-1, 0, -1, 1], [0, 1, -1, 1]],
        },
    }


def pde_results(figure: str, seeds: int = 2, rounds: int = 20) -> dict[str, Any]:
    """A PDE run: the best arm of all is centralised, and memory was measured."""
    rates = {"FedAvg": (0.97, 0.1), "FIPA low rank": (0.75, 2e-4), "FIPA": (0.65, 3e-6), "centralised": (0.6, 1e-7)}
    arms = {
        arm: {
            str(seed): record(decay(rate, floor, rounds, seed), peak_memory_mib=[200.0 + seed + 40 * place] * rounds)
            for seed in range(seeds)
        }
        for place, (arm, (rate, floor)) in enumerate(rates.items())
    }
    config = {"arms": [{"name": arm, "centralised": arm == "centralised"} for arm in rates]}
    title = "A partial differential equation"
    return results(
        arms,
        figure=figure,
        experiment=figure,
        title=title,
        config=config,
        metric=METRIC | {"name": "relative L2 error"},
    )


def pde_views(clients: int = 3) -> dict[str, Any]:
    """Solutions of the arms of `pde_results`, on a line and on a rectangle that is not square."""
    x = np.linspace(0, 1, 201)
    t, y = np.meshgrid(np.linspace(0, 1, 50), np.linspace(-1, 1, 70))
    line, plane = np.sin(np.pi * x) + 0.3 * np.sin(6 * np.pi * x), np.exp(-2 * t) * np.sin(np.pi * y)
    sizes = {"FedAvg": 0.2, "FIPA low rank": 1e-2, "FIPA": 1e-4, "centralised": 1e-6}
    edges = np.linspace(0, 1, clients + 1).tolist()
    return {
        "curves": {
            "title": "solution after the last round",
            "x_label": "x",
            "y_label": "u",
            "x": x.tolist(),
            "target": line.tolist(),
            "target_label": "exact solution",
            "arms": {arm: (line + e * np.sin(np.pi * x) * np.cos(9 * x)).tolist() for arm, e in sizes.items()},
            "regions": [list(pair) for pair in pairwise(edges)],
            "error": True,
        },
        "maps": {
            "title": "solution after the last round",
            "x_label": "t",
            "y_label": "y",
            "extent": [0, 1, -1, 1],
            "target": plane.tolist(),
            "target_label": "exact solution",
            "arms": {arm: (plane + e * np.sin(3 * y) * np.cos(2 * t)).tolist() for arm, e in sizes.items()},
            "boxes": [[left, right, -1, 1] for left, right in pairwise(edges)],
        },
    }


ACCURACY = {"name": "test accuracy, %", "goal": "max", "scale": "linear"}


def climb(start: float, end: float, rounds: int, seed: int) -> list[float]:
    """A noisy way up from one accuracy to another."""
    noise = 0.4 * np.random.default_rng(seed).standard_normal(rounds)
    way = 1 - 0.7 ** np.arange(1, rounds + 1)
    return np.round(start + (end - start) * way + noise, 2).tolist()


def warm_up(seeds: int = 3, rounds: int = 1000, every: int = 50) -> dict[str, Any]:
    """FedAvg from a fresh model, measured in every so many rounds."""
    found = {}
    for seed in range(seeds):
        way = 10 + 33 * (1 - np.exp(-np.arange(1, rounds + 1) / (rounds / 3))) + 0.4 * seed
        metric = [round(float(v), 2) if r % every == 0 else None for r, v in enumerate(way, 1)]
        found[str(seed)] = record(metric, initial=10.0, loss=(3 - way / 20).tolist())
    return {"name": "warm-up", "rounds": rounds, "seeds": found}


def refined(start: dict[str, Any], seed: int, end: float, *, after: int = 1000, rounds: int = 15, **extra: Any) -> dict:
    """An arm that goes on from a warm-up."""
    initial = start["seeds"][str(seed)]["metric"][after - 1]
    return record(climb(initial, end, rounds, seed + int(100 * end)), initial=initial, after=after, **extra)


def images(seeds: int = 3, rounds: int = 15) -> dict[str, Any]:
    """A run in two stages: all arms go on from round 1000, and one of them diverges on its last seed."""
    start = warm_up(seeds)
    ends = {"FedAvg": 46.0, "FedProx": 46.4, "FIPA": 57.3, "FIPA, 200 eigenpairs": 55.0, "FedFisher": 50.0}
    arms = {
        arm: {str(s): refined(start, s, end + 0.5 * s, rounds=rounds, loss=[1.0] * rounds) for s in range(seeds)}
        for arm, end in ends.items()
    }
    broken = refined(start, seeds - 1, 30.0, rounds=3, status="diverged", loss=[1.0, 2.0, None])
    broken["metric"] = [*broken["metric"][:2], None]
    arms["FedFisher"][str(seeds - 1)] = broken
    changes = {"metric": dict(ACCURACY), "figure": "refine", "experiment": "cifar10", "warmup": start}
    return results(arms, title="CIFAR-10, 10 clients, Dirichlet 0.1", **changes)


def from_different_rounds(seeds: int = 2) -> dict[str, Any]:
    """An ablation over the length of the warm-up."""
    start = warm_up(seeds)
    arms = {
        f"{name} (from {after})": {
            str(s): refined(start, s, 30 + gain * after**0.5 + s, after=after) for s in range(seeds)
        }
        for after in (100, 300, 1000)
        for name, gain in (("FedAvg", 0.45), ("FIPA", 0.8))
    }
    changes = {"metric": dict(ACCURACY), "figure": "ablation", "experiment": "lengths", "warmup": start}
    return results(arms, control="FedAvg (from 1000)", **changes)


def shares(clients: int = 10, classes: int = 10, seed: int = 0) -> dict[str, Any]:
    """Classes shared out by a Dirichlet distribution."""
    rng = np.random.default_rng(seed)
    parts = rng.dirichlet([0.1] * clients, size=classes) * (50_000 // classes)
    return {
        "shares": {
            "counts": parts.T.astype(int).tolist(),
            "classes": [f"class {k}" for k in range(classes)],
            "arms": {},
        }
    }
