"""Experiments give the same parameters, to the last bit, whoever carries the messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fipa.config.load import load
from fipa.errors import FipaError
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.parameters import load_theta, save_theta
from fipa.flower.experiment import client_app, run
from fipa.flower.local import LocalGrid

DEMO = ["engine.group=1", "rounds=3"]
DIGITS = ["engine.group=1", "rounds=2", "warmup.rounds=2"]


def engine(name: str, arm_name: str, overrides: list[str], folder: Path) -> Tensor:
    """The arm as `fipa run` computes it, after its warm-up."""
    experiment = load(name, overrides)[1]
    with Executor(experiment.factory()) as executor:
        least_squares = experiment.factory()(0).least_squares
        arm = next(arm for arm in experiment.build(least_squares) if arm.name == arm_name)
        warmup = experiment.build_warmup(least_squares)
        if warmup is not None:
            start = folder / "start.safetensors"
            save_theta(start, _last(Federation(warmup, 0, executor)))
            arm = arm.__class__(**{**vars(arm), "start": str(start)})
        return _last(Federation(arm, 0, executor))


def _last(federation: Federation) -> Tensor:
    *_, (state, _) = federation.rounds(federation.start())
    return state.theta


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arm", "overrides", "clients"),
    [
        ("demo", "FIPA (paper's rule)", DEMO, 2),
        ("demo", "FIPA completed", DEMO, 2),  # its damping falls from round to round
        ("demo", "FedAvg (server step 2)", DEMO, 2),
        ("digits", "FIPA (paper)", DIGITS, 20),
        ("digits", "FIPA additive", DIGITS, 20),
        ("digits", "FedAdam", [*DIGITS, "arms.*.participation.count=5", "arms.*.participation.kind=uniform",
                               "warmup.participation.count=5", "warmup.participation.kind=uniform"], 20),
    ],
)  # fmt: skip
def test_engine_and_flower_agree_to_the_last_bit(
    name: str, arm: str, overrides: list[str], clients: int, tmp_path: Path
) -> None:
    theta, result = run(LocalGrid(client_app(), clients), name, arm, overrides, output=tmp_path / "theta.safetensors")
    assert torch.equal(theta, engine(name, arm, overrides, tmp_path))
    assert torch.equal(theta, load_theta(tmp_path / "theta.safetensors"))
    assert "metric" in result.evaluate_metrics_serverapp[0]


@pytest.mark.parametrize(
    ("name", "arm", "reason"),
    [
        ("demo", "FIPA controlled", "step_control asks clients again"),
        ("demo", "FIPA", "there is no arm 'FIPA'"),
        ("digits", "SCAFFOLD", "remember things"),
        ("fit-adaptive", None, "adaptive rank asks clients for gradients"),
    ],
)
def test_arms_that_do_not_run_on_flower(name: str, arm: str | None, reason: str) -> None:
    overrides: list[Any] = []
    if arm is None:
        experiment = load(name)[1]
        arm = next(a.name for a in experiment.arms if a.sketch is not None and a.sketch.adaptive is not None)
    with pytest.raises(FipaError, match=reason):
        run(LocalGrid(client_app(), 2), name, arm, overrides)
