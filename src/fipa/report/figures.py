"""Figures of a run in the layouts of the paper, as PNG and SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fipa.report import image_figures, panels
from fipa.report.axes import of_figures
from fipa.report.data import Results, best_federated, load_results, load_views, series_band
from fipa.report.payload import by_client, error_range, varies, view_errors
from fipa.report.style import Style, arm_styles
from fipa.report.verdict import in_colour

DPI = 160

Views = dict[str, Any]
Styles = dict[str, Style]


def write_figures(run: Path, out: Path) -> list[Path]:
    """Draw the figure that the run's results ask for into the directory `out`.

    A warm-up that the figure does not show and the partition of the classes get figures of their own, NAME-warm-up and
    NAME-partition. Returns the paths of the PNGs and SVGs, those of the main figure first. Without the data that a
    layout needs (schedules, gaps, views) the panel is left out; an unknown layout is drawn as "generic".
    """
    results, views = load_results(run), load_views(run)
    styles = arm_styles(list(results["arms"]), [results["control"]], in_colour(results))
    figure = LAYOUTS.get(results["figure"], _generic)(results, views, styles)
    drawn = {"": figure}
    if results["figure"] != "refine" and (warm_up := image_figures.warm_up(results)) is not None:
        drawn["-warm-up"] = warm_up
    if shares := views.get("shares"):
        drawn["-partition"] = image_figures.partition(shares)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", results["experiment"])
    return [path for end, figure in drawn.items() for path in _save(figure, results["title"], out, name + end)]


def _save(figure: Figure, title: str, out: Path, name: str) -> list[Path]:
    figure.suptitle(panels.plain(title), fontsize=12, wrap=True)
    FigureCanvasAgg(figure)
    paths = [out / f"{name}.{suffix}" for suffix in ("png", "svg")]
    # Text stays text in the SVG; a fixed salt and no date make it the same file every time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fipa"}):
        figure.savefig(paths[0], dpi=DPI)
        figure.set_layout_engine("none")  # all is in its place: to find that takes longer than to draw it
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _fit1d(results: Results, views: Views, styles: Styles) -> Figure:
    curves = views.get("curves")
    figure, axes = _grid([1, 1] if curves else [1], width=6.4, height=3.4)
    panels.metric_curves(axes[0], results, styles, "seconds")
    if curves:
        panels.fitted_curves(axes[1], curves, styles)
        axes[1].set_title(panels.plain(curves.get("title", "")), fontsize=10)
    _legend_below(figure, axes[-1], axes[0])
    return figure


def _adaptive(results: Results, views: Views, styles: Styles) -> Figure:
    first = {arm: next(iter(seeds.values())) for arm, seeds in results["arms"].items()}
    parts = []
    for key, label in (("local_steps", "local steps"), ("ranks", "rank")):
        moving = {a: r for a, r in first.items() if varies(v for line in by_client(r, key).values() for v in line)}
        if moving:
            parts.append((moving, key, label))
    figure, axes = _grid([1 + len(parts)], width=4.4, height=4.2)
    panels.metric_curves(axes[0], results, styles, "rounds")
    _legend_under(axes[0])
    for place, (records, key, label) in zip(axes[1:], parts, strict=True):
        panels.client_lines(place, records, key, label)
        _legend_under(place)
        place.set_title(
            "first seed" if len(records) > 1 else f"{panels.plain(next(iter(records)))}, first seed", fontsize=10
        )
    return figure


def _gauss_newton(results: Results, views: Views, styles: Styles) -> Figure:
    has_gap = any(series_band(results, arm, "gap") is not None for arm in results["arms"])
    figure, axes = _grid([2 if has_gap else 1], width=5.4, height=4.6)
    panels.metric_curves(axes[0], results, styles, "rounds")
    panels.reference_slope(axes[0], results)
    _legend_under(axes[0])
    if has_gap:
        panels.gap_curves(axes[1], results, styles)
        _legend_under(axes[1])
    return figure


def _pde1d(results: Results, views: Views, styles: Styles) -> Figure:
    curves = views.get("curves")
    pictures = 0 if not curves else 1 if curves["target"] is None else 2
    figure, axes = _grid([2, pictures] if pictures else [2], width=5.6, height=3.3)
    for place, x in zip(axes, ("rounds", "seconds"), strict=False):
        panels.metric_curves(place, results, styles, x)
    if curves:
        panels.fitted_curves(axes[2], curves, styles)
        if pictures > 1:
            panels.error_curves(axes[3], curves, styles)
        axes[2].set_title(panels.plain(curves.get("title", "")), fontsize=10)
    _legend_below(figure, *axes[2:3], axes[0])
    return figure


def _fit2d(results: Results, views: Views, styles: Styles) -> Figure:
    errors = [results["control"], best_federated(results)]
    return _with_maps(results, views, styles, ["seconds"], errors=errors, width=3.6, least=7.2)


def _pde2d(results: Results, views: Views, styles: Styles) -> Figure:
    best = best_federated(results)
    errors = [best, results["control"]]
    return _with_maps(
        results, views, styles, ["rounds", "seconds"], solutions=[best], errors=errors, width=3.6, least=10.8
    )


def _with_maps(
    results: Results,
    views: Views,
    styles: Styles,
    against: list[str],
    *,
    solutions: Sequence[str | None] = (),
    errors: Sequence[str | None],
    width: float,
    least: float,
) -> Figure:
    """The metric above the target, solutions and errors of arms, as far as their final models were kept.

    Without a target, the solutions of all these arms are drawn instead.
    """
    maps = views.get("maps")
    kept = maps["arms"] if maps else {}
    targets = 1 if maps and maps["target"] is not None else 0
    if not targets:
        solutions, errors = list(dict.fromkeys([*solutions, *errors])), []
    solved, wrong = ([arm for arm in arms if arm is not None and arm in kept] for arms in (solutions, errors))
    count = targets + len(solved) + len(wrong)
    rows = [len(against), count] if count else [len(against)]
    figure, axes = _grid(rows, width=width, height=3.2, least=least)
    curves, pictures = axes[: len(against)], axes[len(against) :]
    for place, x in zip(curves, against, strict=True):
        panels.metric_curves(place, results, styles, x)
    curves[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    if maps and pictures:
        values, mistakes = pictures[: targets + len(solved)], pictures[targets + len(solved) :]
        shown = [panels.target_map(place, maps) for place in values[:targets]]
        shown += [panels.solution_map(place, maps, arm) for place, arm in zip(values[targets:], solved, strict=True)]
        panels.box_names(values[0], maps)
        figure.colorbar(shown[0], ax=values)
        logs = view_errors(maps)
        limits = error_range(logs[arm] for arm in wrong)
        images = [panels.error_map(place, maps, arm, limits) for place, arm in zip(mistakes, wrong, strict=True)]
        if images:
            bar = figure.colorbar(images[0], ax=mistakes)
            bar.locator = MaxNLocator(nbins=6, integer=limits[1] - limits[0] >= 2)
            bar.formatter = FuncFormatter(lambda value, _: f"{10.0**value:.0e}")
            bar.update_ticks()
    return figure


def _generic(results: Results, views: Views, styles: Styles) -> Figure:
    against = of_figures(results)
    figure, axes = _grid([len(against)], width=4.2, height=3.8, least=8.4)
    for place, x in zip(axes, against, strict=True):
        panels.metric_curves(place, results, styles, x)
    _legend_below(figure, axes[0])
    return figure


def _grid(rows: list[int], *, width: float, height: float, least: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Rows of axes, each spread over the whole width."""
    figure = Figure(figsize=(max(least, width * max(rows)), height * len(rows) + 0.4), layout="constrained")
    axes: list[Axes] = []
    for part, columns in zip(np.ravel(np.asarray(figure.subfigures(len(rows), 1), dtype=object)), rows, strict=True):
        axes += np.ravel(np.asarray(part.subplots(1, columns), dtype=object)).tolist()
    return figure, axes


def _legend_under(axes: Axes) -> None:
    """The legend of one panel, below it so that it hides no line."""
    labels = axes.get_legend_handles_labels()[1]
    columns = 1 if len(labels) < 4 or max(map(len, labels)) > 40 else 2
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, fontsize=8, frameon=False)


def _legend_below(figure: Figure, *axes: Axes) -> None:
    """One legend for all panels, outside of them."""
    entries: dict[str, Any] = {}
    for place in axes:
        handles, labels = place.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    # A character is 5 points wide at this size, a handle with its gaps 40.
    widest = 5 * max(map(len, entries), default=1) + 40
    columns = max(1, min(6, len(entries), int(72 * figure.get_figwidth() // widest)))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


LAYOUTS: dict[str, Callable[[Results, Views, Styles], Figure]] = {
    "fit1d": _fit1d,
    "adaptive": _adaptive,
    "gauss-newton": _gauss_newton,
    "fit2d": _fit2d,
    "pde1d": _pde1d,
    "pde2d": _pde2d,
    "refine": image_figures.refine,
    "ablation": image_figures.ablation,
    "generic": _generic,
}
