"""What it takes to reach a level of the metric: rounds, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fipa.report import statistics
from fipa.report.data import MIB, Results, metric_table, running_total, summary
from fipa.report.statistics import Array

LEVELS = 5  # at most
NICE = (1, 2, 5)


@dataclass(frozen=True)
class Reach:
    """The first round in which an arm's metric was at a level or better, and what it had spent by then.

    round, uplink_mib, total_mib, seconds
        Medians over the seeds, from the arm's own start, bytes those of all clients, `total_mib` up and down together.
        A seed that never got there counts as infinite, so that a median is if half of the seeds did not. NaN for what
        was not recorded.
    reached, seeds
        How many seeds got there, of how many.
    """

    round: float
    uplink_mib: float
    total_mib: float
    seconds: float
    reached: int
    seeds: int


def reach(results: Results, arm: str, level: float) -> Reach:
    """What it takes the arm to reach the level, over its seeds."""
    values = metric_table(results, arm)
    met = values >= level if results["metric"]["goal"] == "max" else values <= level
    first = [int(np.argmax(row)) if row.any() else None for row in met]
    records = list(results["arms"][arm].values())

    def spent(*keys: str, unit: float = 1.0) -> float:
        totals = [running_total(record, *keys) for record in records]
        known = [
            math.inf if place is None else float(total[place]) / unit
            for place, total in zip(first, totals, strict=True)
            if total is not None
        ]
        return statistics.middle(np.array(known)) if known else math.nan

    return Reach(
        round=statistics.middle(np.array([math.inf if place is None else place for place in first])),
        uplink_mib=spent("uplink_bytes", unit=MIB),
        total_mib=spent("uplink_bytes", "downlink_bytes", unit=MIB),
        seconds=spent("seconds"),
        reached=sum(place is not None for place in first),
        seeds=len(first),
    )


def levels(runs: Sequence[Results]) -> list[float]:
    """A few round levels of the metric that runs share, from the easiest: see `round_levels`.

    They lie between the best rounds of the worst and of the best arm. Those that every arm has at its start are left
    out.
    """
    metric = runs[0]["metric"]
    best = np.array([s.best for run in runs for s in summary(run)])
    best = best[np.isfinite(best) & ((best > 0) | (metric["scale"] == "linear"))]
    if not best.size:
        return []
    low, high = float(best.min()), float(best.max())
    worst, finest = (low, high) if metric["goal"] == "max" else (high, low)
    found = round_levels(worst, finest, metric["goal"], metric["scale"])
    return [level for level in found if any(reach(run, arm, level).round > 0 for run in runs for arm in run["arms"])]


def round_levels(worst: float, best: float, goal: str, scale: str) -> list[float]:
    """Round numbers from the last one that the worst arm reaches to the last one that the best arm does.

    >>> round_levels(46.1, 57.3, "max", "linear"), round_levels(0.3, 2e-4, "min", "log")
    ([45.0, 50.0, 55.0], [1.0, 0.1, 0.01, 0.001])
    """
    sign = 1 if goal == "max" else -1
    grids = _linear if scale == "linear" else _logarithmic
    for grid in grids(min(worst, best), max(worst, best)):
        ordered = grid if sign > 0 else grid[::-1]
        reached = sign * ordered <= sign * worst
        wanted = ordered[max(int(reached.sum()) - 1, 0) :]
        wanted = wanted[sign * wanted <= sign * best]
        if len(wanted) <= LEVELS:
            return [float(f"{level:.6g}") for level in wanted]
    raise AssertionError("a grid that is coarse enough has few levels")


def _linear(low: float, high: float) -> Iterator[Array]:
    """Multiples of 1, 2 or 5 times a power of ten, from a hundredth of the size on, ever coarser."""
    size = max(abs(low), abs(high)) or 1.0
    power = math.floor(math.log10(size)) - 3
    while True:
        for nice in NICE:
            step = nice * 10.0**power
            if step >= 0.01 * size * (1 - 1e-9):
                places = np.arange(math.floor(low / step) - 1, math.ceil(high / step) + 2)  # whatever is rounded
                yield np.round(places * step, 12)
        power += 1


def _logarithmic(low: float, high: float) -> Iterator[Array]:
    """1, 2 and 5 times powers of ten, then the powers alone, then ever fewer of them."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    yield np.array([nice * 10.0**k for k in range(first, last + 1) for nice in NICE])
    every = 1
    while True:
        yield np.array([10.0**k for k in range(every * (first // every), last + every, every)])
        every += 1
