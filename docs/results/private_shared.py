"""Does curvature in a shared basis survive noise: `python docs/results/private_shared.py` writes private-shared.csv.

The clients of `fipa run private-digits`: 479 with three images each, 48 of them in each of 24 rounds, from scratch.
At epsilon 3, at epsilon 8 and without noise: private FedAvg of clients that train, as in that experiment; gradient
descent, which is the rule in a shared basis without a share of the budget for matrices; and the rule with them. Its
directions are the sum of s / (s + damping) over the eigenvalues s that are above the noise.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from tables import HERE, write

import fipa
from fipa.privacy import noise_for

SEEDS, ROUNDS, RATE, DELTA = (0, 1, 2), 24, 48 / 479, 1e-3
COLUMNS = ("epsilon", "noise", "arm", "seed", "last5", "last", "directions_mean", "directions_last")
FEDAVG = {"clip": 0.3, "step": 4.0}
DESCENT: dict[str, Any] = {"clip": 1.0, "damping": 0.35, "split": (1.0, 0.0), "memory": {"discount": 0.8}}
CURVED: dict[str, Any] = DESCENT | {"clip_matrix": 5.0, "damping": 0.3, "split": (0.8, 0.2)}


def arms(noise: float) -> dict[str, dict[str, Any]]:
    """The three arms at one noise."""
    gradient = {"local": {"name": "gradient"}}
    more = {"noise": noise, "seed": 1}
    return {
        "private FedAvg": {"rule": {"name": "private-fedavg"} | FEDAVG | more},
        "private gradient descent": gradient | {"rule": {"name": "private-shared-fipa"} | DESCENT | more},
        "private FIPA, shared basis": gradient | {"rule": {"name": "private-shared-fipa"} | CURVED | more},
    }


def measured(target: float) -> list[dict[str, Any]]:
    """A row for each arm and seed; a target of 0 is no noise at all."""
    noise = noise_for(target, RATE, ROUNDS, DELTA) if target else 0.0
    rows = []
    with tempfile.TemporaryDirectory() as out:
        results = fipa.run(
            "private-digits", arms=arms(noise), seeds=SEEDS, out=Path(out) / "run", workers=1, quiet=True,
            set={"control": "private FedAvg"},
        )  # fmt: skip
        for name in arms(noise):
            for seed, run in results.content["arms"][name].items():
                metric, ranks = run["metric"], [rank or 0.0 for rank in run["effective_rank"]]
                known = ranks if "FedAvg" not in name else [0.0]
                rows.append(
                    {"epsilon": target or "none", "noise": round(noise, 3), "arm": name, "seed": int(seed)}
                    | {"last5": round(statistics.mean(metric[-5:]), 2), "last": round(metric[-1], 2)}
                    | {"directions_mean": round(statistics.mean(known), 2), "directions_last": round(known[-1], 2)}
                )
    return rows


def main() -> None:
    """Measure all, print a table, and write the CSV as it grows."""
    rows: list[dict[str, Any]] = []
    print(
        "| epsilon | arm | last 5 rounds | last round | directions, mean | in the last round |\n" + "|---" * 6 + "|",
        flush=True,
    )
    for target in (3.0, 8.0, 0.0):
        found = measured(target)
        rows += found
        for name in dict.fromkeys(row["arm"] for row in found):
            own = [row for row in found if row["arm"] == name]
            scores = [[row[key] for row in own] for key in ("last5", "last")]
            cells = [f"{statistics.mean(one):.1f} ± {statistics.stdev(one):.1f}" for one in scores]
            cells += [
                f"{statistics.mean(row[key] for row in own):.1f}" for key in ("directions_mean", "directions_last")
            ]
            print(f"| {own[0]['epsilon']} | {name} | " + " | ".join(cells) + " |", flush=True)
        write(HERE / "private-shared.csv", COLUMNS, rows)


if __name__ == "__main__":
    main()
