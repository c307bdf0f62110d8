"""The strategy on a real deployment: TLS, authenticated nodes, processes that are killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fipa.federation.parameters import load_theta
from fipa.flower.demo import changes, engine, write_app
from fipa.flower.deployment import Deployment

ROUNDS = 2


def progress(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True) if file.exists() else {"round_number": 0}


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.1)


@pytest.mark.deployment
def test_the_life_of_a_deployment(tmp_path: Path) -> None:
    """A run whose SuperLink is killed, then one that loses a node: one deployment, since starting it takes long."""
    app, theta = write_app(tmp_path / "app"), tmp_path / "theta.safetensors"

    def config(name: str, **more: Any) -> dict[str, Any]:
        files = {"checkpoint": str(tmp_path / f"{name}.pt"), "output": str(theta)}
        return {"set": ";".join(changes(3)), "rounds": ROUNDS, "min-available-nodes": 3, **files, **more}

    with Deployment(nodes=3, logs=tmp_path) as deployment:
        deployment.submit(app, config("killed"))
        until(lambda: progress(tmp_path / "killed.pt")["round_number"] >= 1)
        deployment.kill_superlink()
        before = progress(tmp_path / "killed.pt")["round_number"]
        assert 1 <= before < ROUNDS
        deployment.start_superlink()
        log = deployment.run(app, config("killed"))
        assert f"going on after round {before}" in log
        assert progress(tmp_path / "killed.pt")["round_number"] == ROUNDS
        assert torch.equal(load_theta(theta), engine(changes(3), ROUNDS))

        run = deployment.submit(app, config("lost", deadline=10.0, **{"min-available-nodes": 2}))
        until(lambda: progress(tmp_path / "lost.pt")["round_number"] >= 1)
        deployment.kill_node(2)
        deployment.wait(run)
        clients = [m["clients"] for m in progress(tmp_path / "lost.pt")["metrics"]["train_metrics_clientapp"].values()]
        assert clients[-1] == 2  # the first round may have gone on with the quorum, too, on a slow machine
        assert len(clients) == ROUNDS

        deployment.start_node(3, registered=False)
        assert deployment.exit_code(3) not in (0, None)


@pytest.mark.long
@pytest.mark.parametrize("clients", [2, 3])
def test_the_demo_is_an_experiment(clients: int) -> None:
    assert engine(changes(clients), 1).isfinite().all()
