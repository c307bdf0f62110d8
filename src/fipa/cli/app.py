"""All commands. A new one is a function in a file of its own, and one line here."""

from __future__ import annotations

from typing import Annotated

import typer

from fipa import __version__
from fipa.cli import data, deploy, doctor, experiments, runs
from fipa.serve.command import serving

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Second-order aggregation for federated learning."""
    if version:
        print(__version__)
        raise typer.Exit


# in the order of `fipa --help`; files of commands import nothing that takes long, but inside of functions
app.command("list")(experiments.list_experiments)
app.command()(experiments.show)
app.command()(runs.run)
app.command()(runs.resume)
app.command()(runs.report)
app.command("serve")(serving)
app.add_typer(data.app, name="data")
app.command("deploy-demo")(deploy.deploy_demo)
app.command()(doctor.doctor)
