"""One HTML file for one run, or for several side by side; it needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from fipa.errors import FipaError
from fipa.report import axes, html, reach, tables
from fipa.report.data import averaged_name, load_results, load_views, summary
from fipa.report.folds import charts
from fipa.report.sections import Shown, grouped, labelled, section_payload
from fipa.report.verdict import facts, verdict
from fipa.report.words import capitalised, describe

CITATION = (
    "Method: Zhipeng Chang, Ting He and Wenrui Hao, Fisher-Informed Parameterwise Aggregation for Federated Learning "
    "with Heterogeneous Data (2026). Independent implementation."
)


def write_page(runs: Sequence[Path], out: Path) -> Path:
    """Write the report of the run directories to the file `out` and return it.

    Several runs share their charts if they have the same metric, and get a section each if not.
    """
    if not runs:
        raise FipaError("write_page needs at least one run directory")
    page = page_of(_load([Path(run) for run in runs]))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def page_of(loaded: Sequence[Shown]) -> str:
    """The page of runs that are loaded."""
    groups = grouped(loaded)
    payloads = [section_payload(group) for group in groups]
    return html.render(
        "report/page.html",
        title=loaded[0].results["title"] if len(loaded) == 1 else f"{len(loaded)} runs side by side",
        alone=len(loaded) == 1,
        introductions=[_introduction(run) for run in loaded],
        sections=[
            section(group, data, alone=len(groups) == 1) for group, data in zip(groups, payloads, strict=True)
        ],
        made=[(run.results["experiment"], *tables.provenance(run.results)) for run in loaded],
        citation=CITATION,
        data=payloads,
        style=html.asset("page.css"),
        plotly=get_plotlyjs(),
        scripts=[html.asset(name) for name in (*html.CHARTS, "page.js")],
    )  # fmt: skip


def section(group: Sequence[Shown], data: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """What the template shows of runs that share a metric: the figure, the main table, and what is folded."""
    metric = data["metric"]
    results = [run.results for run in group]
    rows = [(run.labels[s.arm], run.results, s) for run in group for s in summary(run.results)]
    arms = [(run.labels[arm], run.results, arm) for run in group for arm in run.results["arms"]]
    levels = reach.levels(results)
    return {
        "heading": "" if alone else capitalised(metric["name"]),
        "level": 2 if alone else 3,
        "figure": figure(group, data, capitalised(metric["name"]) if alone else "Over rounds, time and bytes"),
        "table": tables.main_table([(run.results, run.labels) for run in group]),
        "table_note": tables.main_note(results),
        "charts": charts(group, data),
        "numbers": tables.final_table(rows),
        "numbers_note": tables.table_note(results),
        "levels": tables.reach_tables(arms, levels) if levels else [],
        "levels_note": tables.reach_note(arms),
        "events": tables.events(arms),
    }


def figure(group: Sequence[Shown], data: dict[str, Any], heading: str) -> dict[str, Any]:
    """The controls of the main figure, and the note below it."""
    arms = data["arms"]
    some = {key for arm in arms for key in arm}
    several = "seeds" in some
    note = ""
    if several:
        note = (
            "Line: median over the seeds; band: smallest to largest, absent where a seed is not finite. Seconds and "
            "bytes are the medians of the running totals at each round. A line ends where the median diverges."
        )
    if "after" in some:
        note += " Rounds count on from the warm-up; seconds and bytes are those since the start of the refinement."
    if some & axes.BYTES.keys():
        note += " Bytes are those of all clients together; the start, before the first byte, is left of their axis."
    return {
        "heading": heading,
        "axes": [(axis["key"], axis["button"]) for axis in data["axes"]],
        "scale": data["metric"]["scale"],
        "several": several,
        "many": len(data["chosen"]) < len(arms),
        "averaged": averaged_name(group[0].results) if "averaged" in some else "",
        "note": note.strip(),
    }


def _load(paths: Sequence[Path]) -> list[Shown]:
    contents = [load_results(path) for path in paths]
    names = [content["experiment"] for content in contents]
    for candidates in ([path.resolve().name for path in paths], [str(path) for path in paths]):
        if len(set(names)) < len(names):
            names = candidates
    return labelled(names, [(content, load_views(path)) for content, path in zip(contents, paths, strict=True)])


def _introduction(run: Shown) -> dict[str, Any]:
    return {
        "title": run.results["title"],
        "verdict": verdict(run.results),
        "facts": facts(run.results),
        "description": run.results["description"],
        "words": describe(run.results, summary(run.results)),
    }
