"""Figures of runs on images: a warm-up and its refinement, an ablation over its length, and the clients' classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fipa.report import panels, stages
from fipa.report.axes import of_figures
from fipa.report.data import ArmSummary, Results, summary
from fipa.report.scores import Spread
from fipa.report.stages import Start, WarmUp
from fipa.report.style import GREY, Style, arm_styles

BLUES = LinearSegmentedColormap.from_list("shares", ["#dbe8f4", "#5b9bd0", "#0b3c7d"])  # as in images.js


def refine(results: Results, views: dict[str, Any], styles: dict[str, Style]) -> Figure:
    """The arms against bytes and rounds, then the warm-up that they start from; the best one first in the legend."""
    found = stages.warm_up(results)
    against = [key for key in of_figures(results) if key != "seconds"]
    widths = [2.0] * len(against) + ([1.2] if found else [])
    figure = Figure(figsize=(2.2 + 2.2 * sum(widths), 4.4), layout="constrained")
    axes: list[Axes] = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0].tolist()
    for place, x in zip(axes, against, strict=False):
        panels.metric_curves(place, results, styles, x)
        place.margins(x=0.02)
        if place is not axes[0]:
            place.sharey(axes[0])
            place.set_ylabel("")
        if found:
            place.set_title("refinement", fontsize=10)
    if found:
        warm_up_lines(axes[-1], results, found)
        axes[-1].set_ylabel("")
    seeds = max(map(len, results["arms"].values()))
    title = f"median and range\nover {seeds} seeds" if seeds > 1 else None
    handles, labels = axes[against.index("rounds")].get_legend_handles_labels()
    lines = dict(zip(labels, handles, strict=True))
    order = {panels.plain(s.arm): f"\n({s.status})" if s.diverged else "" for s in _best_first(results)}
    order |= {name: "" for name in lines if name not in order}  # the means of the last models
    figure.legend(
        [lines[name] for name in order],
        [name + end for name, end in order.items()],
        title=title,
        loc="outside right center",
        fontsize=8,
        title_fontsize=8,
        alignment="left",
        frameon=False,
    )
    return figure


def ablation(results: Results, views: dict[str, Any], styles: dict[str, Style]) -> Figure:
    """The best and the mean metric of every family of arms over the round of the warm-up that it starts from."""
    families = stages.ablation(results)
    control = None if results["control"] is None else stages.family(results["control"])
    looks = arm_styles(list(families), [control])
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    left, right = np.ravel(np.asarray(figure.subplots(1, 2, sharey=True), dtype=object)).tolist()
    _family_lines(left, {name: [(s.after, s.best) for s in found] for name, found in families.items()}, looks)
    _family_lines(right, {name: [(s.after, s.mean) for s in found] for name, found in families.items()}, looks)
    for axes in (left, right):
        _initial_line(axes, [start for found in families.values() for start in found])
        axes.set_xlabel("rounds of the warm-up")
        axes.set_xticks(stages.starts(results)[:8] or [0])
        panels.tidy(axes)
    left.set_ylabel(panels.plain(results["metric"]["name"]))
    best = "highest" if results["metric"]["goal"] == "max" else "lowest"
    left.set_title(f"{best} of the arm's rounds", fontsize=10)
    right.set_title("mean of the arm's rounds", fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    seeds = max(map(len, results["arms"].values()))
    title = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else None
    look: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=min(4, len(labels)), **look)
    return figure


def warm_up(results: Results) -> Figure | None:
    """The warm-up alone; None if there was none."""
    found = stages.warm_up(results)
    if found is None:
        return None
    figure = Figure(figsize=(5.0, 3.6), layout="constrained")
    warm_up_lines(figure.subplots(), results, found)
    return figure


def warm_up_lines(axes: Axes, results: Results, found: WarmUp) -> None:
    """One thin line per seed and their mean; dotted where arms start before the last round."""
    if len(found.seeds) > 1:
        for line in found.seeds.values():
            seen = ~np.isnan(line)
            axes.plot(found.rounds[seen], line[seen], color=GREY, linewidth=0.6, alpha=0.7)
    label = f"mean of {len(found.seeds)} seeds" if len(found.seeds) > 1 else "warm-up"
    marker = "." if len(found.rounds) < 3 else ""
    axes.plot(found.rounds, found.mean, color="black", linewidth=1.3, marker=marker, label=label)
    for start in stages.starts(results):
        if start < found.rounds[-1]:
            axes.axvline(start, color=GREY, linestyle=":", linewidth=1)
    axes.set_title("warm-up" if len(found.seeds) == 1 else f"warm-up, {label}", fontsize=10)
    axes.set_yscale(results["metric"]["scale"])
    axes.set_xlabel("communication round")
    axes.set_ylabel(panels.plain(results["metric"]["name"]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    panels.tidy(axes)


def partition(view: dict[str, Any]) -> Figure:
    """How many examples of each class (rows) each client (columns) holds, below the clients' totals."""
    counts = np.asarray(view["counts"]).T
    classes, clients = counts.shape
    size = (min(12.0, max(5.2, 2.2 + 0.5 * clients)), 2.0 + min(8.0, max(2.4, 0.32 * min(classes, 25))))
    figure = Figure(figsize=size, layout="constrained")
    above, main = np.ravel(
        np.asarray(figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2.5, size[1] - 2)]), dtype=object)
    ).tolist()
    above.bar(np.arange(clients), counts.sum(axis=0), color=GREY, width=0.8)
    above.set_ylabel("examples", fontsize=8)
    above.tick_params(labelsize=8)
    panels.tidy(above)
    highest = max(1, int(counts.max()))
    shown = np.ma.masked_equal(counts, 0)  # a class that the client does not have stays white
    norm = PowerNorm(0.5, vmin=0, vmax=highest)  # roots, so that small counts are seen
    image = main.imshow(shown, aspect="auto", cmap=BLUES, norm=norm, interpolation="nearest")
    if max(counts.shape) <= stages.NUMBERS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                dark = math.sqrt(count / highest) > 0.6
                main.text(column, row, count, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    if classes <= stages.NAMES:
        main.set_yticks(np.arange(classes), [panels.plain(name) for name in view["classes"]], fontsize=8)
    else:
        main.set_ylabel("class")
        main.yaxis.set_major_locator(MaxNLocator(integer=True))
    main.set_xlabel("client")
    main.xaxis.set_major_locator(MaxNLocator(nbins=min(20, clients), integer=True))
    main.set_title(stages.shares_note(view["counts"]), fontsize=8, loc="left")
    figure.colorbar(image, ax=main, label="examples of the class", pad=0.01)
    return figure


def _best_first(results: Results) -> list[ArmSummary]:
    sign = -1 if results["metric"]["goal"] == "max" else 1
    return sorted(summary(results), key=lambda s: (math.isnan(s.final_median), sign * s.final_median))


def _family_lines(axes: Axes, lines: dict[str, list[tuple[int, Spread]]], looks: dict[str, Style]) -> None:
    """Means over the seeds; bars: standard deviation."""
    for name, points in lines.items():
        kept = [(x, spread) for x, spread in points if math.isfinite(spread.mean)]
        bars = [0.0 if math.isnan(spread.std) else spread.std for _, spread in kept]
        axes.errorbar(
            [x for x, _ in kept],
            [spread.mean for _, spread in kept],
            yerr=bars if any(bars) else None,
            color=looks[name].colour,
            linestyle=panels.DASHES[looks[name].dash],
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.5,
            label=panels.plain(name),
        )


def _initial_line(axes: Axes, found: list[Start]) -> None:
    """The model that the arms start from."""
    at = {start.after: start.initial for start in found if math.isfinite(start.initial)}
    if at:
        rounds = sorted(at)
        values = [at[r] for r in rounds]
        axes.plot(rounds, values, "kx:", linewidth=1.2, markersize=4, label="at the start")
