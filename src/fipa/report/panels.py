"""The panels of the figures: each function draws one thing into one matplotlib axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from fipa.report import axes as x_axes
from fipa.report import statistics
from fipa.report.data import Record, Results, after, averaged, averaged_name, metric_table, series_band
from fipa.report.payload import (
    CLIENTS,
    NUMBERED,
    by_client,
    client_places,
    error_range,
    label_rows,
    square,
    value_range,
    view_errors,
    view_values,
)
from fipa.report.style import BRIGHT, GREY, Style

DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
AVERAGED: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.8}  # the means of the last models


def metric_curves(axes: Axes, results: Results, styles: dict[str, Style], x: str) -> None:
    """Median and range over seeds of the metric against one of `axes.AXES`; thin: the mean of the last models."""
    means = averaged(results)
    for arm, style in styles.items():
        values = metric_table(results, arm)
        places = x_axes.places(results, arm, x)
        if places is None:
            continue
        band = statistics.band(values)
        seen = ~np.isnan(band.median)  # a line goes on over rounds in which nothing was measured
        seen &= places > 0 if x_axes.AXES[x].log else True
        places, band = places[seen], statistics.Band(band.median[seen], band.low[seen], band.high[seen])
        median = _drawable(band.median)
        marks = "." if np.isfinite(median).sum() < 3 else ""  # a line of one point is invisible
        reference = arm == results["reference"]  # others may lie right on it: dashed, and on top
        dash, order = ((0, (3, 2)), 3) if reference else (DASHES[style.dash], 2)
        axes.plot(
            places,
            median,
            color=style.colour,
            linestyle=dash,
            marker=marks,
            label=plain(arm),
            linewidth=1.6,
            zorder=order,
        )
        if len(values) > 1:
            inside = np.isfinite(band.low) & np.isfinite(band.high)
            axes.fill_between(places, band.low, band.high, where=inside, color=style.colour, alpha=0.18, linewidth=0)
        if arm in means["arms"]:
            mean = statistics.band(metric_table(means, arm)).median[seen]
            axes.plot(places, _drawable(mean), color=style.colour, zorder=order, **AVERAGED)
    if means["arms"]:
        axes.plot([], [], color=GREY, label=averaged_name(results), **AVERAGED)
    axes.set_yscale(results["metric"]["scale"])
    warm = x != "rounds" and any(after(results, arm) for arm in styles)
    axes.set_xlabel(x_axes.AXES[x].title + (f"\n{x_axes.SINCE}" if warm else ""))
    axes.set_ylabel(plain(results["metric"]["name"]))
    if x == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x_axes.AXES[x].log:
        _log_of_bytes(axes)
    tidy(axes)


def reference_slope(axes: Axes, results: Results) -> None:
    """A dashed line through the decreasing part of the reference arm, with its slope in the legend."""
    reference = results["reference"]
    if reference not in results["arms"]:
        return
    line = statistics.geometric_slope(_drawable(statistics.band(metric_table(results, reference)).median).tolist())
    if line is None:
        return
    rounds = np.arange(line.first, line.last + 1)
    factor = math.exp(line.slope)
    label = f"slope of {plain(reference)}: factor {factor:.3g} per round"
    fitted = np.exp(line.intercept + line.slope * rounds)
    axes.plot(rounds + after(results, reference), fitted, "k--", linewidth=1.3, label=label)


def gap_curves(axes: Axes, results: Results, styles: dict[str, Style]) -> None:
    """The gap to the reference with its c/K guide; the measured exponents stand in the legend."""
    for arm, style in styles.items():
        band = series_band(results, arm, "gap")
        if band is None:
            continue
        gap = band.median.tolist()
        rounds = np.arange(1, len(gap) + 1)
        line = statistics.power_law(gap)
        exponent = f": measured exponent {line.slope:.2f}" if line else ""
        axes.plot(rounds, _drawable(band.median), color=style.colour, label=f"{plain(arm)}{exponent}", linewidth=1.6)
        guide = statistics.inverse_guide(gap, line.first if line else 0)
        if math.isfinite(guide):
            axes.plot(
                rounds, guide / rounds, color=style.colour, linestyle=":", label=f"{guide:.2g} / K", linewidth=1.2
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("communication round K")
    axes.set_ylabel("gap to the reference parameters")
    tidy(axes)


def client_lines(axes: Axes, records: dict[str, Record], key: str, label: str) -> None:
    """A per-client schedule against the round; one dash per arm, one colour per client (the first twenty)."""
    for dash, (arm, record) in zip(("-", "--", ":", "-.") * len(records), records.items(), strict=False):
        for index, (client, values) in enumerate(list(by_client(record, key).items())[:CLIENTS]):
            name = f"client {client}" if len(records) == 1 else f"{plain(arm)}, client {client}"
            line = np.array([math.nan if v is None else v for v in values])
            colour = BRIGHT[index % len(BRIGHT)]
            rounds = np.arange(1, len(line) + 1) + int(record.get("after") or 0)
            axes.plot(rounds, line, color=colour, linestyle=dash, marker=".", label=name)
    axes.set_xlabel("communication round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)


def fitted_curves(axes: Axes, view: dict[str, Any], styles: dict[str, Style]) -> None:
    """The arms' functions over the target, if there is one; the clients' regions are shaded in turn."""
    _arm_lines(axes, view, view["arms"], styles)
    if view["target"] is not None:
        label = plain(view.get("target_label", "target"))
        axes.plot(view["x"], view["target"], color="black", linestyle=":", label=label, linewidth=1.3)
    axes.set_ylabel(plain(view.get("y_label", "u(x)")))
    axes.margins(x=0, y=0.12)


def error_curves(axes: Axes, view: dict[str, Any], styles: dict[str, Style]) -> None:
    """The arms' pointwise errors, over the same regions."""
    errors = view_errors(view)
    rows = _arm_lines(axes, view, {arm: 10.0**error for arm, error in errors.items()}, styles)
    low, high = error_range(errors.values())
    axes.set_yscale("log")
    axes.set_ylim(10.0**low, 10.0 ** (high + 0.12 * rows * (high - low)))  # room for the names of the clients
    axes.margins(x=0)
    axes.set_ylabel("pointwise error")


def target_map(axes: Axes, view: dict[str, Any]) -> ScalarMappable:
    """The target with the clients' boxes."""
    return _solution(axes, view, view["target"], plain(view.get("target_label", "target")))


def box_names(axes: Axes, view: dict[str, Any]) -> None:
    """The clients' numbers in their boxes."""
    boxes = client_places(view.get("boxes", []))
    x0, x1, *_ = view["extent"]
    corners: list[tuple[float, float]] = []
    for (left, right, _, top), name in boxes.items() if len(boxes) <= NUMBERED else ():
        axes.annotate(
            name,
            (left, top),
            xytext=(3, -3 - 12 * corners.count((left, top))),
            textcoords="offset points",
            rotation=90 if right - left < 0.2 * (x1 - x0) else 0,  # across, it would run into the next box
            va="top",
            color="white",
            fontsize=7,
            bbox={"facecolor": "black", "alpha": 0.45, "linewidth": 0, "pad": 1.2},
        )
        corners.append((left, top))


def solution_map(axes: Axes, view: dict[str, Any], arm: str) -> ScalarMappable:
    """The final model of one arm in the colours of the target, or of all arms if there is none."""
    return _solution(axes, view, view["arms"][arm], plain(arm))


def error_map(axes: Axes, view: dict[str, Any], arm: str, limits: tuple[float, float]) -> ScalarMappable:
    """The pointwise error of one arm as a power of ten."""
    error = view_errors(view)[arm]
    return _image(axes, view, error, f"error of {plain(arm)}", cmap="cividis", vmin=limits[0], vmax=limits[1])


def plain(text: str) -> str:
    """Text from the data: a dollar sign in it does not start a formula."""
    return text.replace("$", r"\$")


def tidy(axes: Axes) -> None:
    """A light grid, no box."""
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _arm_lines(axes: Axes, view: dict[str, Any], lines: dict[str, Any], styles: dict[str, Style]) -> int:
    """Lines over the clients' regions; returns the rows that the names of the clients take."""
    regions = client_places(view.get("regions", []))
    middles = [(left + right) / 2 for left, right in regions]
    rows = label_rows(middles, view["x"][-1] - view["x"][0])
    for index, ((left, right), name) in enumerate(regions.items()):
        axes.axvspan(left, right, color="black", alpha=0.1 if index % 2 == 0 else 0.03, zorder=0, linewidth=0)
        if len(regions) <= NUMBERED:
            height, edge = 0.98 - 0.07 * rows[index], axes.get_xaxis_transform()
            axes.text(middles[index], height, name, transform=edge, ha="center", va="top", fontsize=8)
    for arm, values in lines.items():
        style = styles.get(arm, Style(GREY, "solid"))
        axes.plot(view["x"], values, color=style.colour, linestyle=DASHES[style.dash], label=plain(arm), linewidth=1.5)
    axes.set_xlabel(plain(view.get("x_label", "x")))
    tidy(axes)
    return 1 + max(rows, default=0)


def _solution(axes: Axes, view: dict[str, Any], values: Any, title: str) -> ScalarMappable:
    low, high = value_range(view_values(view))
    return _image(axes, view, np.asarray(values, dtype=float), title, cmap="viridis", vmin=low, vmax=high)


def _image(axes: Axes, view: dict[str, Any], values: statistics.Array, title: str, **colours: Any) -> ScalarMappable:
    aspect: Literal["equal", "auto"] = "equal" if square(view["extent"]) else "auto"
    image = axes.imshow(values, origin="lower", extent=tuple(view["extent"]), aspect=aspect, **colours)
    for x0, x1, y0, y1 in client_places(view.get("boxes", [])):
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="white", linewidth=0.9))
    axes.set_xlabel(plain(view.get("x_label", "x")))
    axes.set_ylabel(plain(view.get("y_label", "y")))
    axes.set_title(title, fontsize=10, wrap=True)
    return image


def _log_of_bytes(axes: Axes) -> None:
    """A log axis with plain numbers, also between the powers of ten where it spans few of them."""
    if not math.isfinite(axes.dataLim.minposx):
        axes.set_xlim(0.1, 1)  # nothing is drawn, and matplotlib can make no log axis of that
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))


def _drawable(values: Sequence[float] | statistics.Array) -> statistics.Array:
    return np.where(np.isfinite(values), values, np.nan)
