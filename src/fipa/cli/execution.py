"""What `fipa run`, `resume` and `report` do, and what they print."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from fipa.cli import Exit
from fipa.cli.common import err, out
from fipa.federation.storage import finite
from fipa.launch import begin, choose, data_in, refresh, write_report
from fipa.progress import Log, Progress, TensorBoard, Watchers
from fipa.report.data import ArmSummary, averaged_name, summary
from fipa.report.figures import write_figures  # also for a run: better told before it that matplotlib is missing
from fipa.report.page import write_page
from fipa.report.words import mean_and_deviation, rounds_done, score_names
from fipa.runner import Run, Watcher

__all__ = ["Run", "begin", "choose", "data_in", "execute", "write_again"]


def write_again(directories: list[Path], page: Path | None, quiet: bool) -> None:
    """Write figures of runs, and one page that shows all of them."""
    for directory in directories:
        refresh(directory)
        write_figures(directory, directory / "figures")
    alone = directories[0] / "report.html" if len(directories) == 1 else Path("report.html")
    written = write_page(directories, page or alone)
    if not quiet:
        out.print(f"report [bold]{escape(str(written))}[/]", soft_wrap=True)


def execute(job: Run, tensorboard: bool, with_report: bool, as_json: bool, quiet: bool) -> None:
    """Run what is left of a run, with progress; write its report; print a table or JSON."""
    watching: list[Watcher] = [TensorBoard(job.directory / "tensorboard")] if tensorboard else []
    if not quiet and not as_json:
        watching.append(Progress(out, job.experiment) if out.is_terminal else Log(out))
    try:
        with Watchers(watching) as watchers:
            results = job.execute(watchers)
    except KeyboardInterrupt:
        err.print(f"stopped; resume with [bold]fipa resume {escape(str(job.directory))}[/]", soft_wrap=True)
        raise typer.Exit(Exit.INTERRUPTED) from None
    paths = {"directory": job.directory, "results": job.directory / "results.json"}
    if with_report:
        paths["report"] = write_report(job.directory)
    if as_json:
        print(json.dumps(finite({key: str(path) for key, path in paths.items()} | {"summary": _summary(results)})))
    elif not quiet:
        _print_table(results)
        page = f"report [bold]{escape(str(paths['report']))}[/], " if with_report else ""
        out.print(f"{page}numbers [bold]{escape(str(paths['results']))}[/]", soft_wrap=True)
    if any(r["status"] == "diverged" for seeds in results["arms"].values() for r in seeds.values()):
        err.print("at least one run diverged: see its events in the report")
        raise typer.Exit(Exit.DIVERGED)


def _summary(results: dict[str, Any]) -> dict[str, Any]:
    return {
        s.arm: {"median": s.final_median, "min": s.final_min, "max": s.final_max, "status": s.status}
        | ({} if s.averaged is None else {"averaged": s.averaged.final_median})
        | ({} if s.scores is None else {"after": s.after, "rounds": s.rounds, "over_rounds": asdict(s.scores)})
        for s in summary(results)
    }


def _print_table(results: dict[str, Any]) -> None:
    metric = results["metric"]
    linear = metric["scale"] == "linear"
    heads = score_names(metric["goal"]) if linear else [f"{metric['name']}, last round"]
    summaries = summary(results)
    averaged = any(s.averaged for s in summaries)
    heads += ["averaged"] if averaged else []
    down = out.width >= 100  # there is room
    table = Table("arm", "rounds", *heads, "seconds", "MiB up", *["MiB down"][:down], box=None, pad_edge=False)
    for s in summaries:
        if s.scores is not None:
            levels = (s.scores.best, s.scores.mean, s.scores.tail, s.scores.last)
            cells = [mean_and_deviation(results, level) for level in levels]
        else:
            cells = [f"{s.final_median:.2e}"]
            if len(s.seeds) > 1:
                cells[0] += f" [{s.final_min:.1e}, {s.final_max:.1e}]"
        if averaged:
            cells.append(_averaged(results, s.averaged))
        sent = [f"{size / 2**20:.2f}" for size in (s.uplink_bytes, s.downlink_bytes)[: 1 + down]]
        table.add_row(escape(s.arm), rounds_done(s), *cells, f"{s.seconds:.1f}", *sent)
    if linear:
        spread = ", mean ± standard deviation over seeds" if any(len(s) > 1 for s in results["arms"].values()) else ""
        out.print(f"{escape(metric['name'])} over the rounds of each arm{spread}")
    out.print(table)
    if averaged:
        out.print(f"averaged: the {averaged_name(results)}, after the last round")


def _averaged(results: dict[str, Any], mean: ArmSummary | None) -> str:
    if mean is None:
        return "-"
    return f"{mean.final_median:.2e}" if mean.scores is None else mean_and_deviation(results, mean.scores.last)
