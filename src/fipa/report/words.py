"""Numbers and results in words: what the data say, also where it is not flattering."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fipa.report.data import MIB, ArmSummary, Results, best_arm
from fipa.report.scores import LAST, Spread
from fipa.report.statistics import Paired

TIE = 0.01  # relative difference of two final metrics that are as good as equal
POINTS = 0.1  # the same for percentages, where it is absolute


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


def percent(results: Results) -> bool:
    """True for a metric in per cent on a linear scale, such as "test accuracy, %": it is told in points."""
    return results["metric"]["scale"] == "linear" and "%" in results["metric"]["name"]


def value(results: Results, amount: float) -> str:
    """A value of the metric: two decimals for percentages, else a few significant digits."""
    return f"{amount:.2f}" if percent(results) and math.isfinite(amount) else number(amount)


def with_name(results: Results, amount: float) -> str:
    """A value with the metric's name, as in "57.31 % test accuracy" or "test MSE 0.015"."""
    name = results["metric"]["name"].removesuffix(", %")
    return f"{unit(results, amount)} {name}" if percent(results) else f"{name} {value(results, amount)}"


def score_names(goal: str) -> list[str]:
    """The heads of the columns for a linear scale."""
    return [goal, "mean", f"last {LAST}", "last"]


def rounds_done(summary: ArmSummary) -> str:
    """The rounds of an arm, as "1000 + 15" if it started from a warm-up."""
    return f"{summary.after} + {summary.rounds}" if summary.after else str(summary.rounds)


def capitalised(text: str) -> str:
    """The text with a capital first letter; the rest may hold acronyms."""
    return text[:1].upper() + text[1:]


def mean_and_deviation(results: Results, over: Spread) -> str:
    """As in "57.31 ± 0.42"; without the deviation for a single seed."""
    deviation = "" if math.isnan(over.std) else f" ± {value(results, over.std)}"
    return value(results, over.mean) + deviation


def means_against_control(results: Results, summary: ArmSummary) -> str:
    """The means over rounds against the control's as a table cell: mean ± standard error [range]."""
    paired = None if summary.scores is None else summary.scores.against_control
    if paired is None:
        return "-"
    wins = f"better in {paired.wins}/{paired.seeds}"
    if not paired.finite:
        return wins
    text = signed(results, paired.value)
    if paired.finite > 1:
        text += f" ± {value(results, paired.standard_error)}"
        text = spread(text, signed(results, paired.low), signed(results, paired.high))
    return f"{text}, {wins}{_excluded(paired)}"


def mebibytes(size: float) -> str:
    """Bytes in MiB."""
    return number(size / MIB)


def spread(middle: str, low: str, high: str) -> str:
    """A value with its range, as in "2.2 [1.6, 2.7]"."""
    return f"{middle} [{low}, {high}]"


def against_control(summary: ArmSummary) -> str:
    """The ratio of an arm to the control as a table cell; a dash if there is none."""
    paired = summary.ratio_to_control
    if paired is None:
        return "-"
    wins = f"better in {paired.wins}/{paired.seeds}"
    if not paired.finite:
        return wins
    text = f"{number(paired.value)} times [{number(paired.low)}, {number(paired.high)}]"
    return f"{text}, {wins}{_excluded(paired)}"


def describe(results: Results, summaries: Sequence[ArmSummary]) -> str:
    """One paragraph: the best arm, how it compares with the control, and what went wrong."""
    sentences = [*_beginning(results, summaries), *_winner(results, summaries), *_failures(results, summaries)]
    counts = sorted({len(s.seeds) for s in summaries})
    if counts == [1]:
        sentences.append("There is one seed only, so the spread between seeds is unknown.")
    else:
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        sentences.append(f"Every number is over {span} seeds per arm.")
    return " ".join(sentences)


def _beginning(results: Results, summaries: Sequence[ArmSummary]) -> list[str]:
    """Where the arms start, if there was a warm-up."""
    starts = sorted({s.after for s in summaries})
    if starts == [0]:
        return []
    if len(starts) > 1:
        return [f"The arms start from rounds {listed([str(k) for k in starts])} of a shared warm-up."]
    records = [record for s in summaries for record in results["arms"][s.arm].values()]
    levels = sorted({r["initial_metric"] for r in records if r.get("initial_metric") is not None})
    ends = [unit(results, level) for level in ([levels[0], levels[-1]] if len(levels) > 1 else levels)]
    level = f", at {' to '.join(ends)}" if levels else ""
    return [f"All arms start from the model after {starts[0]} rounds of a shared warm-up{level}."]


def _winner(results: Results, summaries: Sequence[ArmSummary]) -> list[str]:
    metric, best = results["metric"], best_arm(results, summaries)
    if best is None:
        return ["Every arm diverged."]
    word = "lowest" if metric["goal"] == "min" else "highest"
    rounds = f"after {best.rounds} rounds" + (" of refinement" if best.after else "")
    if metric["scale"] == "log":
        sentences = [f"{best.arm} ends with the {word} median {metric['name']}: {_final(results, best)} {rounds}."]
    else:
        name = metric["name"].removesuffix(", %")
        sentences = [f"{best.arm} ends at {_final(results, best)} {rounds}, the {word} median {name}."]
    others = [s for s in summaries if s is not best and s.arm != results["reference"] and math.isfinite(s.final_median)]
    tie, words = (POINTS, f"{POINTS} points") if percent(results) else (TIE * abs(best.final_median), f"{TIE:.0%}")
    near = [s.arm for s in others if abs(s.final_median - best.final_median) <= tie]
    if near:
        sentences.append(f"Within {words} of it: {listed(near)}.")
    control = next((s for s in summaries if s.arm == results["control"]), None)
    if control is None:
        sentences.append("No control arm was run.")
    elif best is control:
        sentences += ["It is the control: no other arm ends better."] if len(summaries) > 1 else []
    else:
        sentences.append(_comparison(results, best, control))
        if bytes_told := traffic(best, control):
            sentences.append(f"{capitalised(bytes_told)}.")
    reference = next((s for s in summaries if s.arm == results["reference"] and s is not best), None)
    if reference is not None:
        sentences.append(f"The reference {reference.arm}, which is not compared, ends at {_final(results, reference)}.")
    return sentences


def traffic(arm: ArmSummary, control: ArmSummary) -> str:
    """How an arm's bytes compare with the control's, up and down; empty where they were not counted."""
    told = []
    for way, own, other in (
        ("uplink", arm.uplink_bytes, control.uplink_bytes),
        ("downlink", arm.downlink_bytes, control.downlink_bytes),
    ):
        if other > 0 and not math.isnan(own):
            times = number(own / other)
            told.append(f"the same {way}" if times == "1" else f"{times} times the {way}")
    return f"against the control: {', '.join(told)}" if told else ""


def _final(results: Results, summary: ArmSummary) -> str:
    middle = unit(results, summary.final_median)
    if len(summary.seeds) == 1:
        return middle
    return spread(middle, value(results, summary.final_min), value(results, summary.final_max))


def _comparison(results: Results, best: ArmSummary, control: ArmSummary) -> str:
    paired = best.ratio_to_control or best.difference_to_control
    if paired is None:
        return f"It has no seed in common with the control {control.arm}."
    wins = f"it is better in {paired.wins} of {paired.seeds} common {_seeds(paired.seeds)}"
    if not paired.finite:
        return f"Against the control {control.arm} {wins}."
    if best.ratio_to_control:
        span = f", range {number(paired.low)} to {number(paired.high)}" if paired.finite > 1 else ""
        mean = f"geometric mean{span}" if paired.finite > 1 else "ratio"
        times = number(paired.value)
        gain = f"{best.arm} is {times} times better than the control {control.arm} ({mean}{_excluded(paired)})"
        return f"{gain}; {wins}."
    text = f"It ends {_apart(results, paired, f'the control {control.arm}')}; {wins}."
    means = None if best.scores is None else best.scores.against_control
    if means is not None and means.finite and best.rounds > 1:
        text += f" In the mean of all its rounds it is {_apart(results, means, 'the control')}."
    return text


def _apart(results: Results, paired: Paired, whom: str) -> str:
    """A difference in words, as in "1.20 points above FedAvg (mean, range +0.90 to +1.50, standard error 0.12)"."""
    size = value(results, abs(paired.value)) + (" points" if percent(results) else "")
    text = f"{size} {'above' if paired.value >= 0 else 'below'} {whom}"
    notes = [] if paired.finite == paired.seeds else [_excluded(paired).removeprefix("; ")]
    if paired.finite > 1:
        span = f"{signed(results, paired.low)} to {signed(results, paired.high)}"
        notes.insert(0, f"mean, range {span}, standard error {value(results, paired.standard_error)}")
    return f"{text} ({'; '.join(notes)})" if notes else text


def unit(results: Results, amount: float) -> str:
    """A value of the metric with its unit, if that is per cent."""
    return value(results, amount) + (" %" if percent(results) and math.isfinite(amount) else "")


def _failures(results: Results, summaries: Sequence[ArmSummary]) -> list[str]:
    sentences = []
    gone = [f"{s.arm} in {s.diverged} of {len(s.seeds)} {_seeds(len(s.seeds))}" for s in summaries if s.diverged]
    if gone:
        sentences.append(f"Diverged: {listed(gone)}.")
    rising = [
        f"{s.arm} in {s.worse_than_start} of {len(s.seeds)} {_seeds(len(s.seeds))}"
        for s in summaries
        if s.worse_than_start
    ]
    if rising:
        sentences.append(f"Ends worse than it started: {listed(rising)}.")
    control = next((s for s in summaries if s.arm == results["control"]), None)
    sign = 1 if results["metric"]["goal"] == "min" else -1
    if control is not None:
        alike = [s for s in summaries if s.after == control.after]
        behind = [s.arm for s in alike if sign * s.final_median > sign * control.final_median]
        if behind:
            sentences.append(f"Worse than the control in the median: {listed(behind)}.")
    running = [s.arm for s in summaries if "running" in s.status]
    if running:
        sentences.append(f"Still running, so the numbers will change: {listed(running)}.")
    return sentences


def _excluded(paired: Paired) -> str:
    return "" if paired.finite == paired.seeds else f"; over the {paired.finite} finite pairs of {paired.seeds}"


def signed(results: Results, amount: float) -> str:
    """A difference of two values of the metric, with its sign."""
    return value(results, amount) if amount < 0 else f"+{value(results, amount)}"


def _seeds(count: int) -> str:
    return "seed" if count == 1 else "seeds"


def listed(items: Sequence[str]) -> str:
    """As in "A, B and C"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
