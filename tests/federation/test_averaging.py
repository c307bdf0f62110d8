"""The mean of an arm's last models, evaluated beside the model itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from federation.cases import alike, run, stage
from fipa import FedAvg
from fipa.federation.arm import Arm
from fipa.federation.parameters import mean_of, save_theta

ROUNDS = 6
ARM = Arm("a", (stage(FedAvg(), rounds=ROUNDS),), average=3)


@pytest.mark.parametrize("centralised", [False, True])
def test_it_is_the_mean_of_the_last_models(centralised: bool) -> None:
    problem = alike(0)
    rounds = run(replace(ARM, centralised=centralised), alike)
    thetas = [state.theta for state, _ in rounds]
    for k, (state, record) in enumerate(rounds):
        last = thetas[max(0, k - 2) : k + 1]
        assert [t.tolist() for t in state.recent] == [t.tolist() for t in last]
        assert record["averaged_metric"] == pytest.approx(problem.evaluate(torch.stack(last).mean(dim=0)), rel=1e-12)
        assert (record["averaged_metric"] == record["metric"]) == (k == 0)


def test_none_is_kept_without_it() -> None:
    rounds = run(replace(ARM, average=0), alike)
    assert all(record["averaged_metric"] is None and state.recent == () for state, record in rounds)
    averaged = run(ARM, alike)
    assert [record["metric"] for _, record in rounds] == [record["metric"] for _, record in averaged]


def test_it_is_evaluated_where_the_model_is() -> None:
    every = Arm("a", (stage(FedAvg(), rounds=ROUNDS, evaluate_every=4),))
    found = [record["averaged_metric"] for _, record in run(every, alike)]
    assert [value is not None for value in found] == [False, False, False, True, False, True]


def test_models_of_a_warm_up_do_not_count(tmp_path: Path) -> None:
    save_theta(tmp_path / "theta.safetensors", alike(0).initial)
    arm = replace(ARM, after=4, start=str(tmp_path / "theta.safetensors"))
    assert [len(state.recent) for state, _ in run(arm, alike)] == [1, 2, 3, 3, 3, 3]


def test_sums_are_in_double_precision_and_in_order() -> None:
    models = [torch.tensor([1.0, 1e8]), torch.tensor([2.0**-24, 1.0]), torch.tensor([2.0**-24, -1e8])]
    found = mean_of(models)
    assert found.dtype == torch.float32
    assert found.tolist() == [torch.tensor((1 + 2.0**-23) / 3).item(), torch.tensor(1 / 3).item()]
