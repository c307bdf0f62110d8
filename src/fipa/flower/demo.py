"""`fipa deploy-demo`: a real deployment on this machine, from keys and certificates to the last round."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fipa.config.load import load
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.parameters import load_theta
from fipa.flower.deployment import Deployment

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
set = ""
rounds = 3
output = ""
checkpoint = ""
deadline = 120.0
quorum = 0.5
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
    """Of a run.

    Attributes
    ----------
    metrics
        Numbers by round: the clients' loss, the error of the fit (`metric`), bytes to the server.
    same
        Whether the parameters are those of the engine in this process, to the last bit.
    """

    metrics: dict[int, dict[str, Any]]
    same: bool


def write_app(folder: Path) -> Path:
    """An app that runs an experiment of this library."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def changes(clients: int) -> list[str]:
    """The demo's interval cut into so many parts, one for each client."""
    edges = [round(k / clients, 6) for k in range(clients + 1)]
    return [f"problem.edges={edges}", "engine.group=1"]


def engine(overrides: list[str], rounds: int) -> torch.Tensor:
    """The parameters that `fipa run` ends with."""
    experiment = load(EXPERIMENT, [*overrides, f"rounds={rounds}"])[1]
    with Executor(experiment.factory()) as executor:
        arms = experiment.build(experiment.factory()(0).least_squares)
        arm = next(arm for arm in arms if arm.name == ARM)
        federation = Federation(arm, 0, executor)
        *_, (state, _) = federation.rounds(federation.start())
    return state.theta


def deploy_demo(nodes: int = 3, rounds: int = 3, say: Callable[[str], None] = print) -> Outcome:
    """Start a SuperLink and SuperNodes with TLS and authentication, run a few rounds, and stop everything."""
    say(f"a SuperLink and {nodes} SuperNodes on loopback, with TLS and a key for every node ...")
    with Deployment(nodes) as deployment:
        app, output = write_app(deployment.folder / "app"), deployment.folder / "theta.safetensors"
        say(f"{rounds} rounds of {ARM!r} of the experiment {EXPERIMENT!r} ...")
        overrides = changes(nodes)
        config = {"set": ";".join(overrides), "rounds": rounds, "output": str(output), "min-available-nodes": nodes}
        deployment.run(app, config)
        theta = load_theta(output)
        history = json.loads(output.with_suffix(".json").read_text("utf-8"))
    say("stopped. The same in this process ...")
    metrics = {int(k): dict(numbers) for k, numbers in history["evaluate_metrics_serverapp"].items()}
    for k, numbers in history["train_metrics_clientapp"].items():
        metrics[int(k)] |= numbers
    return Outcome(metrics, torch.equal(theta, engine(overrides, rounds)))
