"""Every arm against the control over paired seeds: a 95 % interval, and a p-value that counts how many arms are tried.

The paired t-test, on differences of the last metric for a linear scale and on logarithms of ratios for a log scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fipa.report.data import Results, final_metric, worst
from fipa.report.statistics import Array

LEVEL = 0.95  # of the intervals


@dataclass(frozen=True)
class Comparison:
    """One arm against the control.

    value, low, high
        The mean difference arm - control with its interval; on a log scale the geometric mean of the ratio by which
        the arm is better, with its interval. NaN for what the seeds cannot tell.
    p
        Two-sided, after Holm's correction for all arms that are compared; NaN for fewer than two pairs.
    pairs, lost
        Seeds that both have, and those of them in which one of the two diverged: then there is no interval.
    """

    value: float
    low: float
    high: float
    p: float
    pairs: int
    lost: int


def compare(results: Results) -> dict[str, Comparison]:
    """Compare every arm that has a seed in common with the control."""
    control = results["arms"].get(results.get("control"), {})
    bad, ratio = worst(results), results["metric"]["scale"] == "log"
    sign = -1.0 if ratio and results["metric"]["goal"] == "min" else 1.0
    found: dict[str, Comparison] = {}
    for arm, seeds in results["arms"].items():
        common = [seed for seed in seeds if seed in control] if arm != results["control"] else []
        if common:
            sides = np.array([[final_metric(side[seed], bad) for seed in common] for side in (seeds, control)])
            found[arm] = _compared(sides, sign, ratio)
    corrected = holm({arm: c.p for arm, c in found.items() if not math.isnan(c.p)})
    return {arm: replace(c, p=corrected.get(arm, math.nan)) for arm, c in found.items()}


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the chance that any of the true null hypotheses is rejected stays below the level.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    highest = 0.0
    for place, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p) - place) * value))
        corrected[name] = highest
    return corrected


def two_sided(t: float, freedom: int) -> float:
    """The chance that Student's t with so many degrees of freedom is at least as far from zero.

    The finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(two_sided(12.706, 1), 4), round(two_sided(2.776, 4), 4), two_sided(math.inf, 3)
    (0.05, 0.05, 0.0)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    odd = freedom % 2
    for k in range((freedom - 1) // 2 if odd else freedom // 2):
        total += term
        term *= cosine**2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    inside = 2 / math.pi * (angle + math.sin(angle) * cosine * total) if odd else math.sin(angle) * total
    return min(1.0, max(0.0, 1.0 - inside))


def quantile(freedom: int, level: float = LEVEL) -> float:
    """The t between whose two signs this part of Student's distribution lies.

    >>> round(quantile(1), 2), round(quantile(2), 3), round(quantile(30), 3)
    (12.71, 4.303, 2.042)
    """
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > 1 - level else (low, middle)
    return high


def _compared(sides: Array, sign: float, ratio: bool) -> Comparison:
    usable = np.isfinite(sides).all(axis=0) & ((sides > 0).all(axis=0) if ratio else True)
    pairs, lost = sides.shape[1], int((~usable).sum())
    arm, control = sides[:, usable]
    steps = sign * (np.log(arm) - np.log(control) if ratio else arm - control)
    back = math.exp if ratio else float
    if not steps.size:
        return Comparison(math.nan, math.nan, math.nan, math.nan, pairs, lost)
    mean = float(steps.mean())
    if lost or len(steps) < 2:
        return Comparison(back(mean), math.nan, math.nan, math.nan, pairs, lost)
    error = float(steps.std(ddof=1)) / math.sqrt(len(steps))
    reach = quantile(len(steps) - 1) * error
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    low, high = (back(min(mean + end, 700.0) if ratio else mean + end) for end in (-reach, reach))
    return Comparison(back(mean), low, high, two_sided(t, len(steps) - 1), pairs, lost)
