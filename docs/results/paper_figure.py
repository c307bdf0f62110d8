"""Table 1 and Fig. 4 as figures: `python docs/results/paper_figure.py` writes table1.png and fig4.png from the CSVs."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import paper_warmups as warmups
from paper_cells import ALPHAS, MEAN, MODELS, OURS, PAPERS, SHORTER, best_control, cell, differences
from tables import HERE

# arm, colour (Okabe and Ito's, told apart by everybody) and marker
STYLES = {
    "FedAvg": ("#999999", "o"), "best control": ("#0072B2", "s"), PAPERS: ("#E69F00", "^"), OURS: ("#009E73", "D"),
}  # fmt: skip


def main() -> None:
    table_1()
    figure_4()


def figure_4() -> None:
    """Fig. 4: the best of 15 rounds by the round that they begin at, and how far that is above FedAvg."""
    cases = warmups.run()
    figure, axes = plt.subplots(2, len(cases), figsize=(5.2 * len(cases), 6.4), squeeze=False, layout="constrained")
    colours = zip((warmups.PLAIN, warmups.CONTROL, warmups.PAPERS, warmups.OURS), STYLES.values(), strict=True)
    for rule, (colour, marker) in colours:
        for place, (model, alpha) in enumerate(cases):
            arms, starts = warmups.panel(model, alpha), list(warmups.STARTS)
            names = [f"{rule} (from {start})" for start in starts]
            plain = [f"{warmups.PLAIN} (from {start})" for start in starts]
            best = [[row["best_15"] for row in arms[name].values()] for name in names]
            gains = [differences(arms, name, other, "best_15") for name, other in zip(names, plain, strict=True)]
            for axis, values in zip(axes[:, place], (best, gains), strict=True):
                spread = [stdev(some) if len(some) > 1 else 0.0 for some in values]
                axis.errorbar(
                    range(len(starts)), list(map(mean, values)), spread, fmt=f"{marker}-", color=colour, capsize=3,
                    label={warmups.PAPERS: PAPERS}.get(rule, rule),
                )  # fmt: skip
                axis.set_xticks(range(len(starts)), list(map(str, starts)))
                axis.grid(axis="y", alpha=0.3)
            axes[0][place].set_title(f"{MODELS[model]}, alpha {alpha}")
            axes[1][place].set_xlabel("rounds of warm-up")
    axes[0][0].set_ylabel("best of 15 rounds, %")
    axes[1][0].set_ylabel("above FedAvg, points")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(HERE / "fig4.png", dpi=110)


def table_1() -> None:
    """Accuracy over alpha, a panel for each network."""
    models = [model for model in MODELS if any(cell(model, alpha) for alpha in ALPHAS)]
    figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 4), squeeze=False, layout="constrained")
    for axis, model in zip(axes[0], models, strict=True):
        draw(axis, model)
    axes[0][0].set_ylabel("accuracy, mean of 15 rounds, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(HERE / "table1.png", dpi=110)


def draw(axis: Any, model: str) -> None:
    """One network: accuracy over alpha, the paper's as lines, ours as points with their spread."""
    places = range(len(ALPHAS))
    for which, name, dashes in ((0, "paper: FedAvg", (1, 2)), (1, "paper: FIPA", (4, 2))):
        axis.plot(places, [pair[which] for pair in MEAN[model]], color="black", lw=1, dashes=dashes, label=name)
    for offset, (name, (colour, marker)) in enumerate(STYLES.items()):
        shown = []
        for place, alpha in enumerate(ALPHAS):
            arms = cell(model, alpha)
            arm = best_control(arms, "mean_15") if arms and name == "best control" else name
            if arm in arms:
                values = [row["mean_15"] for row in arms[arm].values()]
                shown.append((place, mean(values), stdev(values) if len(values) > 1 else 0.0))
        if shown:
            x, y, spread = zip(*shown, strict=True)
            x = [place + 0.1 * (offset - 1.5) for place in x]
            axis.errorbar(x, y, spread, fmt=marker, color=colour, capsize=3, ms=6, label=name)
    axis.set_title(MODELS[model] + (f", {SHORTER[model]} rounds of warm-up" if model in SHORTER else ""))
    axis.set_xticks(places, [str(alpha) for alpha in ALPHAS])
    axis.set_xlabel("alpha")
    axis.grid(axis="y", alpha=0.3)


if __name__ == "__main__":
    main()
