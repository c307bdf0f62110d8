"""Statistics over seeds and rounds: pure functions on arrays.

A table has one row per seed and one column per round. NaN means that a seed has no such round; infinity (or minus
infinity, for a metric that should be high) means that it diverged, so that a median never gets better because a bad
seed stopped early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """Median, smallest and largest value over the seeds, one entry per round; NaN where no seed has a value."""

    median: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Paired:
    """An arm against the control, seed by seed.

    value, low, high
        Over the `finite` pairs: geometric mean of the ratios, or mean of the differences, and their range.
    wins
        Seeds, of all `seeds` common ones, in which the arm is strictly better; one that diverged is never better.
    standard_error
        Standard error of a mean of differences; NaN for ratios and for fewer than two pairs.
    """

    value: float
    low: float
    high: float
    wins: int
    finite: int
    seeds: int
    standard_error: float = math.nan


@dataclass(frozen=True)
class Line:
    """A straight line `intercept + slope * x` through transformed data, fitted over the entries first..last."""

    slope: float
    intercept: float
    first: int
    last: int


def table(
    rows: Sequence[Sequence[float | None]], *, missing: float = math.nan, stopped: Sequence[bool] | None = None
) -> Array:
    """Rows of unequal lengths as one array.

    Parameters
    ----------
    missing
        Stands in for None.
    stopped
        Rows that ended early because they diverged: `missing` stands in for the rest of them too. The rest of other
        rows is NaN.
    """
    values = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        values[index, : len(row)] = [missing if v is None or math.isnan(v) else v for v in row]
        if stopped is not None and stopped[index]:
            values[index, len(row) :] = missing
    return values


def measured(rows: Sequence[Sequence[float | None]], stopped: Sequence[bool], bad: float) -> Array:
    """A table of a metric that need not have been measured in every round: None is a gap, and becomes NaN.

    A stopped row, which diverged, is `bad` after its last number, but not in rounds that are a gap of all other rows.

    >>> measured([[1.0, None, 3.0, None, 5.0], [2.0, None, None]], [False, True], math.inf).tolist()
    [[1.0, nan, 3.0, nan, 5.0], [2.0, nan, inf, nan, inf]]
    """
    values = table(rows)
    for row, gone in zip(values, stopped, strict=True):
        if gone:
            row[1 + max(np.flatnonzero(~np.isnan(row)), default=0) :] = bad
    going = [k for k, gone in enumerate(stopped) if not gone]
    reached = max((len(rows[k]) for k in going), default=0)
    values[:, :reached][:, np.isnan(values[going, :reached]).all(axis=0)] = np.nan
    return values


def band(values: Array) -> Band:
    """Median, minimum and maximum over the seeds that have the round.

    >>> band(table([[1.0, 2.0, 3.0], [3.0, 6.0]])).median.tolist()
    [2.0, 4.0, 3.0]
    """
    median, low, high = (np.full(values.shape[1], np.nan) for _ in range(3))
    for column in range(values.shape[1]):
        present = values[:, column][~np.isnan(values[:, column])]
        if present.size:
            median[column], low[column], high[column] = middle(present), present.min(), present.max()
    return Band(median, low, high)


def middle(values: Array) -> float:
    """The median, also of infinities: infinite if either of the two middle values is."""
    ordered = np.sort(values)
    left, right = float(ordered[(len(ordered) - 1) // 2]), float(ordered[len(ordered) // 2])
    return left if left == right else (left + right) / 2


def spread(values: Array) -> tuple[float, float]:
    """Mean and sample standard deviation; infinite and NaN as soon as one value is infinite, NaN for a single one."""
    if not np.isfinite(values).all():
        return float(values[~np.isfinite(values)][0]), math.nan
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan


def paired_ratio(arm: Array, control: Array, goal: str) -> Paired:
    """How many times better the arm is: control/arm if the goal is "min", arm/control if it is "max"."""
    usable = np.isfinite(arm) & np.isfinite(control) & (arm > 0) & (control > 0)
    logs = np.log(control[usable]) - np.log(arm[usable])
    logs = logs if goal == "min" else -logs
    return _paired(logs, _wins(arm, control, goal), len(arm), back=np.exp)


def paired_difference(arm: Array, control: Array, goal: str) -> Paired:
    """Arm minus control, whatever the goal."""
    usable = np.isfinite(arm) & np.isfinite(control)
    differences = arm[usable] - control[usable]
    paired = _paired(differences, _wins(arm, control, goal), len(arm), back=np.asarray)
    count = len(differences)
    return replace(paired, standard_error=float(differences.std(ddof=1)) / math.sqrt(count)) if count > 1 else paired


def geometric_slope(metric: Sequence[float]) -> Line | None:
    """Fit log(metric) against the round over its decreasing part.

    That part runs from the largest value before the minimum to the first round that has made 95 % of the way (in the
    logarithm), so that a plateau at the end does not flatten the slope. None if nothing decreases.
    """
    values = np.asarray(metric, dtype=np.float64)
    logs = np.log(np.where(np.isfinite(values) & (values > 0), values, np.nan))
    lowest = 0 if np.isnan(logs).all() else int(np.nanargmin(logs))
    if np.isnan(logs[:lowest]).all():
        return None
    first = int(np.nanargmax(logs[:lowest]))
    near = logs[lowest] + 0.05 * (logs[first] - logs[lowest])
    last = first + int(np.argmax(np.nan_to_num(logs[first : lowest + 1], nan=np.inf) <= near))
    return _line(np.arange(len(logs), dtype=np.float64), logs, first, last)


def power_law(gap: Sequence[float]) -> Line | None:
    """Fit log(gap) against log(K), the round K = 1, 2, ...: the slope is the exponent.

    From the largest gap on, since both trajectories leave the same point; over all rounds if fewer than three are left.
    """
    values = np.asarray(gap, dtype=np.float64)
    logs = np.log(np.where(np.isfinite(values) & (values > 0), values, np.nan))
    if np.isnan(logs).all():
        return None
    first = int(np.nanargmax(logs))
    if len(logs) - first < 3:
        first = 0
    return _line(np.log(np.arange(1, len(logs) + 1)), logs, first, len(logs) - 1)


def inverse_guide(gap: Sequence[float], first: int = 0) -> float:
    """The c for which c/K is nearest to the gap (in the logarithm) from entry `first` on; NaN if there is no gap."""
    values = np.asarray(gap, dtype=np.float64)
    products = (values * np.arange(1, len(values) + 1))[first:]
    products = products[np.isfinite(products) & (products > 0)]
    return float(np.exp(np.log(products).mean())) if products.size else math.nan


def _wins(arm: Array, control: Array, goal: str) -> int:
    return int(((arm < control) if goal == "min" else (arm > control)).sum())


def _paired(values: Array, wins: int, seeds: int, *, back: Callable[[Array], Array]) -> Paired:
    if not values.size:
        return Paired(math.nan, math.nan, math.nan, wins, 0, seeds)
    value, low, high = map(float, back(np.array([values.mean(), values.min(), values.max()])))
    return Paired(value, low, high, wins, len(values), seeds)


def _line(x: Array, y: Array, first: int, last: int) -> Line | None:
    x, y = x[first : last + 1], y[first : last + 1]
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    if len(x) < 2:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return Line(slope, float(y.mean() - slope * x.mean()), first, last)
