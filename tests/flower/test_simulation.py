"""Flower's own simulation, with Ray: the engine's parameters to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fipa.federation.parameters import load_theta
from fipa.flower.experiment import client_app, server_app
from flower.test_experiment import DEMO, engine

ray = pytest.importorskip("ray")


@pytest.mark.simulation
def test_simulation_equals_the_engine_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.simulation import run_simulation

    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    file = tmp_path / "theta.safetensors"
    arm = "FIPA (paper's rule)"
    try:
        run_simulation(
            server_app("demo", arm, DEMO, output=str(file)),
            client_app(),
            num_supernodes=2,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": 2, "log_to_driver": False, "include_dashboard": False},
            },
        )
    finally:
        ray.shutdown()
    assert torch.equal(load_theta(file), engine("demo", arm, DEMO, tmp_path))
