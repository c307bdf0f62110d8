"""What the report says about a run: the summary of its arms, and their series over rounds and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fipa.report import statistics
from fipa.report.files import load_results, load_views, with_rounds
from fipa.report.scores import Rounds, Scores, of_rounds, scores
from fipa.report.statistics import Array, Band, Paired

__all__ = [
    "MIB",
    "ArmSummary",
    "after",
    "averaged",
    "averaged_name",
    "best_arm",
    "best_federated",
    "centralised",
    "cumulative",
    "diverged",
    "final_metric",
    "load_results",
    "load_views",
    "metric_table",
    "records_table",
    "running_total",
    "series_band",
    "summary",
    "worst",
]

Results = dict[str, Any]  # as `load_results` returns them
Record = dict[str, Any]  # one arm, one seed

MIB = 2.0**20


@dataclass(frozen=True)
class ArmSummary:
    """The last round of one arm over its seeds.

    final_*, best
        The metric of the last round, and the median over the seeds of the best one of any round. In the final metric a
        seed that diverged counts as infinity (minus infinity if the goal is "max"), whatever it had reached before.
    rounds, after, seconds, uplink_bytes, downlink_bytes
        The most rounds of any seed, those of the warm-up before them, medians over the seeds of the totals. Nothing of
        a warm-up is in the totals.
    peak_memory_mib
        The largest of any round and seed; NaN if it was not measured.
    status
        "finished", "running", "diverged", or for example "diverged 1/3".
    diverged, worse_than_start
        Numbers of seeds. A seed that diverged does not count as worse than the start.
    ratio_to_control, difference_to_control
        One of them over the seeds common with the control, by the scale of the metric ("log": ratio, above one is
        better; "linear": arm minus control). Both None for the control itself and without a control.
    scores
        For a linear scale: the best, mean, last few and last rounds, and the means over rounds against the control's.
    averaged
        The same of the mean of the last models, which is compared with that of the control; None without it.
    """

    arm: str
    seeds: tuple[str, ...]
    rounds: int
    after: int
    final_median: float
    final_min: float
    final_max: float
    final_mean: float
    final_std: float
    best: float
    seconds: float
    uplink_bytes: float
    downlink_bytes: float
    peak_memory_mib: float
    status: str
    diverged: int
    worse_than_start: int
    ratio_to_control: Paired | None
    difference_to_control: Paired | None
    scores: Scores | None
    averaged: ArmSummary | None = None


def worst(results: Results) -> float:
    """The value that stands for a diverged metric."""
    return math.inf if results["metric"]["goal"] == "min" else -math.inf


def diverged(record: Record) -> bool:
    """True if the run was stopped as diverged, or is over and its last metric is not finite."""
    status = record.get("status")
    return status == "diverged" or (status != "running" and record["metric"][-1] is None)


def after(results: Results, arm: str) -> int:
    """The rounds of the warm-up that the arm starts from."""
    return max(int(record.get("after") or 0) for record in results["arms"][arm].values())


def final_metric(record: Record, worst: float) -> float:
    """The last metric that was measured; `worst` if the run diverged."""
    known = [v for v in (record.get("initial_metric"), *record["metric"]) if v is not None]
    return worst if diverged(record) else float(known[-1]) if known else math.nan


def averaged(results: Results) -> Results:
    """The same results with the metric of the mean of the last models as the metric; without arms that lack it."""
    arms = {
        arm: {seed: record | {"metric": record["averaged_metric"], "initial_metric": None}
              for seed, record in seeds.items()}
        for arm, seeds in results["arms"].items()
        if all(any(v is not None for v in record.get("averaged_metric") or []) for record in seeds.values())
    }  # fmt: skip
    return results | {"arms": arms}


def averaged_name(results: Results) -> str:
    """What these means are called: as "mean of the last 10 models" if that is their number in all arms."""
    arms = (results.get("config") or {}).get("arms") or []
    counts = {arm.get("average") for arm in arms} - {0}
    count = f" {counts.pop()}" if len(counts) == 1 and None not in counts else ""
    return f"mean of the last{count} models"


def metric_table(results: Results, arm: str) -> Array:
    """Seeds by the arm's own rounds 0, 1, ...; see `records_table`."""
    return records_table(results, results["arms"][arm])


def records_table(results: Results, seeds: dict[str, Record]) -> Array:
    """Seeds by rounds 0, 1, ...: round 0 is the metric before training.

    Diverged entries are infinite; NaN in rounds in which it was not measured.
    """
    records = seeds.values()
    rows = [[r.get("initial_metric"), *r["metric"]] for r in records]
    return statistics.measured(rows, [diverged(r) for r in records], worst(results))


def series_band(results: Results, arm: str, key: str) -> Band | None:
    """Statistics of another per-round series (rounds 1, 2, ...) over the seeds that have it; None if none has."""
    records = [record for record in results["arms"][arm].values() if record.get(key)]
    # A loss that is not a number is infinite; elsewhere null means that there is no value.
    rows = [[None, *r[key]] for r in records]
    stopped = [key == "loss" and diverged(r) for r in records]
    band = statistics.band(statistics.measured(rows, stopped, math.inf)[:, 1:])
    rest = max(len(r["metric"]) for r in results["arms"][arm].values()) - len(band.median)
    band = Band(*(np.pad(line, (0, rest), constant_values=np.nan) for line in (band.median, band.low, band.high)))
    return None if np.isnan(band.median).all() else band


def running_total(record: Record, *keys: str) -> Array | None:
    """The sum of these series up to each round, from zero in round 0; None if one of them was not recorded."""
    if not all(record.get(key) for key in keys):
        return None
    return np.cumsum([0.0, *(sum(v or 0.0 for v in row) for row in zip(*(record[key] for key in keys), strict=True))])


def cumulative(results: Results, arm: str, *keys: str) -> Array | None:
    """Median over the seeds of the running total of these series together; None if they were not recorded."""
    totals = [running_total(record, *keys) for record in results["arms"][arm].values()]
    rows = [total.tolist() for total in totals if total is not None]
    if not rows:
        return None
    # A seed that stops early must not make the total of the others run backwards.
    return np.maximum.accumulate(statistics.band(statistics.table(rows)).median)


def summary(results: Results) -> list[ArmSummary]:
    """Summarise every arm that has finished a round, in the order of the results."""
    results = {"control": None, **results, "arms": with_rounds(results["arms"])}
    means = averaged(results)
    found = {arm: _summarise(means, arm) for arm in means["arms"]}
    return [replace(_summarise(results, arm), averaged=found.get(arm)) for arm in results["arms"]]


def best_arm(results: Results, summaries: Sequence[ArmSummary]) -> ArmSummary | None:
    """The arm with the best median final metric, other than the reference; None if every arm diverged."""
    sign = 1 if results["metric"]["goal"] == "min" else -1
    finite = [s for s in summaries if math.isfinite(s.final_median) and s.arm != results["reference"]]
    return min(finite, key=lambda s: sign * s.final_median, default=None)


def best_federated(results: Results) -> str | None:
    """The best arm besides the control, the reference and those that pool the data of all clients."""
    others = (results["control"], *centralised(results))
    best = best_arm(results, [s for s in summary(results) if s.arm not in others])
    return None if best is None else best.arm


def centralised(results: Results) -> list[str]:
    """The arms that pool the data of all clients, which no federation can."""
    settings = (results.get("config") or {}).get("arms") or []
    return [arm["name"] for arm in settings if arm.get("centralised")]


def _summarise(results: Results, arm: str) -> ArmSummary:
    seeds = results["arms"][arm]
    goal, bad = results["metric"]["goal"], worst(results)
    finals = {seed: final_metric(record, bad) for seed, record in seeds.items()}
    values = np.array(list(finals.values()))
    mean, std = statistics.spread(values)
    reached = metric_table(results, arm)[:, 1:]
    best = np.fmin.reduce(reached, axis=1) if goal == "min" else np.fmax.reduce(reached, axis=1)
    gone = sum(map(diverged, seeds.values()))
    control = results["arms"].get(results["control"], {}) if arm != results["control"] else {}
    common = [seed for seed in finals if seed in control]
    ours, theirs = np.array([finals[s] for s in common]), np.array([final_metric(control[s], bad) for s in common])
    logarithmic = results["metric"]["scale"] == "log"
    return ArmSummary(
        arm=arm,
        seeds=tuple(seeds),
        rounds=max(len(record["metric"]) for record in seeds.values()),
        after=after(results, arm),
        final_median=statistics.middle(values),
        final_min=float(values.min()),
        final_max=float(values.max()),
        final_mean=mean,
        final_std=std,
        best=statistics.middle(best),
        seconds=_median_total(seeds, "seconds"),
        uplink_bytes=_median_total(seeds, "uplink_bytes"),
        downlink_bytes=_median_total(seeds, "downlink_bytes"),
        peak_memory_mib=_largest(seeds, "peak_memory_mib"),
        status=_status(gone, len(seeds), any(record.get("status") == "running" for record in seeds.values())),
        diverged=gone,
        worse_than_start=sum(_worse_than_start(record, goal) for record in seeds.values()),
        ratio_to_control=statistics.paired_ratio(ours, theirs, goal) if common and logarithmic else None,
        difference_to_control=statistics.paired_difference(ours, theirs, goal) if common and not logarithmic else None,
        scores=None if logarithmic else scores(_rounds(results, seeds), _rounds(results, control), goal),
    )


def _rounds(results: Results, seeds: dict[str, Record]) -> dict[str, Rounds]:
    """What is told of each seed's own rounds."""
    goal, bad = results["metric"]["goal"], worst(results)
    return {
        seed: of_rounds([v for v in record["metric"] if v is not None], goal, bad if diverged(record) else None)
        for seed, record in seeds.items()
    }


def _median_total(seeds: dict[str, Record], key: str) -> float:
    totals = [sum(v or 0.0 for v in record[key]) for record in seeds.values() if record.get(key)]
    return statistics.middle(np.array(totals)) if totals else math.nan


def _largest(seeds: dict[str, Record], key: str) -> float:
    return max((v for record in seeds.values() for v in record.get(key) or [] if v is not None), default=math.nan)


def _status(gone: int, seeds: int, running: bool) -> str:
    if not gone:
        return "running" if running else "finished"
    return "diverged" if gone == seeds else f"diverged {gone}/{seeds}" + (", running" if running else "")


def _worse_than_start(record: Record, goal: str) -> bool:
    start, end = record.get("initial_metric"), final_metric(record, math.nan)  # NaN is neither above nor below
    return start is not None and bool(end > start if goal == "min" else end < start)
