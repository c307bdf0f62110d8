"""`fipa deploy-demo`: a real deployment on this machine, from keys and certificates to the last round."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fipa
from fipa.federation.parameters import load_theta
from fipa.flower.deployment import Deployment
from fipa.launch import choose

EXPERIMENT, ARM = "demo", "FIPA controlled"
FILES = {
    "pyproject.toml": """\
[project]
name = "fitting"
version = "1.0.0"
description = "An experiment of fipa on Flower"
license = "Apache-2.0"
dependencies = ["fipa[flower,cli]"]

[tool.flwr.app]
publisher = "fipa"

[tool.flwr.app.components]
serverapp = "fitting.server_app:app"
clientapp = "fitting.client_app:app"

[tool.flwr.app.config]
experiment = ""
arm = ""
set = ""
output = ""
checkpoint = ""
deadline = 120.0
quorum = 0.5
grace = 5.0
min-available-nodes = 2
seed = 0
""",
    "fitting/__init__.py": "",
    "fitting/client_app.py": "from fipa.flower.experiment import client_app\n\napp = client_app()\n",
    "fitting/server_app.py": (
        f"from fipa.flower.experiment import server_app\n\napp = server_app({EXPERIMENT!r}, {ARM!r})\n"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a deployment.

    Attributes
    ----------
    metrics
        Numbers by round: the clients' loss, the error of the fit (`metric`), bytes to the server.
    same
        Whether the parameters are those of a run in this process, to the last bit.
    """

    metrics: dict[int, dict[str, Any]]
    same: bool


def write_app(folder: Path) -> Path:
    """An app that runs an experiment of this library."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def changes(clients: int, rounds: int) -> list[str]:
    """The demo's interval cut into so many parts, one for each client, for so many rounds."""
    edges = [round(k / clients, 6) for k in range(clients + 1)]
    return [f"problem.edges={edges}", *lasting(rounds)]


def lasting(rounds: int) -> list[str]:
    """So many rounds, of clients that are trained one by one, as they are on nodes of their own."""
    return ["engine.group=1", f"rounds={rounds}", f"arms.*.rounds={rounds}"]


def alone(experiment: str, arm: str, overrides: list[str]) -> torch.Tensor:
    """The parameters that `fipa run` ends with."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        return fipa.run(experiment, arms=[arm], seeds=0, set=overrides, out=out, quiet=True).theta(arm)


def deploy_demo(
    nodes: int = 2,
    rounds: int = 3,
    say: Callable[[str], None] = print,
    *,
    experiment: str = EXPERIMENT,
    arm: str = ARM,
    overrides: Sequence[str] = (),
) -> Outcome:
    """Start a SuperLink and SuperNodes with TLS and authentication, run a few rounds, and stop everything.

    Any other experiment must have as many clients as there are nodes: say so in `overrides`.
    """
    settings = [*(changes(nodes, rounds) if experiment == EXPERIMENT else lasting(rounds)), *overrides]
    choose(experiment, overrides=settings, arms=[arm])  # what is misspelt is found before anything starts
    say(f"a SuperLink and {nodes} SuperNodes on loopback, with TLS and a key for every node ...")
    with Deployment(nodes) as deployment:
        app, output = write_app(deployment.folder / "app"), deployment.folder / "theta.safetensors"
        say(f"{rounds} rounds of {arm!r} of the experiment {experiment!r} ...")
        chosen = {"experiment": experiment, "arm": arm, "set": ";".join(settings), "output": str(output)}
        deployment.run(app, chosen | {"min-available-nodes": nodes})
        theta = load_theta(output)
        history = json.loads(output.with_suffix(".json").read_text("utf-8"))
    say("stopped. The same in this process ...")
    metrics = {int(k): dict(numbers) for k, numbers in history["evaluate_metrics_serverapp"].items()}
    for k, numbers in history["train_metrics_clientapp"].items():
        metrics[int(k)] |= numbers
    return Outcome(metrics, torch.equal(theta, alone(experiment, arm, settings)))
