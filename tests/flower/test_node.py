"""Nodes with an objective, and strategies of one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fipa
from fipa.flower import FIPA, client
from fipa.flower.local import LocalGrid
from fipa.flower.strategy import Limits

NODES = 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(partition: int) -> tuple[Tensor, Tensor]:
    """Most of the examples are of one class, another for each node."""
    rng = torch.Generator().manual_seed(partition)
    y = torch.where(torch.rand(60, generator=rng) < 0.8, partition % 3, torch.randint(3, (60,), generator=rng))
    return torch.randn(60, 4, generator=rng) + 1.5 * torch.eye(4)[y], y


def objective(context: Context) -> tuple[nn.Module, Any, str]:
    return network(), data(int(context.node_config["partition-id"])), "cross_entropy"


def run(strategy: FIPA, rounds: int = 6) -> dict[int, Any]:
    grid = LocalGrid(client(ClientApp(), objective=objective), NODES)
    result = strategy.start(grid, ArrayRecord(network().state_dict()), rounds)
    return {k: dict(numbers) for k, numbers in result.train_metrics_clientapp.items()}


@pytest.mark.parametrize("local", [fipa.GaussNewton(), fipa.FullGradient()])
def test_one_line_is_a_method_that_wins(local: fipa.LocalRule) -> None:
    first_order = run(FIPA(fipa.FedAvg(), local=fipa.SGD(lr=0.1, epochs=2, batch=10), fraction_evaluate=0.0))
    rounds = run(FIPA(local=local, fraction_evaluate=0.0))
    losses = [numbers["loss"] for numbers in rounds.values()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < first_order[6]["loss"]


def test_the_shared_basis_is_cheap_where_own_sketches_are_not() -> None:
    sketches, shared = (
        run(FIPA(local=local, fraction_evaluate=0.0)) for local in (fipa.GaussNewton(), fipa.FullGradient())
    )
    up = [sum(numbers["uplink-bytes"] for numbers in rounds.values()) for rounds in (sketches, shared)]
    assert up[1] < up[0] / 3


def test_clients_that_send_gradients_are_controlled_by_a_trust_region() -> None:
    stage = FIPA(local=fipa.FullGradient()).arm(3).stages[0]
    assert (stage.rule, stage.control) == (fipa.SharedFIPA(), fipa.TrustRegion())
    free = FIPA(fipa.SharedFIPA(damping=0.3), local=fipa.FullGradient(), control=False).arm(3).stages[0]
    assert (free.rule, free.control) == (fipa.SharedFIPA(damping=0.3), None)


def test_some_of_many_with_a_memory() -> None:
    rounds = run(FIPA(local=fipa.FullGradient(), fraction_train=0.4, min_train_nodes=2, fraction_evaluate=0.0), 12)
    assert {numbers["trips"] for numbers in rounds.values()} == {2}
    assert rounds[12]["loss"] < 0.6 * rounds[1]["loss"]


def test_a_warm_up_within_the_strategy_is_remembered() -> None:
    strategy = FIPA(
        local=fipa.FullGradient(), warmup_rounds=2, warmup_local=fipa.SGD(lr=0.1, epochs=1, batch=10),
        fraction_evaluate=0.0,
    )  # fmt: skip
    rounds = run(strategy, 3)
    theta = sum(t.numel() for t in network().state_dict().values())
    new = 2 * ((theta + 1) // 2 * NODES + 4 * NODES**2)  # the last update and the gradient of each, in 4 bits; roots
    model, trials = NODES * theta * 4, rounds[3]["trials"]
    assert rounds[3]["downlink-bytes"] == (2 + trials) * model + NODES * new


def test_gradients_may_have_any_length() -> None:
    assert Limits().longest(torch.ones(4), fipa.FullGradient()) == Limits().curvature
