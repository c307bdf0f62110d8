"""Flower's own simulation, with Ray: the parameters of one process to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fipa.federation.parameters import load_theta
from fipa.flower.experiment import run
from flower.test_apps import module, turned
from flower.test_experiment import ARMS, engine

IMPORT = "from fipa.flower.experiment import client_app\n"
CASES = ("scaffold", "head only")  # what clients keep; a frozen part, and steps that they judge


def several(grid: Grid, folder: Path) -> None:
    """One arm after the other."""
    for case in CASES:
        name, arm, overrides, _ = ARMS[case]
        settings = {"fraction_train": 1.0, "min_available_nodes": 4, "output": folder / f"{case}.safetensors"}
        run(grid, name, arm, overrides, **settings)


def simulate(server: ServerApp, client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from flwr.simulation import run_simulation

    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15: beside other tests its actors would hardly run
    monkeypatch.setenv("FLWR_HOME", str(folder / "flwr"))
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "log_to_driver": False, "include_dashboard": False},
    }
    try:
        run_simulation(server, client, num_supernodes=4, backend_config=backend)
    finally:
        ray.shutdown()


@pytest.mark.simulation
def test_an_app_of_a_user_and_experiments_in_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart with dict batches, turned into a FIPA app; then experiments, which its nodes answer as well.

    One simulation, since starting Ray takes long.
    """
    source = turned("quickstart").replace("client(ClientApp())", "client_app()")
    settings = {"examples": 20, "min_available_nodes": 4}
    app, server, found = module(f"{IMPORT}{source}", settings), ServerApp(), {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found["result"] = app.server(grid)
        several(grid, tmp_path)

    simulate(server, app.app, tmp_path, monkeypatch)
    train = found["result"].train_metrics_clientapp
    assert sum(train[k]["refused"] for k in train) == 0
    assert train[3]["loss-after"] < train[1]["loss"]
    assert [train[k]["clients"] for k in train] == [4, 4, 4]
    for case in CASES:
        name, arm, overrides, _ = ARMS[case]
        expected, _ = engine(name, arm, overrides, tmp_path / case)
        assert torch.equal(load_theta(tmp_path / f"{case}.safetensors"), expected), case
