"""The tables of a shared basis in docs/vision.md: `python docs/results/shared.py NAME RUN...` from runs of `fipa run`.

For each arm, mean and standard deviation over the seeds: the last round, the mean of the last five, the mean of the
last ten models, and bytes up and down per client that was asked, as multiples of a FedAvg update. RUN@50 takes the
first 50 rounds of a run. Every seed goes to docs/results/NAME.csv, with the best and the mean of the first 15 rounds,
which is what the paper's Table 1 has; rows that are there already and in none of the runs stay. Below the table: by how
much "FIPA shared basis" is ahead of each other arm, of both the better of the last five and of the mean of models,
paired by seed, with a 95 % interval.

`python docs/results/shared.py --reach LEVEL RUN...` prints when the mean of the last ten models of each arm and seed
reaches an accuracy, and what a client that was asked in every round would have sent and been sent until then.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

from tables import HERE, interval, read, spread, write

import fipa

COLUMNS = (
    "arm", "seed", "after", "initial", "rounds", "last", "last_5", "averaged", "best", "best_15", "mean_15", "up_p",
    "down_p", "trips", "seconds",
)  # fmt: skip
PAPER = 15  # rounds of refinement in the paper
OURS = "FIPA shared basis"


def rows(results: fipa.Results, rounds: int | None = None) -> list[dict[str, Any]]:
    """One for each arm and seed that is finished; of its first rounds only, if so wished."""
    found, size = [], _update_bytes(results)
    for arm, seeds in results.content["arms"].items():
        for seed, run in seeds.items():
            if run["status"] != "finished":
                continue
            run = {name: series[:rounds] if isinstance(series, list) else series for name, series in run.items()}
            metric = [value for value in run["metric"] if value is not None]
            asked = [len(clients) for clients in run["clients"]]
            averaged = [value for value in run["averaged_metric"] if value is not None]
            shares = {
                name: sum(run[f"{way}link_bytes"]) / max(asked) / size  # rules that ask nobody twice have idle rounds
                for name, way in (("up_p", "up"), ("down_p", "down"))
            }
            found.append(
                {"arm": arm, "seed": int(seed), "after": run["after"], "initial": run["initial_metric"],
                 "rounds": len(metric), "last": metric[-1],
                 "last_5": round(statistics.mean(metric[-5:]), 3), "averaged": averaged[-1], "best": max(metric),
                 "best_15": max(metric[:PAPER]), "mean_15": round(statistics.mean(metric[:PAPER]), 3),
                 **{name: round(value, 2) for name, value in shares.items()}, "trips": sum(run["trips"]),
                 "seconds": round(sum(run["seconds"]), 1)}
            )  # fmt: skip
    return found


def _update_bytes(results: fipa.Results) -> int:
    """Those of what is trained: of all parameters, or of those of a head."""
    arms = results.content["arms"].items()
    finished = ((arm, int(seed)) for arm, seeds in arms for seed, run in seeds.items() if run["status"] == "finished")
    return next((results.theta(arm, seed).nbytes for arm, seed in finished), 0)


def main(name: str, directories: list[str]) -> None:
    """Print the table, and write the CSV."""
    file = HERE / f"{name}.csv"
    found = {(row["arm"], row["seed"]): row for row in read(file)}
    for directory in directories:
        place, _, cut = directory.partition("@")
        new = rows(fipa.Results.load(place), int(cut) if cut else None)
        found |= {(row["arm"], row["seed"]): row for row in new}
    write(file, COLUMNS, (found[key] for key in sorted(found)))
    arms: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for (arm, seed), row in sorted(found.items()):
        arms[arm][seed] = row
    print("| arm | seeds | rounds | last | last 5 | mean of the last 10 models | up, p | down, p | seconds |")
    print("|---" * 9 + "|")
    for arm, seeds in arms.items():
        cells = [spread([row[key] for row in seeds.values()]) for key in ("last", "last_5", "averaged")]
        costs = [statistics.mean(row[key] for row in seeds.values()) for key in ("up_p", "down_p", "seconds")]
        print(f"| {arm} | {len(seeds)} | {next(iter(seeds.values()))['rounds']} | " + " | ".join(cells), end=" | ")
        print(f"{costs[0]:.1f} | {costs[1]:.0f} | {costs[2]:.0f} |")
    ours = arms.get(OURS, {})
    for arm, seeds in arms.items():
        pairs = [(ours[seed], row) for seed, row in seeds.items() if seed in ours]
        if arm != OURS and len(pairs) > 1:
            gains = [max(b["last_5"], b["averaged"]) - max(a["last_5"], a["averaged"]) for b, a in pairs]
            gain, half = interval(gains)
            print(f"{OURS} above {arm}: {gain:+.2f} ± {half:.2f} ({len(gains)} seeds)")


def reach(level: float, directories: list[str]) -> None:
    """Print rounds and bytes up to an accuracy."""
    for directory in directories:
        results = fipa.Results.load(directory)
        size = _update_bytes(results)
        for arm, seeds in results.content["arms"].items():
            for seed, run in seeds.items():
                rounds = next((k for k, value in enumerate(run["averaged_metric"], 1) if (value or 0) >= level), None)
                asked = [len(clients) for clients in run["clients"]]
                up, down = (
                    sum(b / n / size for b, n in zip(run[f"{way}link_bytes"][:rounds], asked, strict=False))
                    for way in ("up", "down")
                )
                told = f"{rounds} rounds, {up:.0f} p up, {down:.0f} p down" if rounds else "not reached"
                print(f"{arm}, seed {seed}, {level}: {told}")


if __name__ == "__main__":
    if sys.argv[1] == "--reach":
        reach(float(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1], sys.argv[2:])
