"""Numbers and results in words: what the data say, also where it is not flattering."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fipa.report.data import MIB, ArmSummary, Results, best_arm
from fipa.report.statistics import Paired

TIE = 0.01  # relative difference of two final metrics that are as good as equal


def number(value: float, digits: int = 3) -> str:
    """A few significant digits; "diverged" for an infinity, a dash for NaN.

    >>> number(0.000123456), number(30.0), number(1234.5), number(float("inf")), number(float("nan"))
    ('1.23e-04', '30', '1230', 'diverged', '-')
    """
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "diverged"
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.{digits - 1}e}"
    return f"{float(f'{value:.{digits}g}'):g}"


def mebibytes(size: float) -> str:
    """Bytes in MiB."""
    return number(size / MIB)


def spread(middle: str, low: str, high: str) -> str:
    """A value with its range, as in "2.2 [1.6, 2.7]"."""
    return f"{middle} [{low}, {high}]"


def against_control(summary: ArmSummary) -> str:
    """The paired comparison of an arm as a table cell; a dash if there is none."""
    ratio, difference = summary.ratio_to_control, summary.difference_to_control
    paired = ratio or difference
    if paired is None:
        return "-"
    wins = f"better in {paired.wins}/{paired.seeds}"
    if not paired.finite:
        return wins
    value, low, high = number(paired.value), number(paired.low), number(paired.high)
    text = f"{value} times [{low}, {high}]" if ratio else spread(_signed(paired.value), low, high)
    return f"{text}, {wins}{_excluded(paired)}"


def describe(results: Results, summaries: Sequence[ArmSummary]) -> str:
    """One paragraph: the best arm, how it compares with the control, and what went wrong."""
    sentences = [*_winner(results, summaries), *_failures(results, summaries)]
    counts = sorted({len(s.seeds) for s in summaries})
    if counts == [1]:
        sentences.append("There is one seed only, so the spread between seeds is unknown.")
    else:
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        sentences.append(f"Every number is over {span} seeds per arm.")
    return " ".join(sentences)


def _winner(results: Results, summaries: Sequence[ArmSummary]) -> list[str]:
    metric, best = results["metric"], best_arm(results, summaries)
    if best is None:
        return ["Every arm diverged."]
    word = "lowest" if metric["goal"] == "min" else "highest"
    sentences = [f"{best.arm} ends with the {word} median {metric['name']}: {_final(best)} after {best.rounds} rounds."]
    others = [s for s in summaries if s is not best and s.arm != results["reference"] and math.isfinite(s.final_median)]
    near = [s.arm for s in others if abs(s.final_median - best.final_median) <= TIE * abs(best.final_median)]
    if near:
        sentences.append(f"Within {TIE:.0%} of it: {_list(near)}.")
    control = next((s for s in summaries if s.arm == results["control"]), None)
    if control is None:
        sentences.append("No control arm was run.")
    elif best is control:
        sentences += ["It is the control: no other arm ends better."] if len(summaries) > 1 else []
    else:
        sentences.append(_comparison(best, control))
        times = best.uplink_bytes / control.uplink_bytes if control.uplink_bytes > 0 else math.nan
        if not math.isnan(times) and abs(times - 1) > 0.01:
            sentences.append(f"It sent {number(times)} times as many bytes up as the control.")
    reference = next((s for s in summaries if s.arm == results["reference"] and s is not best), None)
    if reference is not None:
        sentences.append(f"The reference {reference.arm}, which is not compared, ends at {_final(reference)}.")
    return sentences


def _final(summary: ArmSummary) -> str:
    middle = number(summary.final_median)
    return middle if len(summary.seeds) == 1 else spread(middle, number(summary.final_min), number(summary.final_max))


def _comparison(best: ArmSummary, control: ArmSummary) -> str:
    paired = best.ratio_to_control or best.difference_to_control
    if paired is None:
        return f"It has no seed in common with the control {control.arm}."
    wins = f"it is better in {paired.wins} of {paired.seeds} common {_seeds(paired.seeds)}"
    if not paired.finite:
        return f"Against the control {control.arm} {wins}."
    span = f", range {number(paired.low)} to {number(paired.high)}" if paired.finite > 1 else ""
    if best.ratio_to_control:
        mean = f"geometric mean{span}" if paired.finite > 1 else "ratio"
        times = number(paired.value)
        gain = f"{best.arm} is {times} times better than the control {control.arm} ({mean}{_excluded(paired)})"
    else:
        mean = f"mean{span}" if paired.finite > 1 else "difference"
        gain = f"The difference to the control {control.arm} is {_signed(paired.value)} ({mean}{_excluded(paired)})"
    return f"{gain}; {wins}."


def _failures(results: Results, summaries: Sequence[ArmSummary]) -> list[str]:
    sentences = []
    gone = [f"{s.arm} in {s.diverged} of {len(s.seeds)} {_seeds(len(s.seeds))}" for s in summaries if s.diverged]
    if gone:
        sentences.append(f"Diverged: {_list(gone)}.")
    rising = [
        f"{s.arm} in {s.worse_than_start} of {len(s.seeds)} {_seeds(len(s.seeds))}"
        for s in summaries
        if s.worse_than_start
    ]
    if rising:
        sentences.append(f"Ends worse than it started: {_list(rising)}.")
    control = next((s for s in summaries if s.arm == results["control"]), None)
    sign = 1 if results["metric"]["goal"] == "min" else -1
    if control is not None:
        behind = [s.arm for s in summaries if sign * s.final_median > sign * control.final_median]
        if behind:
            sentences.append(f"Worse than the control in the median: {_list(behind)}.")
    running = [s.arm for s in summaries if "running" in s.status]
    if running:
        sentences.append(f"Still running, so the numbers will change: {_list(running)}.")
    return sentences


def _excluded(paired: Paired) -> str:
    return "" if paired.finite == paired.seeds else f"; over the {paired.finite} finite pairs of {paired.seeds}"


def _signed(value: float) -> str:
    return number(value) if value < 0 else f"+{number(value)}"


def _seeds(count: int) -> str:
    return "seed" if count == 1 else "seeds"


def _list(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
