"""Ways to use it wrongly: each has a clear error, and none that one client makes stops the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

import fipa
from fipa.errors import FipaError
from fipa.federation.safety import Safety
from fipa.flower import FIPA, SecureFIPA, client, reply
from fipa.flower.local import LocalGrid
from flower.cases import app, data, initial, network, same, tensors, train

QUIET = {"fraction_evaluate": 0.0}
Change = Callable[[Message, Context, nn.Module, Any], Message]


def app_with(answer: Change, judge: Any = None, make: Any = network, only: int | None = None) -> ClientApp:
    """An app whose train function ends in `answer` (of one client, or of all), and its evaluation in `judge`."""
    made = client(ClientApp())

    def loaded(message: Message) -> nn.Module:
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    @made.train()
    def _(message: Message, context: Context) -> Message:
        partition, model = int(context.node_config["partition-id"]), loaded(message)
        x, y = data(partition)
        train(model, x, y, lr=0.1 * message.content["config"].get("lr-scale", 1.0))
        if only in (None, partition):
            return answer(message, context, model, (x, y))
        return reply(message, context, model, (x, y))

    if judge is not False:

        @made.evaluate()
        def _(message: Message, context: Context) -> Message:
            model, (x, y) = loaded(message), data(int(context.node_config["partition-id"]))
            loss = float(cross_entropy(model(x), y).detach())
            numbers = {"loss": loss} if judge is None else judge(loss)
            return Message(RecordDict({"metrics": MetricRecord(numbers | {"num-examples": len(y)})}), reply_to=message)

    return made


def good(message: Message, context: Context, model: nn.Module, xy: Any) -> Message:
    return reply(message, context, model, xy)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_scale": -1}, r"FIPA\(lr_scale=-1\): must be a positive number"),
        ({"lr_scale": float("nan")}, "lr_scale=nan"),
        ({"deadline": -5}, r"FIPA\(deadline=-5\): seconds must be a number, not negative"),
        ({"grace": "long"}, "grace='long'"),
        ({"quorum": 1.5}, "quorum=1.5.* above 0 and at most 1"),
        ({"late": 0}, "late=0.* above 0 and at most 1"),
        ({"warmup_rounds": 2.5}, "warmup_rounds=2.5.* whole number"),
        ({"rank": 0}, "rank=0.* whole number of at least 1"),
        ({"labels": -1}, "labels=-1"),
        ({"examples": 0}, "examples=0"),
        ({"examples": 10, "plan": fipa.SketchPlan()}, "give plan=... instead"),
        ({"rank": 3, "rule": fipa.FedAvg()}, r"FIPA\(rank=...\) is for the sketches"),
        ({"rank": 3, "local": fipa.FullGradient()}, r"share a basis: .* FIPA\(fipa.SharedFIPA\(columns=...\)"),
        ({"warmup_rounds": 2, "local": fipa.GaussNewton()}, r"in the warm-up, too, as warmup_local=fipa.SGD"),
        ({"warmup_local": fipa.SGD(0.1, 1)}, r"warmup_local=...\) is for a warm-up, and there is none"),
        ({"warmup_rule": fipa.FedAvg()}, "give warmup_rounds=..."),
        ({"lr_scale": 0.1, "local": fipa.FullGradient()}, "take one step, without a learning rate"),
        ({"rule": fipa.CompletedFIPA}, "is not a rule: make one"),
        ({"validate": 5}, "is not a function of the arrays"),
        ({"control": "on"}, "control='on'.* takes StepControl or TrustRegion or bool"),
        ({"safety": 3}, "takes Safety or bool"),
        ({"keep": -1}, "keep=-1"),
        ({"stop_after": -1}, "stop_after=-1"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"precision": "int4"}, "there is no precision"),
        ({"params": ["2.*", "0.wieght"]}, "'0.wieght' matches no parameter.* did you mean '0.weight'"),
        ({"params": []}, "params is empty"),
    ],
)
def test_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FipaError, match=words):
        FIPA(**settings, **QUIET).start(LocalGrid(app(), 2), initial(), 1)


def test_more_settings() -> None:
    with pytest.raises(FipaError, match="slower is at least 1"):
        Safety(slower=0.5)
    with pytest.raises(FipaError, match="num_rounds=0"):
        FIPA(**QUIET).start(LocalGrid(app(), 2), initial(), 0)
    with pytest.raises(FipaError, match="SecureFIPA takes no control"):
        SecureFIPA(control=True)
    with pytest.raises(FipaError, match=r"client.* takes a .*ClientApp, got a type"):
        client(ClientApp)  # type: ignore[arg-type]
    with pytest.raises(FipaError, match="objective is a function"):
        client(ClientApp(), objective=(network(), data(0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda m, c, net, xy: reply(m, c, net, xy, num_examples=0), "num-examples = 0, expected a whole number"),
        (lambda m, c, net, xy: reply(m, c, net, xy, {"num-examples": 2.5}), "num-examples = 2.5"),
        (lambda m, c, net, xy: reply(m, c, net, xy, loss="hinge"), "reply.loss='hinge'.: choose one of"),
        (lambda m, c, net, xy: reply(m, c, net, [], num_examples=3), "there is no batch in it"),
        (lambda m, c, net, xy: reply(m, c, net, 7, num_examples=3), "a int has no batches"),
        (lambda m, c, net, xy: reply(m, c, net, [(*xy, xy[1])]), "a batch of 3 parts: .* forward="),
        (lambda m, c, net, xy: reply(m, c, net, [{"label": xy[1]}]), "has no tensor that could go into the model"),
        (lambda m, c, net, xy: reply(m, c, net, [{"a": xy[0], "b": xy[0]}]), "unexpected keyword argument"),
        (lambda m, c, net, xy: reply(m, c, nn.Linear(4, 3), xy), "no parameter of this model|of another"),
        (lambda m, c, net, xy: reply(m, c, net.requires_grad_(False), xy), "no parameter of this model requires"),
        (lambda m, c, net, xy: Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), reply_to=m),
         "did not end with `return fipa.flower.reply"),
        (lambda m, c, net, xy: ruined(m, c, net, xy), "left the finite numbers: lower the learning rate"),
    ],
)  # fmt: skip
def test_clients_that_answer_wrongly_are_refused_and_the_others_go_on(answer: Change, words: str) -> None:
    strategy = FIPA(**QUIET)
    result = strategy.start(LocalGrid(app_with(answer, only=1), 3), initial(), 1)
    (event,) = [event for event in strategy.events if event["client"] == 1]
    assert re.search(words, event["text"])
    assert result.train_metrics_clientapp[1]["clients"] == 2
    assert result.train_metrics_clientapp[1]["refused"] == 1


def ruined(message: Message, context: Context, model: nn.Module, xy: Any) -> Message:
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    return reply(message, context, model, xy)


def test_all_of_them_stop_the_run_with_their_own_words_uncut() -> None:
    long = "no such file: " + "x" * 3000 + " the end"

    def crash(*_: Any) -> Message:
        raise RuntimeError(long)

    with pytest.raises(FipaError, match="3 rounds in a row were of no use") as caught:
        FIPA(**QUIET).start(LocalGrid(app_with(crash), 2), initial(), 10)
    assert long in str(caught.value)


def test_a_quorum_that_is_never_met_stops_the_run() -> None:
    grid = LocalGrid(app(), 3, lambda message, k: None if k == 2 and "config" in message.content else 0)
    strategy = FIPA(deadline=0.0, grace=0.0, quorum=1.0, stop_after=2, **QUIET)
    with pytest.raises(FipaError, match=r"client 2: node 102 did not answer in time(.|\n)*fewer than the quorum"):
        strategy.start(grid, initial(), 10, timeout=0.2)
    assert len(strategy.records) == 2


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (False, "evaluate"),
        (lambda loss: {"accuracy": 1.0}, "expected one name with .loss. in it"),
        (lambda loss: {"train_loss": loss, "test_loss": loss}, r"name it with FIPA\(loss_name=...\)"),
        (lambda loss: {"loss": [loss]}, "expected a number"),
    ],
)
def test_apps_that_do_not_tell_their_loss(judge: Any, words: str) -> None:
    strategy = FIPA(stop_after=1, **QUIET)
    with pytest.raises(FipaError, match=r"give their apps an @app.evaluate\(\) function that returns a loss") as caught:
        strategy.start(LocalGrid(app_with(good, judge), 2), initial(), 3)
    assert re.search(words, str(caught.value))


def test_a_loss_by_name_or_by_the_server_is_enough() -> None:
    both = app_with(good, lambda loss: {"train_loss": 0.0, "test_loss": loss})
    named = FIPA(loss_name="test_loss", **QUIET).start(LocalGrid(both, 2), initial(), 2)
    assert named.train_metrics_clientapp[2]["loss-after"] < named.train_metrics_clientapp[1]["loss"]
    x, y = data(1)

    def validate(arrays: ArrayRecord) -> float:
        model = network()
        model.load_state_dict(arrays.to_torch_state_dict())
        return float(cross_entropy(model(x), y).detach())

    result = FIPA(validate=validate, **QUIET).start(LocalGrid(app_with(good, False), 2), initial(), 2)
    train_metrics = result.train_metrics_clientapp
    assert validate(result.arrays) == pytest.approx(train_metrics[2]["loss-after"])
    assert train_metrics[2]["loss-after"] <= train_metrics[1]["loss"] == pytest.approx(validate(initial()))
    with pytest.raises(FipaError, match="must return the loss as a number"):
        FIPA(validate=lambda arrays: None, stop_after=1, **QUIET).start(LocalGrid(app(), 2), initial(), 1)


def test_a_learning_rate_that_nobody_scales() -> None:
    def fixed(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = data(int(context.node_config["partition-id"]))
        train(model, x, y, lr=0.1)
        return reply(message, context, model, (x, y))

    deaf = client(ClientApp())
    deaf.train()(fixed)
    strategy = FIPA(fipa.FedAvg(), lr_scale=0.1, stop_after=1, **QUIET)
    with pytest.raises(FipaError, match=r'did not read it: take it from message.content\["config"\]\["lr-scale"\]'):
        strategy.start(LocalGrid(deaf, 2), initial(), 1)
    with pytest.raises(FipaError, match=r'\["config"\]\["lr"\]'):
        strategy.start(LocalGrid(deaf, 2), initial(), 1, train_config=ConfigRecord({"lr": 0.1}))


def test_the_learning_rate_of_the_train_config_is_scaled() -> None:
    seen = []

    def answer(message: Message, context: Context, model: nn.Module, xy: Any) -> Message:
        seen.append((message.content["config"]["lr"], message.content["config"]["lr-scale"]))
        return reply(message, context, model, xy)

    config = ConfigRecord({"lr": 0.5})
    FIPA(fipa.FedAvg(), lr_scale=0.1, **QUIET).start(LocalGrid(app_with(answer), 2), initial(), 1, train_config=config)
    assert seen == [(0.05, 1.0)] * 2


def test_subclasses() -> None:
    class Mine(FIPA):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return None

    with pytest.raises(FipaError, match=r"Mine.aggregate_train would never be called"):
        Mine()

    rates = []

    def answer(message: Message, context: Context, model: nn.Module, xy: Any) -> Message:
        rates.append(message.content["config"]["lr"])
        return reply(message, context, model, xy)

    class Loop(FIPA):
        """With a `start` that is written after Flower's."""

        def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, **_: Any) -> Any:
            arrays = initial_arrays
            for k in range(1, num_rounds + 1):
                messages = self.configure_train(k, arrays, ConfigRecord(), grid)
                arrays, metrics = self.aggregate_train(k, grid.send_and_receive(messages))  # type: ignore[assignment]
                assert metrics is not None
            return arrays

    class Schedule(Loop):
        """Halves the learning rate in round 2, as the strategy in Flower's advanced example does."""

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            config["lr"] = 0.1 if server_round == 1 else 0.05
            return super().configure_train(server_round, arrays, config, grid)

    class Meddling(Loop):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            return super().configure_train(server_round, initial(), config, grid)

    Schedule(fipa.FedAvg(), **QUIET).start(LocalGrid(app_with(answer), 2), initial(), 2)
    assert rates == [0.1, 0.1, 0.05, 0.05]
    with pytest.raises(FipaError, match="round 2: configure_train was given other arrays"):
        Meddling(fipa.FedAvg(), **QUIET).start(LocalGrid(app(), 2), initial(), 2)
    ours = FIPA(**QUIET).start(LocalGrid(app(), 3), initial(), 3).arrays
    assert same(Loop(**QUIET).start(LocalGrid(app(), 3), initial(), 3), ours)
    with pytest.raises(FipaError, match="comes after configure_train"):
        FIPA().aggregate_train(1, [])


def test_models_in_half_precision() -> None:
    def half() -> nn.Module:
        return network().half()

    made = client(ClientApp())

    @made.train()
    def _(message: Message, context: Context) -> Message:
        model = half().float()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = data(int(context.node_config["partition-id"]))
        train(model, x, y)
        return reply(message, context, model.half(), (x, y))

    result = FIPA(fipa.CompletedFIPA(1.0), **QUIET).start(LocalGrid(made, 2), initial(half), 1)
    assert all(tensor.dtype == torch.float16 for tensor in tensors(result.arrays).values())
    assert not same(result.arrays, initial(half))
    assert result.train_metrics_clientapp[1]["clients"] == 2


def test_models_in_bfloat16_which_flower_cannot_send() -> None:
    made = client(ClientApp())

    def loaded(message: Message) -> nn.Module:
        model = network().bfloat16()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    @made.train()
    def _(message: Message, context: Context) -> Message:
        x, y = data(int(context.node_config["partition-id"]))
        model = loaded(message)
        train(model, x.bfloat16(), y, lr=0.5)
        return reply(message, context, model, (x, y))

    @made.evaluate()
    def _(message: Message, context: Context) -> Message:
        x, y = data(int(context.node_config["partition-id"]))
        numbers = {"loss": float(cross_entropy(loaded(message)(x.bfloat16()).float(), y)), "num-examples": len(y)}
        return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)

    result = FIPA(**QUIET).start(LocalGrid(made, 3), initial(), 4)
    rounds = result.train_metrics_clientapp
    assert {(numbers["clients"], numbers["refused"]) for numbers in rounds.values()} == {(3, 0)}
    assert rounds[4]["loss-after"] < 0.8 * rounds[1]["loss"]
    assert all(tensor.dtype == torch.float32 for tensor in tensors(result.arrays).values())
