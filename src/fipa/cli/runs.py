"""`fipa run`, `fipa resume` and `fipa report`; what they do is in `fipa.cli.execution`."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fipa.cli.common import Json, Name, Overrides, Quiet, Root, out
from fipa.errors import FipaError
from fipa.machine import keep_memory
from fipa.serve.command import beside

Arms = Annotated[list[str] | None, typer.Option("--arm", metavar="NAME", help="Only this arm (may be repeated).")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="Seeds instead of the experiment's; 0-4 is a range.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of every arm.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also log to DIR/tensorboard.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Make figures and page; or later by `fipa report`.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; a new folder under runs/ by default.")
]


def run(
    name: Name,
    arm: Arms = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes that share the clients.")] = None,
    overrides: Overrides = None,
    directory: Out = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is already in DIR.")] = False,
    root: Root = None,
    warmup: Annotated[
        Path | None, typer.Option("--warmup", metavar="DIR", help="Take the warm-up from the run in DIR.")
    ] = None,
    tensorboard: Board = False,
    with_report: Report = True,
    watch: Annotated[bool, typer.Option("--serve", help="Show the run in the browser while it is running.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every arm on every seed; write results.json, figures and report.html."""
    chosen = None if seeds is None else _seeds(seeds)
    keep_memory()  # before torch makes its first tensor
    from fipa.cli.execution import begin, choose, data_in, execute

    label, experiment = choose(
        name, overrides=overrides or (), arms=arm, seeds=chosen, rounds=rounds, workers=workers
    )  # fmt: skip
    command = shlex.join(["fipa", *sys.argv[1:]])
    with data_in(root):
        job = begin(label, experiment, command, directory=directory, force=force, warmup=warmup)
        with beside(job.directory, out.is_terminal) if watch else nullcontext():
            execute(job, tensorboard, with_report, as_json, quiet)


def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the run.")],
    root: Root = None,
    tensorboard: Board = False,
    with_report: Report = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Resume a run that was stopped; the result is the same as without the stop."""
    keep_memory()
    from fipa.cli.execution import Run, data_in, execute

    with data_in(root):
        execute(Run.open(directory), tensorboard, with_report, as_json, quiet)


def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="The folders of the runs.")],
    page: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write the page.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write figures and report.html of a run again, or one page that compares several runs."""
    from fipa.cli.execution import write_again

    write_again(directories, page, quiet)


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not (high.isdecimal() and int(low) <= int(high))):
            raise FipaError(f"--seeds {text}: write numbers and ranges, as 0,1,2 or 0-4")
        found += range(int(low), int(high) + 1) if dash else [int(low)]
    return found
