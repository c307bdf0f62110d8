"""The parts of the page that are text: tables, lists and the frames around the charts.

Every function returns HTML; whatever comes from the data goes through `escape`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from fipa.report.data import MIB, ArmSummary, Results, averaged, averaged_name
from fipa.report.data import summary as summaries
from fipa.report.reach import Reach, reach
from fipa.report.scores import LAST
from fipa.report.words import (
    against_control,
    mean_and_deviation,
    means_against_control,
    mebibytes,
    number,
    spread,
)

Cell = tuple[float | str, str]  # what the column is sorted by, and what is shown; its second line is smaller

LINES = 200  # of events per arm


def frame(level: int, heading: str, chart: str, *, controls: str = "", note: str = "") -> str:
    """A heading, the controls and the empty box that page.js draws the chart into."""
    heading = capitalised(heading)
    bar = f'<div class="controls">{controls}</div>' if controls else ""
    hint = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<section class="block" data-block="{chart}"><h{level}>{escape(heading)}</h{level}>{bar}'
        f'<div class="chart" data-chart="{chart}" role="img" aria-label="{escape(heading)}"></div>{hint}</section>'
    )


def capitalised(text: str) -> str:
    """With a capital first letter; the rest may hold acronyms."""
    return text[:1].upper() + text[1:]


def choice(name: str, label: str, options: Sequence[tuple[str, str]], pressed: str) -> str:
    """Buttons of which one is pressed."""
    buttons = "".join(
        f'<button type="button" data-{name}="{escape(value)}" aria-pressed="{str(value == pressed).lower()}">'
        f"{escape(text)}</button>"
        for value, text in options
    )
    return f'<span class="group" role="group" aria-label="{escape(label)}"><span>{escape(label)}</span>{buttons}</span>'


def checkbox(name: str, label: str, *, checked: bool) -> str:
    """A labelled check box."""
    return f'<label><input type="checkbox" data-{name}{" checked" if checked else ""}> {escape(label)}</label>'


def select(name: str, label: str, options: Iterable[tuple[str, str]] = ()) -> str:
    """A labelled drop-down; page.js fills it where the options depend on another one."""
    items = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options)
    return f"<label>{escape(label)} <select data-{name}>{items}</select></label>"


def final_table(rows: Sequence[tuple[str, Results, ArmSummary]]) -> str:
    """The sortable table of metrics; a row is a label, the run it is from and its summary.

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
    body = ""
    for label, results, s in rows:
        levels, against = _level_cells(results, s)
        cells: list[Cell] = [
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
        ]
        body += f"<tr>{_row(cells)}</tr>"
    return _table("final", heads, body)


def reach_tables(arms: Sequence[tuple[str, Results, str]], levels: Sequence[float]) -> str:
    """For each level a folded table of what it takes the arms to reach it; an item is a label, its run and its arm.

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
        body = "".join(f"<tr>{_row(_reach_cells(label, r, means.get(label)))}</tr>" for label, r in found.items())
        there = {label: r.uplink_mib for label, r in found.items() if math.isfinite(r.round)}
        cheapest = min((label for label, mib in there.items() if mib > 0), key=lambda label: there[label], default=None)
        told = f"{metric['name']} {number(level)} {better}: {len(there)} of {len(found)} arms"
        if cheapest is not None:
            told += f", {cheapest} with the fewest bytes up, {number(there[cheapest])} MiB"
        table = _table("reach", ["arm", "round", "uplink MiB", "uplink + downlink MiB", "seconds", "seeds"], body)
        parts.append(f"<details><summary>{escape(told)}</summary>{table}</details>")
    note = (
        "The first round, of those measured, in which the metric was that good, and what all clients together had sent "
        "and taken by then since the arm's own start: medians over the seeds, each by itself. A dash: half of the "
        "seeds or more never were."
    )
    if any(averaged(results)["arms"] for _, results, _ in arms):
        note += " Second line: the same of the mean of the last models."
    return f'{"".join(parts)}<p class="note">{escape(note)}</p>'


def score_names(goal: str) -> list[str]:
    """The heads of the columns for a linear scale."""
    return [goal, "mean", f"last {LAST}", "last"]


def rounds_done(summary: ArmSummary) -> str:
    """The rounds of an arm, as "1000 + 15" if it started from a warm-up."""
    return f"{summary.after} + {summary.rounds}" if summary.after else str(summary.rounds)


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


def events(arms: Sequence[tuple[str, Results, str]]) -> str:
    """Collapsible lists of what happened, by arm; empty if nothing did. An item is a label, its run and its arm."""
    lists = []
    for label, results, arm in arms:
        found = [(seed, e) for seed, record in results["arms"][arm].items() for e in record.get("events") or []]
        if found:
            noun = "event" if len(found) == 1 else "events"
            items = "".join(f"<li>{escape(line)}</li>" for line in _event_lines(found))
            lists.append(f"<details><summary>{escape(label)}: {len(found)} {noun}</summary><ul>{items}</ul></details>")
    return "".join(lists)


def provenance(results: Results, level: int) -> str:
    """The command, versions, machine and configuration of one run."""
    machine = results.get("machine") or {}
    facts = {"command": results["command"], "fipa": results["fipa"], **{str(k): str(v) for k, v in machine.items()}}
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value)
    config = results["config_toml"] or json.dumps(results.get("config") or {}, indent=2).removeprefix("{}")
    details = f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>" if config else ""
    return f"<h{level}>{escape(results['experiment'])}</h{level}><dl>{rows}</dl>{details}"


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


def _table(kind: str, heads: Sequence[str], body: str) -> str:
    head = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in heads)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _row(cells: Sequence[Cell]) -> str:
    (_, name), *rest = cells
    first = f'<th scope="row" data-value="{escape(name)}">{escape(name)}</th>'
    return first + "".join(f'<td data-value="{escape(str(value))}">{_lines(text)}</td>' for value, text in rest)


def _lines(text: str) -> str:
    first, _, second = escape(text).partition("\n")
    return f'{first}<span class="second">{second}</span>' if second else first


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
