"""The command line: `fipa list`, `show`, `run`, `resume`, `report`, `serve`, `data`, `deploy-demo`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

from fipa import __version__
from fipa.data import registry
from fipa.errors import FipaError, missing
from fipa.federation.storage import finite

try:
    import tomli_w
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column, Table

    from fipa.config.load import load, names
    from fipa.config.schema import Experiment, dump, resolved
    from fipa.launch import begin, choose, data_in, refresh, write_report
    from fipa.progress import Log, Progress, TensorBoard, Watchers
    from fipa.report.data import ArmSummary, averaged_name, summary
    from fipa.report.figures import write_figures
    from fipa.report.page import write_page
    from fipa.report.words import mean_and_deviation, rounds_done, score_names
    from fipa.runner import Run, Watcher
    from fipa.serve.command import beside, serving
except ImportError as error:
    if (remedy := missing(error, "cli")) is None:
        raise
    sys.exit(f"the command line {remedy}")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data = typer.Typer(no_args_is_help=True, help="Image sets: which there are, and how to get them.")
app.add_typer(data, name="data")
out = Console()
err = Console(stderr=True)


class Exit(IntEnum):
    """What the shell is told, besides 0 for success and Python's own 1 for a traceback."""

    USAGE = 2  # the command, the experiment or what it met on the way is wrong: the message says what
    DIVERGED = 3  # everything was run, and at least one arm ended in NaN or infinity
    INTERRUPTED = 130


Name = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="A name from `fipa list`, a .toml file, or a .py file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: problem.samples=100, or 'arms.*.rounds=5'."),
]
Arms = Annotated[list[str] | None, typer.Option("--arm", metavar="NAME", help="Only this arm (may be repeated).")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="Seeds instead of the experiment's; 0-4 is a range.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of every arm.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also log to DIR/tensorboard.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Figures and page; `fipa report` makes them, too.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; a new folder under runs/ by default.")
]

Root = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The folder with the sets; FIPA_DATA, or else ./data, by default."),
]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Second-order aggregation for federated learning."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command("list")
def list_experiments(as_json: Json = False) -> None:
    """Experiments that come with the package."""
    entries = [(name, load(name)[1]) for name in names()]
    if as_json:
        print(json.dumps({name: {"title": e.title, "arms": [a.name for a in e.arms]} for name, e in entries}))
        return
    whole = Column("experiment", no_wrap=True)  # a name that is cut is of no use
    table = Table(whole, "what", "arms", "rounds", "seeds", box=None, pad_edge=False)
    for name, experiment in entries:
        seeds = ", ".join(map(str, experiment.seeds))
        table.add_row(name, escape(experiment.title), str(len(experiment.arms)), _range(experiment), seeds)
    out.print(table)


@app.command()
def show(name: Name, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print an experiment with all its settings, as TOML that `fipa run` takes."""
    label, experiment = choose(name, overrides=overrides or ())
    if experiment.problem.name not in ("images", "head"):  # these need no data to be shown
        experiment = Run.new(Path(), label, "", experiment).experiment
    content = dump(resolved(experiment, least_squares=False))
    print(f"{json.dumps(content)}\n" if as_json else tomli_w.dumps(content, multiline_strings=True), end="")


@app.command()
def run(
    name: Name,
    arm: Arms = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that clients are shared out to.")] = None,
    overrides: Overrides = None,
    directory: Out = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is already in DIR.")] = False,
    root: Root = None,
    warmup: Annotated[
        Path | None, typer.Option("--warmup", metavar="DIR", help="Take the warm-up from the run in DIR.")
    ] = None,
    tensorboard: Board = False,
    with_report: Report = True,
    watch: Annotated[bool, typer.Option("--serve", help="Show the run in the browser while it goes on.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every arm on every seed; write results.json, figures and report.html."""
    chosen = None if seeds is None else _seeds(seeds)
    label, experiment = choose(
        name, overrides=overrides or (), arms=arm, seeds=chosen, rounds=rounds, workers=workers
    )  # fmt: skip
    command = shlex.join(["fipa", *sys.argv[1:]])
    with data_in(root):
        job = begin(label, experiment, command, directory=directory, force=force, warmup=warmup)
        with beside(job.directory, out.is_terminal) if watch else nullcontext():
            _execute(job, tensorboard, with_report, as_json, quiet)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    root: Root = None,
    tensorboard: Board = False,
    with_report: Report = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped, as if it had not been."""
    with data_in(root):
        _execute(Run.open(directory), tensorboard, with_report, as_json, quiet)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...")],
    page: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write the page.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write figures and report.html of a run anew, or one page that shows several runs side by side."""
    for directory in directories:
        refresh(directory)
        write_figures(directory, directory / "figures")
    alone = directories[0] / "report.html" if len(directories) == 1 else Path("report.html")
    written = write_page(directories, page or alone)
    if not quiet:
        out.print(f"report [bold]{escape(str(written))}[/]", soft_wrap=True)


app.command("serve")(serving)


@data.command("list")
def list_sets(root: Root = None, as_json: Json = False) -> None:
    """Image sets, and whether they are there."""
    folder = registry.data_root(root).resolve()
    found = {name: source.find(folder) for name, source in registry.SETS.items()}
    if as_json:
        print(json.dumps({name: {"folder": str(place) if place else None} for name, place in found.items()}))
        return
    table = Table("set", "classes", "images", "size", "there", box=None, pad_edge=False)
    for name, source in registry.SETS.items():
        images, size = " + ".join(f"{count:,}" for count in source.images), " x ".join(map(str, source.shape))
        there = "comes with fipa" if not source.remote else "yes" if found[name] else "no"
        table.add_row(name, str(source.classes), images, size, there)
    out.print(table)
    out.print(f"under [bold]{escape(str(folder))}[/]; `fipa data get NAME` gets one", soft_wrap=True)


@data.command("get")
def get_set(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `fipa data list`.")],
    root: Root = None,
    quiet: Quiet = False,
) -> None:
    """Download a set, or resume its download, and unpack it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Bar(*columns, console=out, disable=quiet or not out.is_terminal) as bar:
            task = bar.add_task(name, total=None)
            folder = registry.get(name, root, lambda done, total: bar.update(task, completed=done, total=total))
    except KeyboardInterrupt:
        err.print("stopped; the same command resumes it")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if not quiet:
        out.print(f"{name} is in [bold]{escape(str(folder))}[/]", soft_wrap=True)


@app.command("deploy-demo")
def deploy_demo(
    nodes: Annotated[int, typer.Option(min=2, help="SuperNodes, each with a part of the data.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    experiment: Annotated[str, typer.Option(help="Another one, with as many clients as there are nodes.")] = "demo",
    arm: Annotated[str, typer.Option(help="Another arm.")] = "FIPA controlled",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Run a few rounds on a real Flower deployment on this machine, with TLS and authenticated nodes; stop it again."""
    try:
        from fipa.flower import demo
    except ImportError as error:
        if (remedy := missing(error, "flower")) is None:
            raise
        raise FipaError(f"a deployment {remedy}") from error
    outcome = demo.deploy_demo(
        nodes, rounds, (lambda text: None) if as_json else out.print, experiment=experiment, arm=arm,
        overrides=overrides or (),
    )  # fmt: skip
    if as_json:
        print(json.dumps(asdict(outcome)))
        raise typer.Exit(0 if outcome.same else 1)
    columns = {"metric": ".4g", "loss": ".4g", "trials": ",", "trips": ",", "uplink-bytes": ",", "downlink-bytes": ","}
    table = Table("round", *columns, box=None, pad_edge=False)
    for k, numbers in outcome.metrics.items():
        told = [f"{numbers[name]:{form}}" for name, form in columns.items() if name in numbers]
        table.add_row(str(k), *told)
    out.print(table)
    out.print(f"the same parameters as in one process, to the last bit: [bold]{'yes' if outcome.same else 'no'}[/]")
    raise typer.Exit(0 if outcome.same else 1)


def _range(experiment: Experiment) -> str:
    rounds = {arm.rounds or experiment.rounds for arm in experiment.arms}
    return f"{min(rounds)} to {max(rounds)}" if len(rounds) > 1 else str(*rounds)


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not (high.isdecimal() and int(low) <= int(high))):
            raise FipaError(f"--seeds {text}: write numbers and ranges, as 0,1,2 or 0-4")
        found += range(int(low), int(high) + 1) if dash else [int(low)]
    return found


def _execute(job: Run, tensorboard: bool, with_report: bool, as_json: bool, quiet: bool) -> None:
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


def entry() -> None:
    """Run the command; turn our own errors into one line and an exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore Ctrl-C
    try:
        app()
    except FipaError as error:
        err.print("[red]error[/]", escape(str(error)), highlight=False, soft_wrap=True)
        sys.exit(Exit.USAGE)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
