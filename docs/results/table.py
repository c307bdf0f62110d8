"""The table of docs/pde.md from runs: `python docs/results/table.py runs/pde-bratu runs/poisson-2d ...`.

For each run: the last error of FedAvg's arms and of FIPA's, median and range over the seeds, and how many times FIPA's
error is below the best that any FedAvg arm had reached **on the same seed**, within as many rounds or seconds.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

Curves = dict[str, Any]


def main(directories: list[str]) -> None:
    columns = ["experiment", "arm", "rounds", "last round, median [range]", "seconds", "MiB up", "peak MiB"]
    columns += ["equal rounds", "equal seconds"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for directory in directories:
        results = json.loads((Path(directory) / "results.json").read_text())
        arms: dict[str, dict[str, Curves]] = results["arms"]
        controls = [seeds for name, seeds in arms.items() if name.startswith("FedAvg")]
        for place, (name, seeds) in enumerate(arms.items()):
            last = [curves["metric"][-1] for curves in seeds.values()]
            cells = [f"`{results['experiment']}`" if place == 0 else "", name]
            cells += [str(max(len(curves["metric"]) for curves in seeds.values())), spread(last)]
            cells.append(f"{median(sum(curves['seconds']) for curves in seeds.values()):.0f}")
            cells.append(f"{median(sum(curves['uplink_bytes']) for curves in seeds.values()) / 2**20:.1f}")
            cells.append(f"{max(max(curves['peak_memory_mib']) for curves in seeds.values()):.0f}")
            if name.startswith("FIPA") and controls:
                cells += [worst_ratio(seeds, controls, "round"), worst_ratio(seeds, controls, "seconds")]
            else:
                cells += ["", ""]
            print("| " + " | ".join(cells) + " |")


def spread(values: list[float]) -> str:
    text = f"{median(values):.1e}"
    return text if len(values) == 1 else f"{text} [{min(values):.1e}, {max(values):.1e}]"


def worst_ratio(seeds: dict[str, Curves], controls: list[dict[str, Curves]], budget: str) -> str:
    """Of the seeds' ratios, median and smallest."""
    ratios = []
    for seed, curves in seeds.items():
        spent = list(accumulate(curves["seconds"]))[-1] if budget == "seconds" else len(curves["metric"])
        reached = []
        for control in controls:
            other = control[seed]
            costs = accumulate(other["seconds"]) if budget == "seconds" else range(1, len(other["metric"]) + 1)
            reached += [value for value, cost in zip(other["metric"], costs, strict=True) if cost <= spent]
        ratios.append(min(reached, default=curves["initial_metric"]) / curves["metric"][-1])
    return f"{median(ratios):.0f}x (at least {min(ratios):.0f}x)"


if __name__ == "__main__":
    main(sys.argv[1:])
