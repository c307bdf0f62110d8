"""What commands share: two consoles, and options that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fipa.shipped import names

out = Console()
err = Console(stderr=True)


def fail(message: str) -> None:
    """Print an error in one line, as wide as it is."""
    err.print("[red]error[/]", escape(message), highlight=False, soft_wrap=True)


def _names(incomplete: str) -> list[str]:
    """Shipped experiments that begin so, for the shell to complete."""
    return [name for name in names() if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT", help="A name from `fipa list`, a .toml file, or a .py file.", autocompletion=_names
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: problem.samples=100, or 'arms.*.rounds=5'."),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON to standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no table.")]
Root = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder with the image sets; FIPA_DATA or ./data by default."),
]
