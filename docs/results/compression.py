"""Accuracy against bytes on Flower: `python docs/results/compression.py` runs what compression.csv lacks, and draws.

The arms of `fipa run digits` on a grid in this process, with matrices sent as float32, bfloat16 or int8: ten rounds of
warm-up and five of each rule. FedAvg with its own learning rate goes on to round 55, which takes as many bytes as rank
30 with int8. Bytes are those of the encoded replies of all rounds, warm-up included.
"""

from __future__ import annotations

import csv
import logging
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt

from fipa.flower.experiment import client_app, run
from fipa.flower.local import LocalGrid
from fipa.report.style import BRIGHT, GREY

FOLDER = Path(__file__).parent
COLUMNS = ("arm", "precision", "rank", "seed", "rounds", "uplink_bytes", "last", "best")
CLIENTS, WARMUP = 20, 10
CUTS = (5, 10, 20, 30, 45)  # rounds after the warm-up at which the long run of FedAvg is written down
SEEDS = (0, 1, 2)
PRECISIONS = ("float32", "bfloat16", "int8")
CONTROLS = ("FedAvg", "FedAvg (lr/10, tuned step)")
FIPAS = [("FIPA completed", "30"), ("FIPA completed", "10"), ("FIPA (paper)", "30"), ("FIPA additive", "60")]
MARKERS = dict(zip(PRECISIONS, "osD", strict=True))
Key = tuple[str, str, str]  # arm, precision, rank
Row = dict[str, Any]


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    file = FOLDER / "compression.csv"
    rows: list[Row] = list(csv.DictReader(file.open())) if file.exists() else []
    done = {(row["arm"], row["precision"], row["rank"], int(row["seed"])) for row in rows}
    keys: list[Key] = [(arm, precision, rank) for arm, rank in FIPAS for precision in PRECISIONS]
    keys += [(arm, "float32", "0") for arm in CONTROLS]
    for key in keys:
        for seed in SEEDS:
            if (*key, seed) not in done:
                rows += measure(key, seed)
                write(file, sorted(rows, key=lambda row: keys.index((row["arm"], row["precision"], row["rank"]))))
    groups = grouped(rows)
    table(groups)
    draw(groups)


def measure(key: Key, seed: int) -> list[Row]:
    """Run an arm; one row, or one for each cut of FedAvg's long run."""
    arm, precision, rank = key
    cuts = CUTS if arm == "FedAvg" else CUTS[:1]
    overrides = [f"rounds={cuts[-1]}"]
    if arm not in CONTROLS:
        overrides.append(f"arms.{arm}.sketch.{'width' if arm == 'FIPA additive' else 'rank'}={rank}")
    _, result = run(LocalGrid(client_app(), CLIENTS), "digits", arm, overrides, seed=seed, precision=precision)
    train, judged = result.train_metrics_clientapp, result.evaluate_metrics_serverapp
    if any(numbers["clients"] != CLIENTS for numbers in train.values()):
        raise SystemExit(f"{key}, seed {seed}: an answer was refused")
    sent = list(accumulate(int(train[k]["uplink-bytes"]) for k in sorted(train)))
    metric = [float(judged[k]["metric"]) for k in sorted(judged)][1:]  # after each round
    rows = []
    for rounds in cuts:
        end = WARMUP + rounds
        numbers = (rounds, sent[end - 1], round(metric[end - 1], 4), round(max(metric[WARMUP:end]), 4))
        rows.append(dict(zip(COLUMNS, (*key, seed, *numbers), strict=True)))
        print(rows[-1], flush=True)
    return rows


def write(file: Path, rows: list[Row]) -> None:
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def grouped(rows: list[Row]) -> dict[tuple[str, str, str, int], list[Row]]:
    """The seeds of each arm, precision, rank and number of rounds that has all of them."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["arm"], row["precision"], row["rank"], int(row["rounds"])].append(row)
    return {key: seeds for key, seeds in groups.items() if len(seeds) == len(SEEDS)}


def spread(rows: list[Row], column: str) -> tuple[float, float]:
    values = [float(row[column]) for row in rows]
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def table(groups: dict[tuple[str, str, str, int], list[Row]]) -> None:
    print("| arm | rank | precision | rounds | MiB up | last round | best round |\n" + "|---" * 7 + "|")
    for (arm, precision, rank, rounds), rows in groups.items():
        last, best = ("{:.1f} ± {:.1f}".format(*spread(rows, column)) for column in ("last", "best"))
        size = spread(rows, "uplink_bytes")[0] / 2**20
        print(f"| {arm} | {rank} | {precision} | {rounds} | {size:.1f} | {last} | {best} |")


def draw(groups: dict[tuple[str, str, str, int], list[Row]]) -> None:
    """Accuracy of the last round against bytes; a line joins what differs in precision only."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=200, layout="constrained")
    lines: dict[tuple[str, str], list[tuple[float, float, float, str]]] = defaultdict(list)
    for (arm, precision, rank, _), rows in groups.items():
        lines[arm, rank].append((spread(rows, "uplink_bytes")[0] / 2**20, *spread(rows, "last"), precision))
    colours = iter(BRIGHT)
    for (arm, rank), points in lines.items():
        control = arm in CONTROLS
        points.sort()
        colour = GREY if control else next(colours)
        x, y, error = ([point[i] for point in points] for i in range(3))
        axes.errorbar(x, y, error, color=colour, lw=1.2, elinewidth=0.8, capsize=2, alpha=0.9)
        for size, value, _, precision in points:
            axes.plot(size, value, "x" if control else MARKERS[str(precision)], color=colour, ms=5)
        name = {"FedAvg": "FedAvg, 15 to 55 rounds", "FIPA additive": f"FIPA additive, width {rank}"}.get(
            arm, arm if control else f"{arm}, rank {rank}"
        )
        axes.plot([], [], color=colour, lw=2 if not control else 0, marker="x" if control else "", label=name)
    for precision, marker in MARKERS.items():
        axes.plot([], [], marker, color="black", ms=5, label=precision)
    axes.set_xscale("log")
    ticks = (1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("MiB sent by the clients in all")
    axes.set_ylabel("accuracy of the last round, %")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(FOLDER / "compression.png")


if __name__ == "__main__":
    main()
