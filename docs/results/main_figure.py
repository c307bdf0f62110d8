"""The figure of README and Start: `python docs/results/main_figure.py` draws accuracy against bytes from the CSVs.

A point for each arm: the better of the last five rounds and of the mean of the last models, mean and standard deviation
over the seeds, against what a client sent in all rounds, in units of a model. The open ring is the same with what was
sent to the client added.
"""

from __future__ import annotations

import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tables import HERE, read

OURS = "FIPA shared basis"
PANELS = (
    ("cifar10-silo-shared-0.05.csv", "10 clients, all in every round\nCNN-8k, 12 rounds after 40 of FedAvg", (8, 1100)),
    ("table1-cnn23k-0.05.csv", "5 of 100 clients per round\nCNN-23k, 50 rounds after 1000 of FedAvg", (12, 1100)),
)
ARMS = {  # colours that colour-blind readers tell apart
    OURS: "#d4002a",
    "FIPA controlled": "#b3541e",
    "L-BFGS (server)": "#e69f00",
    "SCAFFOLD": "#cc79a7",
    "FedVARP": "#009e73",
    "FedAdam": "#0072b2",
    "FedAvgM": "#56b4e9",
    "FedAvg": "#7f7f7f",
}
TICKS = (10, 30, 100, 300, 1000)


def points(file: str) -> dict[str, tuple[float, float, float, float]]:
    """By arm: accuracy, its deviation, numbers sent, and sent and received."""
    found = {}
    rows = read(HERE / file)
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        if len(own) < 2:
            continue
        best = max(("last_5", "averaged"), key=lambda name: statistics.mean(row[name] for row in own))
        values = [row[best] for row in own]
        up, down = (statistics.mean(row[name] for row in own) for name in ("up_p", "down_p"))
        found[arm] = statistics.mean(values), statistics.stdev(values), up, up + down
    return found


def main() -> None:
    """Draw both panels."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "fipa", "svg.fonttype": "path"})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, (file, title, limits) in zip(panels, PANELS, strict=True):
        for arm, (mean, deviation, up, total) in points(file).items():
            colour, size = ARMS[arm], 9 if arm == OURS else 6
            axes.plot([up, total], [mean, mean], color=colour, linewidth=1, alpha=0.5)
            axes.plot(total, mean, "o", markersize=size - 1, markerfacecolor="white", color=colour)
            axes.errorbar(
                up, mean, deviation, fmt="o", markersize=size, color=colour, capsize=2, linewidth=1, label=arm
            )
        axes.set(xscale="log", xlim=limits, xlabel="models per client: sent (dot), sent and received (ring)")
        axes.set_xticks(TICKS, map(str, TICKS))
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.25)
        axes.margins(y=0.12)
        axes.legend(fontsize=7.5, loc="center right", frameon=False)
    panels[0].set_ylabel("test accuracy on CIFAR-10, %")
    figure.tight_layout()
    figure.savefig(HERE.parent / "main.png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
