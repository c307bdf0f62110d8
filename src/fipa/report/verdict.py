"""The verdict of a run in one sentence: which arm is best, by how much, and whether the seeds can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fipa.report.data import ArmSummary, Results, centralised, summary
from fipa.report.significance import Comparison, compare
from fipa.report.words import number, percent, signed, traffic, value, with_name

CHANCE = 0.05  # a p-value from which on chance is not ruled out
COLOURED = 6  # arms that a figure has colours for that everyone can tell apart


def verdict(results: Results) -> str:
    """One sentence, also where it is not flattering."""
    summaries = summary(results)
    best = _best(results, summaries)
    if best is None:
        return "Every arm diverged."
    running = any("running" in s.status for s in summaries)
    begin = "So far, " if running else ""
    ends = "is at" if running else "ends at"
    control = next((s for s in summaries if s.arm == results["control"]), None)
    told = with_name(results, level(best))
    if control is None:
        return f"{begin}{best.arm} is best: it {ends} {told}; there is no control to compare it with."
    if best is control:
        if len(summaries) == 1:
            return f"{begin}{best.arm}, the control, {ends} {told}; no other arm was run."
        return f"{begin}{'no' if begin else 'No'} arm beats the control {best.arm}, which {ends} {told}."
    found = compare(results).get(best.arm)
    if found is None:
        return f"{begin}{best.arm} {ends} {told}, but has no seed in common with the control {control.arm}."
    return f"{begin}{best.arm} {ends} {told}, {_apart(results, found, control.arm)}."


def facts(results: Results) -> list[str]:
    """What the verdict rests on: seeds, rounds, and the bytes of the best arm against those of the control."""
    summaries = summary(results)
    seeds = sorted({len(s.seeds) for s in summaries})
    rounds = sorted({s.rounds for s in summaries})
    told = [f"{_span(seeds)} seed{'s' * (seeds != [1])}", f"{_span(rounds)} round{'s' * (rounds != [1])}"]
    if start := sorted({s.after for s in summaries} - {0}):
        told[1] += f" after a warm-up of {_span(start)}"
    best, control = _best(results, summaries), next((s for s in summaries if s.arm == results["control"]), None)
    if best is not None and control is not None and best is not control and (sent := traffic(best, control)):
        told.append(f"{best.arm} {sent}")
    gone = sum(s.diverged > 0 for s in summaries)
    return [*told, *([f"{gone} of {len(summaries)} arms diverged"] if gone else [])]


def level(s: ArmSummary) -> float:
    """The last metric over the seeds: their mean on a linear scale, their median on a log scale."""
    return s.final_median if s.scores is None else s.scores.last.mean


def best_first(results: Results) -> list[ArmSummary]:
    """The arms by their last metric, best first; those that diverged last."""
    return _ranked(results, summary(results))


def in_colour(results: Results, limit: int = COLOURED) -> list[str]:
    """The arms that a figure opens with in colour, in the order of the run: all, or the control and the best."""
    ranked = [s.arm for s in best_first(results)]
    ranked.sort(key=lambda arm: arm != results["control"])
    kept = set(ranked[:limit])
    return [arm for arm in results["arms"] if arm in kept]


def p_value(p: float) -> str:
    """A p-value with two digits; a dash for none.

    >>> p_value(0.00004), p_value(0.0312), p_value(0.5), p_value(math.nan)
    ('< 0.001', '0.031', '0.50', '-')
    """
    if math.isnan(p):
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def difference(results: Results, found: Comparison) -> str:
    """How far an arm is from the control, as a cell of a table."""
    if math.isnan(found.value):
        return "-"
    return f"{number(found.value)} times" if _ratio(results) else signed(results, found.value)


def interval(results: Results, found: Comparison) -> str:
    """The interval around it, as a cell of a table."""
    if math.isnan(found.low):
        return "-"
    if _ratio(results):
        return f"{number(found.low)} to {number(found.high)} times"
    return f"{signed(results, found.low)} to {signed(results, found.high)}"


def _ranked(results: Results, summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
    sign = 1 if results["metric"]["goal"] == "min" else -1
    return sorted(summaries, key=lambda s: (not math.isfinite(level(s)), sign * level(s)))


def _best(results: Results, summaries: Sequence[ArmSummary]) -> ArmSummary | None:
    """The best arm besides the reference and those that pool all data; None if all of them diverged."""
    others = (results["reference"], *centralised(results))
    ranked = [s for s in _ranked(results, summaries) if s.arm not in others and math.isfinite(level(s))]
    return ranked[0] if ranked else None


def _apart(results: Results, found: Comparison, control: str) -> str:
    if math.isnan(found.value):
        return f"while the control {control} diverged"
    if _ratio(results):
        word = "lower" if results["metric"]["goal"] == "min" else "higher"
        size = f"{number(found.value)} times {word} than"
    else:
        points = " points" if percent(results) else ""
        size = f"{value(results, abs(found.value))}{points} {'above' if found.value >= 0 else 'below'}"
    text = f"{size} the control {control}"
    if found.lost:
        return f"{text}, but one of the two diverged on {found.lost} of {found.pairs} seeds"
    if found.pairs == 1:
        return f"{text}; one seed is too few to tell whether that is chance"
    sign = "" if found.p < 0.001 else "= "
    told = f"95 % interval {interval(results, found)}, p {sign}{p_value(found.p)}, {found.pairs} paired seeds"
    return f"{text} ({told})" if found.p < CHANCE else f"{text}, which may be chance ({told})"


def _ratio(results: Results) -> bool:
    return results["metric"]["scale"] == "log"


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
