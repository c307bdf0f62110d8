"""The strategy on a real deployment: TLS, authenticated nodes, processes that are killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fipa.federation.checkpoint import load_state
from fipa.federation.parameters import load_theta
from fipa.flower.demo import ARM, EXPERIMENT, alone, changes, write_app
from fipa.flower.deployment import Deployment

ROUNDS = 2


def rounds(file: Path) -> int:
    saved = load_state(file)
    return 0 if saved is None else saved[0].round_number


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.1)


@pytest.mark.deployment
def test_the_life_of_a_deployment(tmp_path: Path) -> None:
    """A controlled run whose SuperLink is killed within a round, then one that loses a node.

    One deployment, since starting it takes long.
    """
    app, theta = write_app(tmp_path / "app"), tmp_path / "theta.safetensors"
    settings = changes(2, ROUNDS)

    def config(name: str, **more: Any) -> dict[str, Any]:
        files = {"checkpoint": str(tmp_path / f"{name}.pt"), "output": str(theta)}
        chosen = {"experiment": EXPERIMENT, "arm": ARM, "set": ";".join(settings), "min-available-nodes": 2}
        return {**chosen, **files, **more}

    with Deployment(nodes=2, logs=tmp_path) as deployment:
        deployment.submit(app, config("killed"))
        until(lambda: rounds(tmp_path / "killed.pt") >= 1)
        deployment.kill_superlink()  # clients are at work for the second round, or judge its step
        before = rounds(tmp_path / "killed.pt")
        assert 1 <= before < ROUNDS
        deployment.start_superlink()
        log = deployment.run(app, config("killed"))
        assert f"resuming after round {before}" in log
        assert rounds(tmp_path / "killed.pt") == ROUNDS
        assert torch.equal(load_theta(theta), alone(EXPERIMENT, ARM, settings))

        alive = {"deadline": 10.0, "grace": 0.0, "min-available-nodes": 1}
        run = deployment.submit(app, config("lost", arm="FIPA completed", **alive))
        until(lambda: rounds(tmp_path / "lost.pt") >= 1)
        deployment.kill_node(1)
        deployment.wait(run)
        saved = load_state(tmp_path / "lost.pt")
        assert saved is not None
        clients = [m["clients"] for m in saved[1]["metrics"]["train_metrics_clientapp"].values()]
        assert clients[-1] == 1  # the first round may have had a quorum only, too, on a slow machine
        assert len(clients) == ROUNDS


@pytest.mark.long
@pytest.mark.parametrize("clients", [2, 3])
def test_the_demo_is_an_experiment(clients: int) -> None:
    assert alone(EXPERIMENT, ARM, changes(clients, 1)).isfinite().all()
