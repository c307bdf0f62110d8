"""What a metric is drawn against: bytes, rounds and time, the same on the page and in the figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fipa.report.data import MIB, Results, after, cumulative
from fipa.report.statistics import Array

SINCE = "since the start of refinement"


@dataclass(frozen=True)
class Axis:
    """One choice of the x axis.

    series, unit
        The series of a round whose running total it is, in this unit; none for rounds.
    log
        True for bytes, of which arms may need a hundred times more than others. The start, before the first byte, and
        arms that send nothing have no place there.
    """

    button: str
    title: str
    series: tuple[str, ...] = ()
    unit: float = 1.0
    log: bool = False


BYTES = {
    "uplink": Axis("uplink", "uplink of all clients, MiB, log scale", ("uplink_bytes",), MIB, log=True),
    "traffic": Axis(
        "uplink + downlink",
        "up + down of all clients, MiB, log scale",  # as long as a phone has room for
        ("uplink_bytes", "downlink_bytes"),
        MIB,
        log=True,
    ),
}
OTHERS = {
    "rounds": Axis("rounds", "communication round"),
    "own": Axis("rounds of refinement", "rounds"),
    "seconds": Axis("seconds", "seconds", ("seconds",)),
}
AXES = BYTES | OTHERS


def in_order(goal: str) -> list[str]:
    """The axes as they are offered: bytes first for a metric that should be high, such as an accuracy, else last.

    >>> in_order("max")[0], in_order("min")[0]
    ('uplink', 'rounds')
    """
    return [*BYTES, *OTHERS] if goal == "max" else [*OTHERS, *BYTES]


def of_figures(results: Results) -> list[str]:
    """The three axes that a figure has room for, in the same order; without those that no arm has."""
    drawn = [key for key in in_order(results["metric"]["goal"]) if key in ("uplink", "rounds", "seconds")]
    return [key for key in drawn if any(places(results, arm, key) is not None for arm in results["arms"])]


def places(results: Results, arm: str, key: str) -> Array | None:
    """Where the arm's own rounds 0, 1, ... lie on the axis; None if that was not recorded, or is nothing on a log axis.

    Totals are medians over the seeds, and without the warm-up.
    """
    axis = AXES[key]
    if not axis.series:
        rounds = np.arange(1.0 + max(len(record["metric"]) for record in results["arms"][arm].values()))
        return rounds + (after(results, arm) if key == "rounds" else 0)
    totals = cumulative(results, arm, *axis.series)
    return None if totals is None or (axis.log and not totals.any()) else totals / axis.unit
