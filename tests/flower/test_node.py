"""Nodes with an objective, and strategies of one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fipa
from fipa.aggregation.shared import PARTS
from fipa.errors import FipaError
from fipa.flower import FIPA, SecureFIPA, client
from fipa.flower.local import LocalGrid
from fipa.flower.strategy import Limits

NODES = 5


def network() -> nn.Module:
    torch.default_generator.manual_seed(0)
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


def test_another_run_in_the_same_process_asks_for_the_objective_again() -> None:
    """Its partitions, or the data, may be others."""
    sizes: list[int] = []

    def counted(context: Context) -> tuple[nn.Module, Any, str]:
        sizes.append(int(context.node_config["num-partitions"]))
        return objective(context)

    app = client(ClientApp(), objective=counted)
    for nodes in (2, 3):
        FIPA(fraction_evaluate=0.0).start(LocalGrid(app, nodes), ArrayRecord(network().state_dict()), 1)
    assert sizes.count(3) >= 3


@pytest.mark.parametrize("local", [fipa.GaussNewton(), fipa.FullGradient()])
def test_one_line_is_a_method_that_wins(local: fipa.LocalRule) -> None:
    first_order = run(FIPA(fipa.FedAvg(), local=fipa.SGD(lr=0.1, epochs=2, batch=10), fraction_evaluate=0.0))
    rounds = run(FIPA(local=local, fraction_evaluate=0.0))
    losses = [numbers["loss"] for numbers in rounds.values()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < first_order[6]["loss"]


def test_the_shared_basis_is_cheap_where_own_sketches_are_not() -> None:
    strategies = (
        FIPA(local=fipa.GaussNewton(), fraction_evaluate=0.0),
        FIPA(fipa.SharedFIPA(parts=1), local=fipa.FullGradient(), fraction_evaluate=0.0),
        FIPA(fipa.SharedFIPA(parts=0, bits=32), local=fipa.FullGradient(), fraction_evaluate=0.0),
    )
    rounds = [run(strategy) for strategy in strategies]
    sketches, coded, exact = (sum(numbers["uplink-bytes"] for numbers in one.values()) for one in rounds)
    assert coded < sketches / 4
    assert coded < exact / 2.9


def test_columns_of_2_bits_save_downlink() -> None:
    """Nodes that keep a copy of the basis agree on it, or they would be sent all of it again."""
    fine, rough = (
        run(FIPA(fipa.SharedFIPA(column_bits=bits), local=fipa.FullGradient(), fraction_evaluate=0.0))
        for bits in (4, 2)
    )
    down = [sum(numbers["downlink-bytes"] for numbers in one.values()) for one in (fine, rough)]
    assert down[1] < 0.97 * down[0]  # of 67 parameters, models and roots are most of it
    assert rough[6]["loss"] < 1.2 * fine[6]["loss"]


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
    columns = (3, PARTS * NODES)  # nine tenths of the last updates of all, and then the parts of their gradients
    new = sum((theta + 1) // 2 * n + 4 * n**2 for n in columns)  # in 4 bits; roots
    model, trials = NODES * theta * 4, rounds[3]["trials"]
    assert rounds[3]["downlink-bytes"] == (1 + trials) * model + NODES * new


def test_gradients_may_have_any_length() -> None:
    assert Limits().longest(torch.ones(4), fipa.FullGradient()) == Limits().curvature


def test_apps_without_functions_of_their_own_evaluate_by_their_objective() -> None:
    strategy = FIPA(fipa.FedAvg(), local=fipa.SGD(lr=0.1, epochs=1, batch=10))
    grid = LocalGrid(client(ClientApp(), objective=objective), NODES)
    result = strategy.start(grid, ArrayRecord(network().state_dict()), 1)
    model = network()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    expected = {"loss": 0.0, "accuracy": 0.0}
    for x, y in map(data, range(NODES)):
        z = model(x).detach()
        expected["loss"] += float(nn.functional.cross_entropy(z, y)) / NODES
        expected["accuracy"] += float((z.argmax(1) == y).float().mean()) / NODES
    assert dict(result.evaluate_metrics_clientapp[1]) == pytest.approx(expected)


def test_an_evaluate_function_of_the_apps_own_comes_first() -> None:
    app = client(ClientApp(), objective=objective)

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        reply.content["metrics"]["seen"] = 7.0
        return reply

    @app.evaluate(mods=[mod])
    def _(message: Message, _: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 5.0, "num-examples": 1})}), reply_to=message)

    strategy = FIPA(fipa.FedAvg(), local=fipa.SGD(lr=0.1, epochs=1, batch=10))
    result = strategy.start(LocalGrid(app, NODES), ArrayRecord(network().state_dict()), 1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"loss": 5.0, "seen": 7.0}
    with pytest.raises(ValueError, match="two functions are registered"):
        app.evaluate()(lambda message, context: message)


def test_by_default_clients_with_an_objective_share_a_basis() -> None:
    strategy = FIPA(fraction_evaluate=0.0)
    rounds = run(strategy, 3)
    assert strategy.rule == fipa.SharedFIPA()
    assert rounds[3]["loss"] < 0.8 * rounds[1]["loss"]
    assert run(FIPA(local=fipa.FullGradient(), fraction_evaluate=0.0), 3)[3]["loss"] == rounds[3]["loss"]


def test_what_was_decided_holds_after_a_restart(tmp_path: Any) -> None:
    """A node that has joined without an objective does not change the rule of a run that resumes."""
    file = tmp_path / "state"
    run(FIPA(fraction_evaluate=0.0, checkpoint=file), 2)
    strategy = FIPA(fraction_evaluate=0.0, checkpoint=file)
    strategy._roster.all_have = lambda what, nodes: False  # type: ignore[method-assign]
    assert 3 in run(strategy, 3)
    assert strategy.rule == fipa.SharedFIPA()


def test_an_app_that_trains_by_itself_does_so_also_with_an_objective() -> None:
    app = client(ClientApp(), objective=objective)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise RuntimeError("this is the app's own training")

    strategy = FIPA(stop_after=1, fraction_evaluate=0.0)
    with pytest.raises(FipaError, match="this is the app's own training"):
        strategy.start(LocalGrid(app, NODES), ArrayRecord(network().state_dict()), 1)


@pytest.mark.parametrize(
    "settings", [{"rank": 5}, {"lr_scale": 0.5}, {"warmup_rounds": 1}, {"control": False}, {"safety": False}]
)
def test_an_objective_is_not_trained_on_by_an_app_that_has_no_train_function(settings: dict[str, Any]) -> None:
    """Whoever says how apps are to train gets no other training instead."""
    strategy = FIPA(stop_after=1, fraction_evaluate=0.0, **settings)
    with pytest.raises(FipaError, match=r"no @app.train\(\) function: .* FIPA\(local=...\)"):
        run(strategy, 3)


def test_where_the_server_judges_clients_losses_do_not_count() -> None:
    """All losses are the server's: that of the broadcast model as well as those of what is tried."""
    asked: list[float] = []

    def validate(arrays: ArrayRecord) -> float:
        asked.append(float(len(asked)))
        return 10.0 + asked[-1]  # every model is worse than the one before

    strategy = FIPA(validate=validate, fraction_evaluate=0.0)
    rounds = run(strategy, 1)
    assert strategy.rule == fipa.SharedFIPA()
    assert rounds[1]["accepted"] == 0.0
    assert len(asked) == 1 + rounds[1]["trials"]


def test_curvature_of_an_objective_is_as_cheap_as_that_of_an_app() -> None:
    stage = FIPA(local=fipa.SGD(lr=0.1, epochs=1)).arm(1).stages[-1]
    assert stage.plan == FIPA().arm(1).stages[-1].plan
    assert stage.safety is not None
    rounds = run(FIPA(local=fipa.SGD(lr=0.1, epochs=1, batch=10), fraction_evaluate=0.0), 2)
    assert rounds[2]["train-seconds"] > 0 < rounds[2]["curvature-seconds"]


class Tied(nn.Module):
    """Frozen first layer; the last weight is that of the second, transposed in use."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
        self.last.weight = self.second.weight
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))))


@pytest.mark.parametrize(
    "strategy",
    [
        FIPA(local=fipa.SGD(lr=0.3, epochs=3, batch=10), fraction_evaluate=0.0),
        FIPA(local=fipa.GaussNewton(), fraction_evaluate=0.0),
        FIPA(local=fipa.FullGradient(), fraction_evaluate=0.0),
        FIPA(local=fipa.FullGradient(), params=["second.*", "out.*"], fraction_evaluate=0.0),
        SecureFIPA(local=fipa.SGD(lr=0.3, epochs=3, batch=10)),
        SecureFIPA(local=fipa.SGD(lr=0.3, epochs=3, batch=10), params=["second.*", "out.*"]),
    ],
)
def test_frozen_and_tied_parameters_of_an_objective_stay_so(strategy: FIPA) -> None:
    def tied(context: Context) -> Any:
        return Tied(), data(int(context.node_config["partition-id"]))

    began = Tied().state_dict()
    grid = LocalGrid(client(ClientApp(), objective=tied), NODES)
    after = strategy.start(grid, ArrayRecord(began), 3).arrays.to_torch_state_dict()
    assert torch.equal(after["first.weight"], began["first.weight"])
    assert torch.equal(after["second.weight"], after["last.weight"])
    assert not torch.equal(after["second.weight"], began["second.weight"])
    assert strategy.records[-1].uplink_bytes > 0
    assert not [event for event in strategy.events if "refused" in event["text"]]


@pytest.mark.parametrize(
    "strategy", [FIPA(local=fipa.GaussNewton(), stop_after=1), SecureFIPA(local=fipa.SGD(0.1, 1), stop_after=1)]
)
def test_what_an_objective_cannot_have_is_said(strategy: FIPA) -> None:
    def normalised(context: Context) -> Any:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        return model, data(int(context.node_config["partition-id"]))

    app = client(ClientApp(), objective=normalised)
    with pytest.raises(FipaError, match=r"batch norm.*GroupNorm"):
        strategy.start(LocalGrid(app, NODES), ArrayRecord(normalised(_Zero())[0].state_dict()), 2)


class _Zero:
    node_config = {"partition-id": 0}  # noqa: RUF012


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("local", [fipa.SGD(lr=0.3, epochs=2, batch=10), fipa.FullGradient()])
def test_objectives_in_half_precision_are_computed_in_single(half: torch.dtype, local: fipa.LocalRule) -> None:
    def small(context: Context) -> Any:
        return network().to(half), data(int(context.node_config["partition-id"]))

    grid = LocalGrid(client(ClientApp(), objective=small), NODES)
    strategy = FIPA(local=local, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(network().state_dict()), 3)
    rounds = result.train_metrics_clientapp
    assert {numbers["clients"] for numbers in rounds.values()} == {NODES}
    assert rounds[3]["loss-after"] < rounds[1]["loss"]


def test_by_default_an_app_that_evaluates_judges_by_that() -> None:
    """What clients hold out decides: here every other model is worse, and the one from the server stays."""
    app, asked = client(ClientApp(), objective=objective), []

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        asked.append(context.node_id)
        loss = 1.0 if len(asked) <= NODES else 2.0
        return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": 1})}), reply_to=message)

    strategy = FIPA(fraction_evaluate=0.0)
    start = network().state_dict()
    result = strategy.start(LocalGrid(app, NODES), ArrayRecord(start), 1)
    numbers = result.train_metrics_clientapp[1]
    assert len(asked) == NODES * (1 + int(numbers["trials"]))
    assert numbers["accepted"] == 0.0
    assert all(torch.equal(one, start[name]) for name, one in result.arrays.to_torch_state_dict().items())
    asked.clear()
    told = FIPA(local=fipa.FullGradient(), fraction_evaluate=0.0)  # as said: by the objective
    assert told.start(LocalGrid(app, NODES), ArrayRecord(start), 1).train_metrics_clientapp[1]["accepted"] == 1.0
    assert not asked
