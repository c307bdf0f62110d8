"""One HTML file for one run, or for several side by side; it needs no network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from fipa.errors import FipaError
from fipa.report import axes, markup, reach
from fipa.report.data import Results, averaged_name, best_federated, load_results, load_views, summary
from fipa.report.payload import CLIENTS, LABELS, arm_payload, view_payload
from fipa.report.stages import shares_payload, warm_up_payload
from fipa.report.style import arm_styles
from fipa.report.words import describe, listed

CITATION = (
    "Method: Zhipeng Chang, Ting He and Wenrui Hao, Fisher-Informed Parameterwise Aggregation for Federated Learning "
    "with Heterogeneous Data (2026). Independent implementation."
)


@dataclass(frozen=True)
class Shown:
    """One loaded run and the labels of its arms on this page."""

    results: Results
    views: dict[str, Any]
    labels: dict[str, str]


def write_page(runs: Sequence[Path], out: Path) -> Path:
    """Write the report of the run directories to the file `out` and return it.

    Several runs share their charts if they have the same metric, and get a section each if not.
    """
    if not runs:
        raise FipaError("write_page needs at least one run directory")
    loaded = _load([Path(run) for run in runs])
    groups: dict[tuple[str, ...], list[Shown]] = {}
    for run in loaded:
        groups.setdefault(tuple(str(v) for v in run.results["metric"].values()), []).append(run)
    level = 2 if len(groups) == 1 else 3
    sections, payload = [], []
    for index, group in enumerate(groups.values()):
        data = _section_payload(group)
        heading = (
            "" if len(groups) == 1 else f"<h2>{escape(markup.capitalised(group[0].results['metric']['name']))}</h2>"
        )
        sections.append(f'<div data-section="{index}">{heading}{_section(group, data, level)}</div>')
        payload.append(data)
    title = loaded[0].results["title"] if len(loaded) == 1 else f"{len(loaded)} runs side by side"
    page = Template(_asset("page.html")).substitute(
        title=escape(title),
        style=_asset("page.css"),
        introduction="".join(_introduction(run, alone=len(loaded) == 1) for run in loaded),
        sections="".join(sections),
        provenance="".join(markup.provenance(run.results, 3) for run in loaded),
        citation=escape(CITATION),
        # "</" would end the script element that holds the data, "<!--" would hide its end
        data=json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script="\n".join(_asset(name) for name in ("charts.js", "images.js", "page.js")),
    )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def _load(paths: Sequence[Path]) -> list[Shown]:
    contents = [load_results(path) for path in paths]
    names = [content["experiment"] for content in contents]
    for candidates in ([path.resolve().name for path in paths], [str(path) for path in paths]):
        if len(set(names)) < len(names):
            names = candidates
    runs = []
    for path, name, content in zip(paths, names, contents, strict=True):
        labels = {arm: arm if len(paths) == 1 else f"{name}: {arm}" for arm in content["arms"]}
        runs.append(Shown(content, load_views(path), labels))
    repeated = [label for label, count in Counter(x for r in runs for x in r.labels.values()).items() if count > 1]
    if repeated:
        raise FipaError(f"the same run was given twice: {repeated[0]!r}")
    return runs


def _section_payload(group: Sequence[Shown]) -> dict[str, Any]:
    arms = [(run, arm) for run in group for arm in run.results["arms"]]
    controls = [run.labels.get(run.results["control"]) for run in group]
    styles = arm_styles([run.labels[arm] for run, arm in arms], controls)
    payloads = [arm_payload(run.results, arm, run.labels[arm], styles[run.labels[arm]]) for run, arm in arms]
    if len({payload.get("after", 0) for payload in payloads}) > 1:  # to be compared, arms need a common start
        for payload in payloads:
            payload["own"] = [k - payload.get("after", 0) for k in payload["rounds"]]
    metric = group[0].results["metric"]
    return {
        "metric": metric,
        "axes": _axes(payloads, metric["goal"]),
        "names": LABELS,
        "arms": payloads,
        "views": [_view(run) for run in group],
    }


def _axes(arms: Sequence[dict[str, Any]], goal: str) -> list[dict[str, Any]]:
    """The axes that some arm has, the one that the page opens with first."""
    warm = any("after" in arm for arm in arms)
    return [
        {
            "key": key,
            "title": axes.AXES[key].title + (f"<br>{axes.SINCE}" if warm and key != "rounds" else ""),
            "log": axes.AXES[key].log,
        }
        for key in axes.in_order(goal)
        if any(key in arm for arm in arms)
    ]


def _view(run: Shown) -> dict[str, Any]:
    """What is shown of one run alone: pictures, the warm-up, the clients' classes."""
    view = view_payload(run.views, run.labels, best_federated(run.results))
    if shares := run.views.get("shares"):
        view["shares"] = shares_payload(shares)
    if warm_up := warm_up_payload(run.results):
        view["warmup"] = warm_up
    return view


def _introduction(run: Shown, *, alone: bool) -> str:
    heading = "" if alone else f"<h2>{escape(run.results['title'])}</h2>"
    text = f"<p>{escape(run.results['description'])}</p>" if run.results["description"] else ""
    return f'{heading}{text}<p class="summary">{escape(describe(run.results, summary(run.results)))}</p>'


def _section(group: Sequence[Shown], data: dict[str, Any], level: int) -> str:
    metric, arms = data["metric"], data["arms"]
    some = {key for arm in arms for key in arm}
    offered = [(axis["key"], axes.AXES[axis["key"]].button) for axis in data["axes"]]
    several = any("seeds" in arm for arm in arms)
    controls = markup.choice("axis", "x axis", offered, offered[0][0])
    controls += markup.choice("scale", "y axis", [("log", "log"), ("linear", "linear")], metric["scale"])
    if several:
        controls += markup.checkbox("band", "range over seeds", checked=True)
        controls += markup.checkbox("seeds", "single seeds", checked=False)
    if "averaged" in some:
        controls += markup.checkbox("averaged", f"{averaged_name(group[0].results)} (dashed)", checked=True)
    note = (
        "Line: median over the seeds; band: smallest to largest, absent where a seed is not finite. Seconds and bytes "
        "are the medians of the running totals at each round. A line ends where the median diverges."
    )
    note = note if several else ""
    if any("after" in arm for arm in arms):
        note += " Rounds count on from the warm-up; seconds and bytes are those since the start of the refinement."
    if some & axes.BYTES.keys():
        note += " Bytes are those of all clients together; the start, before the first byte, is left of their axis."
    blocks = [
        '<div class="legend" role="group" aria-label="arms shown"></div>',
        markup.frame(
            level,
            metric["name"] if level == 2 else "Over rounds, time and bytes",
            "metric",
            controls=controls,
            note=note.strip(),
        ),
    ]
    for index, view in enumerate(data["views"]):
        if "warmup" in view:
            heading = "Warm-up" if len(group) == 1 else f"Warm-up of {group[index].results['experiment']}"
            blocks.append(markup.frame(level, heading, f"warmup-{index}", note=_warm_up_note(view["warmup"])))
    known = {key for arm in arms for key, band in arm.get("series", {}).items() if any(band["median"])}
    shown = [(key, name) for key, name in LABELS.items() if key in known]
    if shown:
        menu = markup.select("series", "series", shown)
        menu += markup.choice("series-scale", "y axis", [("log", "log"), ("linear", "linear")], "linear")
        blocks.append(markup.frame(level, "Round by round", "series", controls=menu))
    rows = [(run.labels[s.arm], run.results, s) for run in group for s in summary(run.results)]
    heading = "After the last round" if metric["scale"] == "log" else "The arms in numbers"
    blocks.append(
        f"<h{level}>{escape(heading)}</h{level}>{markup.final_table(rows)}"
        f'<p class="note">{escape(markup.table_note([run.results for run in group]))}</p>'
    )
    if levels := reach.levels([run.results for run in group]):
        arms_of = [(run.labels[arm], run.results, arm) for run in group for arm in run.results["arms"]]
        blocks.append(f"<h{level}>What it takes</h{level}>{markup.reach_tables(arms_of, levels)}")
    blocks += _details(some, data, level)
    happened = markup.events([(run.labels[arm], run.results, arm) for run in group for arm in run.results["arms"]])
    if happened:
        blocks.append(f"<h{level}>Events</h{level}>{happened}")
    return "".join(blocks)


def _details(some: set[str], data: dict[str, Any], level: int) -> list[str]:
    blocks, arm_menu, one_seed = [], markup.select("arm", "arm"), "First seed of the arm."
    if "spectra" in some:
        menu = arm_menu + markup.select("round", "round")
        note = f"Eigenvalues that each client sent. {one_seed}"
        blocks.append(markup.frame(level, "Spectra of the clients", "spectra", controls=menu, note=note))
    if "schedule" in some:
        note = f"{one_seed} With more than {CLIENTS} clients, the first {CLIENTS} are shown."
        blocks.append(
            markup.frame(level, "Ranks and local steps of the clients", "schedule", controls=arm_menu, note=note)
        )
    if "steering" in some:
        note = f"{one_seed} A cross marks a round whose step was rejected."
        blocks.append(markup.frame(level, "Step control", "steering", controls=arm_menu, note=note))
    if "gap" in some:
        note = "Distance of the parameters to the reference's, relative to their norm, median over the seeds; "
        note += "dotted: the nearest c/K."
        blocks.append(markup.frame(level, "Gap to the reference trajectory", "gap", note=note))
    for index, view in enumerate(data["views"]):
        if "curves" in view:
            title = view["curves"]["title"]
            blocks.append(markup.frame(level, title or "Fitted functions", f"fit-{index}"))
            if "errors" in view["curves"]:
                heading = "Pointwise error" + (f": {title}" if title else "")
                blocks.append(markup.frame(level, heading, f"error-{index}"))
        if "maps" in view:
            errors = "errors" in view["maps"]
            note = "Errors as powers of ten; the" if errors else "The"
            note += " colour scales are the same for all arms. Boxes: the clients' regions."
            heading = view["maps"]["title"] or ("Solutions and errors" if errors else "Solutions")
            blocks.append(markup.frame(level, heading, f"maps-{index}", controls=arm_menu, note=note))
        if "shares" in view:
            note = f"{view['shares']['note']} An empty cell: none of this class. First seed."
            blocks.append(markup.frame(level, "Classes of the clients", f"shares-{index}", note=note))
    return blocks


def _warm_up_note(warm_up: dict[str, Any]) -> str:
    starts = [str(k) for k in warm_up["starts"]]
    rounds = f"round{'s' if len(starts) > 1 else ''} {listed(starts)}" if starts else ""
    note = f"Arms start from the model after {rounds}." if starts else "No arm starts from it."
    return (f"Thin lines: the {len(warm_up['seeds'])} seeds; thick: their mean. " if warm_up["seeds"] else "") + note


def _asset(name: str) -> str:
    return files("fipa.report").joinpath(name).read_text(encoding="utf-8")
