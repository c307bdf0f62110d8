"""`fipa deploy-demo`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fipa.cli.common import Json, Overrides, out
from fipa.errors import FipaError, missing


def deploy_demo(
    nodes: Annotated[int, typer.Option(min=2, help="Number of SuperNodes, each with a part of the data.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 3,
    experiment: Annotated[str, typer.Option(help="The experiment, with as many clients as nodes.")] = "demo",
    arm: Annotated[str, typer.Option(help="The arm to run.")] = "FIPA controlled",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Run a few rounds on a real Flower deployment on this machine, with TLS and authenticated nodes, then stop it."""
    from rich.table import Table

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
