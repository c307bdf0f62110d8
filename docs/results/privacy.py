"""The table and the figure of docs/privacy.md from a run: `python docs/results/privacy.py runs/private-digits`.

Writes private-digits.csv and private-digits.png beside this file, and prints the table. Of each arm: the epsilon that
`fipa.privacy` finds for its noise, its rate of participation and its rounds, and the accuracy of the last five rounds,
mean and standard deviation over the seeds.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tables import HERE, write

from fipa.privacy import epsilon
from fipa.report.data import summary

DELTA = 1e-3  # half of 1 / 479 clients
COLOURS = {"FedAvg": "tab:blue", "FIPA": "tab:orange"}
COLUMNS = ("arm", "rule", "noise", "epsilon", "delta", "seeds", "last5_mean", "last5_std", "last_mean", "last_std")


def main(directory: str) -> None:
    results = json.loads((Path(directory) / "results.json").read_text("utf-8"))
    rows = table(results)
    write(HERE / "private-digits.csv", COLUMNS, rows)
    print("| arm | noise | epsilon | last 5 rounds | last round |\n" + "|---" * 5 + "|")
    for row in rows:
        scores = [f"{row[f'{key}_mean']} ± {row[f'{key}_std']}" for key in ("last5", "last")]
        print("| " + " | ".join([row["arm"], str(row["noise"]), str(row["epsilon"]), *scores]) + " |")
    figure(rows, HERE / "private-digits.png")


def table(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per arm; noise is empty for rules that promise nothing."""
    config = results["config"]
    settings = {arm["name"]: arm for arm in config["arms"]}
    rows = []
    for arm in summary(results):
        assert arm.scores is not None
        said = settings[arm.arm]
        noise = said["rule"].get("noise", "")
        rate = said["participation"].get("count", config["problem"]["clients"]) / config["problem"]["clients"]
        spent = epsilon(noise, rate, arm.rounds, DELTA) if noise != "" else math.inf
        scores = {"last5": arm.scores.tail, "last": arm.scores.last}
        rows.append(
            {"arm": arm.arm, "rule": said["rule"]["name"], "noise": noise, "epsilon": round(spent, 2), "delta": DELTA}
            | {"seeds": len(arm.seeds)}
            | {f"{key}_mean": round(spread.mean, 2) for key, spread in scores.items()}
            | {f"{key}_std": round(spread.std, 2) for key, spread in scores.items()}
        )
    return rows


def figure(rows: list[dict[str, Any]], file: Path) -> None:
    """Accuracy against epsilon; dashed lines: clipped without noise; dotted: no privacy."""
    fig, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, colour in COLOURS.items():
        own = [row for row in rows if name in row["arm"]]
        noisy = sorted((row for row in own if row["noise"]), key=lambda row: row["epsilon"])
        x, y, bars = ([row[key] for row in noisy] for key in ("epsilon", "last5_mean", "last5_std"))
        axes.errorbar(x, y, bars, color=colour, marker="o", capsize=3, label=f"private {name}")
        for row in own:
            if not row["noise"]:
                clipped = row["noise"] == 0
                label = f"{name}, {'clipped, no noise' if clipped else 'no privacy'}"
                axes.axhline(row["last5_mean"], color=colour, linestyle="--" if clipped else ":", label=label)
    axes.set(xscale="log", xlabel=f"epsilon (delta = {DELTA:g})", ylabel="accuracy in %, mean of the last 5 rounds")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    fig.savefig(file, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
