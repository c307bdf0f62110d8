"""The figure of `bench.scaling`: seconds and memory of the server by number of clients."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fipa.report.style import BRIGHT, GREY

Rows = list[dict[str, Any]]
LINES = {
    ("paper", "20"): (BRIGHT[1], "paper's rule,\nrank 20"),
    ("paper", "4"): (BRIGHT[4], "paper's rule,\nrank 4"),
    ("additive", "40"): (BRIGHT[0], "additive,\nwidth 40"),
    ("additive", "8"): (BRIGHT[2], "additive,\nwidth 8"),
}
Place = tuple[tuple[int, int], str, str]  # of a label: offset in points, and which part of it is there
LEFT: Place = ((-7, 0), "right", "bottom")
RIGHT: Place = ((7, 0), "left", "center")
BELOW: Place = ((7, -4), "left", "top")
MIDDLE: Place = ((-9, 0), "right", "center")
TICKS = {0.1: "0.1 s", 1: "1 s", 10: "10 s", 100: "100 s"}


def read(results: Path) -> Rows:
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(results: Path) -> Path:
    """Next to the csv."""
    rows = read(results)
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, rows, "seconds", "server's time for a round, one core")
    left.set_yticks(list(TICKS), list(TICKS.values()))
    _panel(right, rows, "peak_mib", "server's peak memory")
    right.set_yticks([2**6, 2**8, 2**10, 2**12, 2**14], ["64 MiB", "256 MiB", "1 GiB", "4 GiB", "16 GiB"])
    out = results.with_suffix(".png")
    figure.savefig(out, dpi=200)
    return out


def _panel(axes: Axes, rows: Rows, key: str, title: str) -> None:
    for (rule, size), (colour, label) in LINES.items():
        own = [row for row in rows if (row["rule"], row["size"]) == (rule, size) and row[key]]
        own.sort(key=lambda row: int(row["clients"]))
        x, y = [int(row["clients"]) for row in own], [float(row[key]) for row in own]
        sure = sum(row["measured"] == "yes" for row in own)  # what was not measured comes last
        axes.plot(x[:sure], y[:sure], "o-", color=colour, markersize=5, linewidth=1.8)
        if sure < len(x):
            axes.plot(x[sure - 1 :], y[sure - 1 :], ":", color=colour, linewidth=1.5)
            axes.plot(x[sure:], y[sure:], "o", color=colour, markerfacecolor="white", markersize=6)
        place = RIGHT if rule == "additive" else LEFT
        if (rule, size) == ("paper", "4"):
            place = MIDDLE if key == "seconds" else BELOW
        _label(axes, label, (x[sure - 1], y[sure - 1]), place, colour)
    if key == "peak_mib" and any(row["measured"] == "no" for row in rows):
        last = max((row for row in rows if row["measured"] == "no"), key=lambda row: float(row[key]))
        _label(axes, "open: computed,\nnot measured", (int(last["clients"]), float(last[key])), MIDDLE, GREY)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([10, 100, 1000])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("clients of the round", fontsize=9.5)
    axes.set_title(title, fontsize=10.5)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(axes: Axes, text: str, point: tuple[float, float], place: Place, colour: str) -> None:
    offset, ha, va = place
    axes.annotate(text, point, offset, textcoords="offset points", color=colour, fontsize=9, ha=ha, va=va)
