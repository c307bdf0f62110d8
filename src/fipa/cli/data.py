"""`fipa data list` and `fipa data get`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fipa.cli import Exit
from fipa.cli.common import Json, Quiet, Root, err, out

app = typer.Typer(no_args_is_help=True, help="List and download image sets.")


@app.command("list")
def list_sets(root: Root = None, as_json: Json = False) -> None:
    """List image sets, and whether they are here."""
    from rich.markup import escape
    from rich.table import Table

    from fipa.data import registry

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


@app.command("get")
def get_set(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `fipa data list`.")],
    root: Root = None,
    quiet: Quiet = False,
) -> None:
    """Download a set, or resume its download, and unpack it."""
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from fipa.data import registry

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=out, disable=quiet or not out.is_terminal) as bar:
            task = bar.add_task(name, total=None)
            folder = registry.get(name, root, lambda done, total: bar.update(task, completed=done, total=total))
    except KeyboardInterrupt:
        err.print("stopped; the same command resumes it")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if not quiet:
        out.print(f"{name} is in [bold]{escape(str(folder))}[/]", soft_wrap=True)
