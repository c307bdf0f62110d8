"""The tables of a shared basis in docs/vision.md: `python docs/results/shared.py NAME RUN...` from runs of `fipa run`.

For each arm, mean and standard deviation over the seeds: the last round, the mean of the last five, the mean of the
last ten models, and bytes up and down per client that was asked, as multiples of a FedAvg update. Every seed goes to
docs/results/NAME.csv.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

COLUMNS = ("arm", "seed", "rounds", "last", "last_5", "averaged", "best", "up_p", "down_p", "trips", "seconds")


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each arm and seed that is finished."""
    found = []
    for arm, seeds in results["arms"].items():
        for seed, run in seeds.items():
            if run["status"] != "finished":
                continue
            metric = [value for value in run["metric"] if value is not None]
            asked = [len(clients) for clients in run["clients"]]
            size = _update_bytes(results)
            averaged = [value for value in run["averaged_metric"] if value is not None]
            shares = {
                name: sum(b / n / size for b, n in zip(run[f"{way}link_bytes"], asked, strict=True))
                for name, way in (("up_p", "up"), ("down_p", "down"))
            }
            found.append(
                {"arm": arm, "seed": int(seed), "rounds": len(metric), "last": metric[-1],
                 "last_5": round(statistics.mean(metric[-5:]), 3), "averaged": averaged[-1], "best": max(metric),
                 **{name: round(value, 2) for name, value in shares.items()}, "trips": sum(run["trips"]),
                 "seconds": round(sum(run["seconds"]), 1)}
            )  # fmt: skip
    return found


def _update_bytes(results: dict[str, Any]) -> int:
    """A model's bytes: what the warm-up, which is FedAvg, sent down in a round to each client."""
    run = next(iter(results["warmup"]["seeds"].values()))
    return run["downlink_bytes"][0] // len(run["clients"][0])


def main(name: str, directories: list[str]) -> None:
    """Print the table, and write the CSV."""
    found = []
    for directory in directories:
        found += rows(json.loads((Path(directory) / "results.json").read_text("utf-8")))
    with (Path(__file__).parent / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(found, key=lambda row: (row["arm"], row["seed"])))
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        arms[row["arm"]].append(row)
    print("| arm | seeds | rounds | last | last 5 | mean of the last 10 models | up, p | down, p | seconds |")
    print("|---" * 9 + "|")
    for arm, seeds in arms.items():
        cells = [_spread([row[key] for row in seeds]) for key in ("last", "last_5", "averaged")]
        costs = [statistics.mean(row[key] for row in seeds) for key in ("up_p", "down_p", "seconds")]
        print(f"| {arm} | {len(seeds)} | {seeds[0]['rounds']} | " + " | ".join(cells), end=" | ")
        print(f"{costs[0]:.1f} | {costs[1]:.0f} | {costs[2]:.0f} |")


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
