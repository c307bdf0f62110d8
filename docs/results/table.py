"""The table of docs/pde.md from runs: `python docs/results/table.py [--keep] runs/pde-bratu ...`.

For each run: the last error of each arm, median and range over the seeds; and how many times the error of FIPA's arms
is below the best that any FedAvg arm had reached **on the same seed** within as many rounds, and within as many
seconds. Where the one stopped earlier, the other is cut to that budget.

--keep also writes every arm and seed to docs/results/EXPERIMENT.csv; rows there that are in none of the runs stay.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from tables import HERE, read, write

Curves = dict[str, Any]


def main(directories: list[str]) -> None:
    columns = ["experiment", "arm", "rounds", "last round, median [range]", "seconds", "MiB up", "peak MiB"]
    columns += ["equal rounds", "equal seconds"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for directory in directories:
        results = json.loads((Path(directory) / "results.json").read_text())
        arms = {name: done for name, seeds in results["arms"].items() if (done := finished(seeds))}
        controls = [seeds for name, seeds in arms.items() if name.startswith("FedAvg")]
        for place, (name, seeds) in enumerate(arms.items()):
            last = [curves["metric"][-1] for curves in seeds.values()]
            cells = [f"`{results['experiment']}`" if place == 0 else "", name]
            cells += [str(max(len(curves["metric"]) for curves in seeds.values())), spread(last)]
            cells.append(f"{median(sum(curves['seconds']) for curves in seeds.values()):.0f}")
            cells.append(f"{median(sum(curves['uplink_bytes']) for curves in seeds.values()) / 2**20:.1f}")
            peaks = [peak for curves in seeds.values() for peak in curves["peak_memory_mib"] if peak is not None]
            cells.append(f"{max(peaks):.0f}" if peaks else "")
            if name.startswith("FIPA") and controls:
                cells += [ratios(seeds, controls, "rounds"), ratios(seeds, controls, "seconds")]
            else:
                cells += ["", ""]
            print("| " + " | ".join(cells) + " |")


def keep(directory: str) -> None:
    """The rows of a run's summary, in place of those of the same arms and seeds."""
    rows = [row for row in read(Path(directory) / "summary.csv") if row["status"] == "finished"]
    file = HERE / f"{json.loads((Path(directory) / 'results.json').read_text())['experiment']}.csv"
    kept = {(row["arm"], row["seed"]): row for row in [*read(file), *rows]}
    write(file, list(dict.fromkeys(column for row in kept.values() for column in row)), kept.values())


def finished(seeds: dict[str, Curves]) -> dict[str, Curves]:
    """Those that have come to their end; an error for one that diverged."""
    lost = [seed for seed, curves in seeds.items() if curves["status"] == "diverged"]
    if lost:
        raise SystemExit(f"seed {lost[0]} diverged, and has no last error")
    return {seed: curves for seed, curves in seeds.items() if curves["status"] == "finished"}


def spread(values: list[float]) -> str:
    text = f"{median(values):.1e}"
    return text if len(values) == 1 else f"{text} [{min(values):.1e}, {max(values):.1e}]"


def ratios(seeds: dict[str, Curves], controls: list[dict[str, Curves]], budget: str) -> str:
    """Over the seeds, median and smallest, at the largest budget that the arm and some control have both used up."""
    found = []
    for seed, curves in seeds.items():
        others = [control[seed] for control in controls]
        limit = min(costs(curves, budget)[-1], max(costs(other, budget)[-1] for other in others))
        own = within(curves, budget, limit)
        reached = [value for other in others for value in within(other, budget, limit)]
        if own and reached:
            found.append(min(reached) / own[-1])
    return f"{median(found):.0f}x (at least {min(found):.0f}x)" if len(found) == len(seeds) else "none"


def costs(curves: Curves, budget: str) -> list[float]:
    return list(accumulate(curves["seconds"] if budget == "seconds" else [1] * len(curves["metric"])))


def within(curves: Curves, budget: str, limit: float) -> list[float]:
    """The errors after every round up to a limit."""
    pairs = zip(curves["metric"], costs(curves, budget), strict=True)
    return [value for value, cost in pairs if cost <= limit and value is not None]


if __name__ == "__main__":
    runs = [argument for argument in sys.argv[1:] if argument != "--keep"]
    main(runs)
    if "--keep" in sys.argv:
        for run in runs:
            keep(run)
