"""The tables of docs/vision.md from runs: `python docs/results/vision.py runs/cifar10-cnn8k runs/cifar10-silo ...`.

For each run and arm: best round, mean of all rounds, mean of the last five, mean and standard deviation over the
seeds, and the paired difference of the means to the control with its standard error. With `--paper`, one line per run
instead, beside the numbers of the paper's Table 1.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from fipa.report.data import summary
from fipa.report.scores import Spread

# paper's Table 1: model and alpha -> FedAvg max, FIPA max, FedAvg mean, FIPA mean
PAPER = {
    ("cnn8k", 0.01): (44.09, 54.08, 38.80, 50.42),
    ("cnn8k", 0.05): (47.76, 56.68, 44.41, 53.05),
    ("cnn8k", 0.1): (54.08, 58.74, 48.16, 56.33),
    ("cnn8k", 0.3): (57.37, 59.83, 52.63, 58.56),
    ("cnn23k", 0.01): (51.12, 60.66, 45.63, 56.49),
    ("cnn23k", 0.05): (57.46, 62.89, 52.32, 59.93),
    ("cnn207k", 0.05): (68.07, 72.58, 65.14, 71.03),
    ("resnet20", 0.05): (61.45, 68.19, 56.66, 64.80),
}
BESIDE = ("FedAvg", "FedAvg (lr/10)", "FedAvg (lr/10, tuned step)", "FIPA (paper)", "FIPA completed")


def main(arguments: list[str]) -> None:
    directories = [argument for argument in arguments if not argument.startswith("--")]
    runs = [json.loads((Path(directory) / "results.json").read_text("utf-8")) for directory in directories]
    if "--paper" in arguments:
        beside_the_paper(runs)
    else:
        for results in runs:
            table(results)


def table(results: dict[str, Any]) -> None:
    print(f"\n`{results['command']}`\n")
    print("| arm | max | mean | last 5 | mean, above the control | MiB up | seconds |\n" + "|---" * 7 + "|")
    for arm in summary(results):
        assert arm.scores is not None
        paired = arm.scores.against_control
        versus = ""
        if paired is not None and arm.arm != results["control"] and math.isfinite(arm.scores.mean.mean):
            versus = f"{paired.value:+.2f} ± {paired.standard_error:.2f}"
        cells = [arm.arm, *(plus_minus(s) for s in (arm.scores.best, arm.scores.mean, arm.scores.tail)), versus]
        print("| " + " | ".join([*cells, f"{arm.uplink_bytes / 2**20:.1f}", f"{arm.seconds:.0f}"]) + " |")


def beside_the_paper(runs: list[dict[str, Any]]) -> None:
    print("| model, alpha | seeds | | paper FedAvg | paper FIPA | " + " | ".join(BESIDE) + " |")
    print("|---" * (5 + len(BESIDE)) + "|")
    for results in runs:
        problem = results["config"]["problem"]
        key = (problem["model"], problem["partition"]["alpha"])
        arms = {arm.arm: arm for arm in summary(results)}
        for place, score in enumerate(("best", "mean")):
            paper = [f"{PAPER[key][2 * place + i]:.2f}" for i in range(2)] if key in PAPER else ["", ""]
            ours = [plus_minus(getattr(arms[name].scores, score)) if name in arms else "" for name in BESIDE]
            seeds = str(len(arms[BESIDE[0]].seeds))
            lead = [f"{key[0]}, {key[1]}" if place == 0 else "", seeds, "max" if place == 0 else "mean"]
            print("| " + " | ".join([*lead, *paper, *ours]) + " |")


def plus_minus(spread: Spread) -> str:
    if not math.isfinite(spread.mean):
        return "diverged"
    return f"{spread.mean:.2f}" if spread.seeds == 1 else f"{spread.mean:.2f} ± {spread.std:.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
