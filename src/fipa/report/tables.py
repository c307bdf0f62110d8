"""The tables and lists of the page as plain data; the templates make HTML of them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fipa.report.data import MIB, ArmSummary, Results, averaged, averaged_name, centralised
from fipa.report.data import summary as summaries
from fipa.report.reach import Reach, reach
from fipa.report.scores import LAST
from fipa.report.significance import compare
from fipa.report.verdict import best_first, difference, interval, p_value
from fipa.report.words import (
    against_control,
    listed,
    mean_and_deviation,
    means_against_control,
    mebibytes,
    number,
    rounds_done,
    score_names,
    spread,
)

Cell = tuple[float | str, str]  # what the column is sorted by, and what is shown; its second line is smaller
Entry = tuple[str, Results, str]  # the label of an arm on the page, its run and its name there

LINES = 200  # of events per arm


@dataclass(frozen=True)
class Table:
    """A table that sorts by any column; the first cell of a row is its head."""

    kind: str
    heads: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Fold:
    """A line that is always seen, and what it unfolds: a table, or a list."""

    line: str
    table: Table | None = None
    items: tuple[str, ...] = ()


def main_table(runs: Sequence[tuple[Results, dict[str, str]]]) -> Table:
    """The arms of runs that share a metric, best first, against their control; an item is a run and its labels."""
    metric = runs[0][0]["metric"]
    last = f"{metric['name']}, last round"
    compared = [compare(results) for results, _ in runs]
    paired = any(compared)
    everyone = [s for results, _ in runs for s in best_first(results)]
    status = any(s.status != "finished" for s in everyone)
    down = any(not math.isnan(s.downlink_bytes) for s in everyone)  # older runs did not count these
    heads = ["arm", last, *(["against the control", "95 % interval", "p"] if paired else [])]
    heads += ["uplink MiB", *(["downlink MiB"] if down else []), "seconds", *(["status"] if status else [])]
    rows: list[list[Cell]] = []
    for (results, labels), found in zip(runs, compared, strict=True):
        for s in best_first(results):
            c = found.get(s.arm)
            cells: list[Cell] = [(labels[s.arm], labels[s.arm]), _last_cell(results, s)]
            if c is not None:
                cells += [(c.value, difference(results, c)), (c.low, interval(results, c)), (c.p, p_value(c.p))]
            elif paired:
                cells += [("", "control" if s.arm == results["control"] else "-"), ("", "-"), ("", "-")]
            sent = [s.uplink_bytes, *([s.downlink_bytes] if down else [])]
            cells += [*((size / MIB, mebibytes(size)) for size in sent), (s.seconds, number(s.seconds))]
            rows.append([*cells, *([(s.status, s.status)] if status else [])])
    return Table("main stack", heads, rows)


def main_note(runs: Sequence[Results]) -> str:
    """What the columns of the main table mean."""
    metric = runs[0]["metric"]
    logarithmic = metric["scale"] == "log"
    parts = ["Median over the seeds [range]." if logarithmic else "Mean over the seeds ± standard deviation."]
    compared = [compare(run).values() for run in runs]
    count = max(sum(not math.isnan(c.p) for c in found) for found in compared)
    if any(compared):
        what = "how many times better, geometric mean" if logarithmic else "arm - control, mean"
        parts.append(f"Against the control: {what} over the seeds that both have.")
        arms = f" (p with Holm's correction for {count} arms, intervals without)" if count > 1 else ""
        parts.append(f"Interval and p: paired t-test, two-sided{arms}; a dash where there are fewer than two pairs, ")
        parts[-1] += "or one diverged."
    apart = [arm for run in runs for arm in dict.fromkeys([run["reference"], *centralised(run)]) if arm in run["arms"]]
    if apart:
        verb = "is" if len(apart) == 1 else "are"
        parts.append(f"{listed(apart)} {verb} shown for comparison: no federation, so not part of the verdict.")
    return " ".join([*parts, "Bytes are those of all clients together, since the arm's own start."])


def final_table(rows: Sequence[tuple[str, Results, ArmSummary]]) -> Table:
    """All metrics of the arms; a row is a label, the run it is from and its summary.

    On a log scale that of the last round; on a linear one the best, mean, last few and last rounds.
    """
    metric = rows[0][1]["metric"]
    if metric["scale"] == "log":
        numbers, paired = [f"final {metric['name']}, median [range]", "mean ± std", "best round, median"], "control"
    else:
        numbers, paired = ["seeds", *score_names(metric["goal"])], "control, mean"
    heads = ["arm", "rounds", *numbers]
    measured = any(not math.isnan(s.peak_memory_mib) for _, _, s in rows)
    heads += ["seconds", "uplink MiB", "downlink MiB", *(["peak memory MiB"] if measured else [])]
    heads += ["status", f"against the {paired}"]
    body: list[list[Cell]] = []
    for label, results, s in rows:
        levels, against = _level_cells(results, s)
        body.append([
            (label, label),
            (s.after + s.rounds, _unbroken(rounds_done(s))),
            *([(len(s.seeds), str(len(s.seeds)))] if s.scores is not None else []),
            *levels,
            (s.seconds, number(s.seconds)),
            (s.uplink_bytes / MIB, mebibytes(s.uplink_bytes)),
            (s.downlink_bytes / MIB, mebibytes(s.downlink_bytes)),
            *([(s.peak_memory_mib, number(s.peak_memory_mib))] if measured else []),
            (s.status, s.status),
            against,
        ])  # fmt: skip
    return Table("final", heads, body)


def table_note(runs: Sequence[Results]) -> str:
    """What the columns of the final table mean."""
    controls = ", ".join(sorted({run["control"] for run in runs if run["control"] in run["arms"]}))
    if runs[0]["metric"]["scale"] == "log":
        parts = ["The final metric is that of the last round; a seed that diverged counts as infinite."]
        mean = "geometric mean of " + ("control / arm" if runs[0]["metric"]["goal"] == "min" else "arm / control")
        against = f"{mean} over common seeds [range]."
    else:
        parts = [
            f"Of the arm's own rounds in which it was measured: the {runs[0]['metric']['goal']}, the mean, the mean of "
            f"the last {LAST} and the last. Each is the mean over the seeds ± their standard deviation. A seed that "
            "diverged has a best round only."
        ]
        against = "arm - control of the means over rounds, paired by seed: mean ± standard error [range]."
    if any(summary.averaged for run in runs for summary in summaries(run)):
        name = averaged_name(runs[0]) if len(runs) == 1 else "mean of the last models"
        parts.append(f"Second line: the same of the {name}, against that of the control.")
    if controls:
        parts.append(f"Against the control ({controls}): {against}")
    if any(record.get("after") for run in runs for arm in run["arms"].values() for record in arm.values()):
        parts.append("Rounds: warm-up + own; seconds and bytes are those of the arm's own rounds.")
    if any(record.get("peak_memory_mib") for run in runs for arm in run["arms"].values() for record in arm.values()):
        parts.append("Peak memory: resident, all processes, libraries included; the largest of any round and seed.")
    return " ".join(parts)


def reach_tables(arms: Sequence[Entry], levels: Sequence[float]) -> list[Fold]:
    """For each level a folded table of what it takes the arms to reach it.

    The line that is always seen says how many arms do, and which one with the fewest bytes up.
    """
    metric = arms[0][1]["metric"]
    better = "or more" if metric["goal"] == "max" else "or less"
    parts = []
    for level in levels:
        found = {label: reach(results, arm, level) for label, results, arm in arms}
        means = {
            label: reach(averaged(results), arm, level)
            for label, results, arm in arms
            if arm in averaged(results)["arms"]
        }
        there = {label: r.uplink_mib for label, r in found.items() if math.isfinite(r.round)}
        cheapest = min((label for label, mib in there.items() if mib > 0), key=lambda label: there[label], default=None)
        told = f"{metric['name']} {number(level)} {better}: {len(there)} of {len(found)} arms"
        if cheapest is not None:
            told += f", {cheapest} with the fewest bytes up, {number(there[cheapest])} MiB"
        heads = ["arm", "round", "uplink MiB", "uplink + downlink MiB", "seconds", "seeds"]
        rows = [_reach_cells(label, r, means.get(label)) for label, r in found.items()]
        parts.append(Fold(told, Table("reach", heads, rows)))
    return parts


def reach_note(arms: Sequence[Entry]) -> str:
    """What the columns of these tables mean."""
    note = (
        "The first round, of those measured, in which the metric was that good, and what all clients together had sent "
        "and taken by then since the arm's own start: medians over the seeds, each by itself. A dash: half of the "
        "seeds or more never were."
    )
    if any(averaged(results)["arms"] for _, results, _ in arms):
        note += " Second line: the same of the mean of the last models."
    return note


def events(arms: Sequence[Entry]) -> list[Fold]:
    """What happened, by arm; empty if nothing did."""
    lists = []
    for label, results, arm in arms:
        found = [(seed, e) for seed, record in results["arms"][arm].items() for e in record.get("events") or []]
        if found:
            noun = "event" if len(found) == 1 else "events"
            lists.append(Fold(f"{label}: {len(found)} {noun}", items=tuple(_event_lines(found))))
    return lists


def provenance(results: Results) -> tuple[dict[str, str], str]:
    """Command, versions and machine of a run; and its configuration, as TOML if there is any."""
    machine = results.get("machine") or {}
    facts = {"command": results["command"], "fipa": results["fipa"], **{str(k): str(v) for k, v in machine.items()}}
    config = results["config_toml"] or json.dumps(results.get("config") or {}, indent=2).removeprefix("{}")
    return {key: str(value) for key, value in facts.items() if value}, config


def _last_cell(results: Results, s: ArmSummary) -> Cell:
    if s.scores is not None:
        return s.scores.last.mean, _unbroken(mean_and_deviation(results, s.scores.last))
    return _final_cells(s)[0][0]


def _level_cells(results: Results, s: ArmSummary) -> tuple[list[Cell], Cell]:
    levels, against = _final_cells(s) if s.scores is None else _score_cells(results, s)
    if s.averaged is None:
        return levels, against
    below, compared = _level_cells(results, s.averaged)
    both = [(value, f"{text}\n{more}") for (value, text), (_, more) in zip(levels, below, strict=True)]
    return both, (against[0], f"{against[1]}\n{compared[1]}" if compared[1] != "-" else against[1])


def _final_cells(s: ArmSummary) -> tuple[list[Cell], Cell]:
    final = number(s.final_median)
    if len(s.seeds) > 1:
        final = spread(final, number(s.final_min), number(s.final_max))
    mean = number(s.final_mean) + ("" if math.isnan(s.final_std) else f" ± {number(s.final_std)}")
    cells: list[Cell] = [(s.final_median, final), (s.final_mean, mean), (s.best, number(s.best))]
    return cells, (s.ratio_to_control.value if s.ratio_to_control else "", against_control(s))


def _score_cells(results: Results, s: ArmSummary) -> tuple[list[Cell], Cell]:
    assert s.scores is not None
    levels = (s.scores.best, s.scores.mean, s.scores.tail, s.scores.last)
    cells: list[Cell] = [(level.mean, _unbroken(mean_and_deviation(results, level))) for level in levels]
    paired = s.scores.against_control
    return cells, (paired.value if paired else "", means_against_control(results, s))


def _reach_cells(label: str, found: Reach, mean: Reach | None) -> list[Cell]:
    def texts(r: Reach) -> list[str]:
        spent = (r.round, r.uplink_mib, r.total_mib, r.seconds)
        return [*(number(v) if math.isfinite(v) else "-" for v in spent), f"{r.reached}/{r.seeds}"]

    values = (found.round, found.uplink_mib, found.total_mib, found.seconds, found.reached / found.seeds)
    below = [""] * len(values) if mean is None else [f"\n{text}" for text in texts(mean)]
    cells = zip(values, texts(found), below, strict=True)
    return [(label, label), *((value, text + more) for value, text, more in cells)]


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _event_lines(found: Sequence[tuple[str, dict[str, object]]]) -> list[str]:
    if len(found) <= LINES:
        return [f"{_where(seed, event)}: {event.get('text', '')}" for seed, event in found]
    # Texts that differ in their numbers only are one kind of event.
    kinds = Counter(re.sub(r"\d[\d.e+-]*", "#", str(event.get("text", ""))) for _, event in found)
    lines = [f"{count} times: {kind}" for kind, count in kinds.most_common(LINES - 1)]
    return lines if len(kinds) < LINES else [*lines, f"and {len(kinds) - LINES + 1} other kinds"]


def _where(seed: str, event: dict[str, object]) -> str:
    client = "" if event.get("client") is None else f", client {event['client']}"
    return f"seed {seed}, round {event.get('round', '?')}{client}"
