"""What is told of a metric on a linear scale, such as an accuracy: its best, mean, last few and last rounds.

These are the numbers of the paper's tables: of every seed first, and then their mean and deviation over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fipa.report import statistics
from fipa.report.statistics import Paired

LAST = 5  # rounds


class Rounds(NamedTuple):
    """One seed: the best round, the means of all and of the last few rounds, and the last one."""

    best: float
    mean: float
    tail: float
    last: float


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; NaN for the deviation of a single one."""

    mean: float
    std: float
    seeds: int


@dataclass(frozen=True)
class Scores:
    """The same four over the seeds of an arm.

    against_control
        The means over rounds, arm minus control, paired by seed; None for the control itself and without a control.
    """

    best: Spread
    mean: Spread
    tail: Spread
    last: Spread
    against_control: Paired | None


def of_rounds(metric: Sequence[float], goal: str, bad: float | None = None) -> Rounds:
    """Numbers of one seed from the rounds in which it was measured.

    A seed that diverged is `bad` in all but the best round: it had that before. NaN if nothing was measured.

    >>> of_rounds([1.0, 4.0, 2.0, 2.0, 2.0, 1.0, 3.0], "max")
    Rounds(best=4.0, mean=2.142857142857143, tail=2.0, last=3.0)
    """
    missing = math.nan if bad is None else bad
    best = (max if goal == "max" else min)(metric, default=missing)
    if bad is not None or not metric:
        return Rounds(best, missing, missing, missing)
    return Rounds(best, float(np.mean(metric)), float(np.mean(metric[-LAST:])), metric[-1])


def scores(arm: dict[str, Rounds], control: dict[str, Rounds], goal: str) -> Scores:
    """Over the seeds of an arm, and against the seeds that the control has too."""
    columns = np.array(list(arm.values()), dtype=np.float64).T
    best, mean, tail, last = (Spread(*statistics.spread(column), seeds=len(arm)) for column in columns)
    common = [seed for seed in arm if seed in control]
    ours, theirs = (np.array([side[seed].mean for seed in common]) for side in (arm, control))
    paired = statistics.paired_difference(ours, theirs, goal) if common else None
    return Scores(best, mean, tail, last, paired)
