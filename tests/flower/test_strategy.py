"""Rounds on a grid in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn

import fipa
from fipa.curvature.registry import kind_of
from fipa.curvature.sketch import SketchPlan
from fipa.errors import FipaError
from fipa.flower import FIPA, client
from fipa.flower.local import LocalGrid
from fipa.flower.request import Request
from flower.cases import app, data, initial, network, refusals, same, tensors, train

QUIET = {"fraction_evaluate": 0.0}


def by_hand(rule: Any, rounds: int, clients: int, **sketch: Any) -> dict[str, torch.Tensor]:
    """The same rounds with the library alone."""
    theta, state = fipa.parameters_of(network()), None
    for _ in range(rounds):
        updates = []
        for k in range(clients):
            model, (x, y) = network(), data(k)
            model.load_state_dict(theta)
            curvature = fipa.sketch(model, (x, y), **sketch) if sketch else None
            train(model, x, y)
            delta = {name: p - theta[name] for name, p in fipa.parameters_of(model).items()}
            updates.append(fipa.ClientUpdate(delta, len(x), curvature, client_id=k))
        result = fipa.aggregate(theta, updates, rule, state)
        theta, state = result.theta, result.state
    return theta


@pytest.mark.parametrize(
    "rule", [fipa.FedAvg(), fipa.FIPA(damping=0.1), fipa.CompletedFIPA(damping=0.1), fipa.FedAvgM(momentum=0.5)]
)
def test_equals_the_library_to_the_last_bit(rule: Any) -> None:
    sketch = {"rank": 10} if "FIPA" in type(rule).__name__ else {}
    plan = SketchPlan(rank=10) if sketch else None
    result = FIPA(rule, plan=plan, **QUIET).start(LocalGrid(app(), 3), initial(), 3)
    expected = by_hand(rule, 3, 3, **sketch)
    assert all(torch.equal(t, expected[name]) for name, t in tensors(result.arrays).items())


def test_fedavg_agrees_with_flowers_own() -> None:
    ours = FIPA(fipa.FedAvg(), **QUIET).start(LocalGrid(app(), 3), initial(), 1)

    # Flower averages what clients send as "arrays": train by hand, and let it do the same
    class Reply:
        def __init__(self, k: int) -> None:
            model, (x, y) = network(), data(k)
            train(model, x, y)
            self.content = {"arrays": ArrayRecord(model.state_dict())}
            self.n = len(x)

    replies = [Reply(k) for k in range(3)]
    total = sum(reply.n for reply in replies)
    for name, tensor in tensors(ours.arrays).items():
        mean = sum(tensors(r.content["arrays"])[name].double() * r.n / total for r in replies)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)
    assert issubclass(FIPA, FlowerFedAvg)


@pytest.mark.parametrize(
    "rule", [fipa.AdditiveFIPA(damping=0.1), fipa.DiagonalFisher(damping=0.1), fipa.FOOF(damping=0.1)]
)
def test_other_curvatures_travel(rule: Any) -> None:
    strategy = FIPA(rule, **QUIET)
    result = strategy.start(LocalGrid(app(), 3), initial(), 2)
    assert not strategy.events
    assert not same(result.arrays, initial())


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_compressed_sketches_take_fewer_bytes_to_about_the_same_place(precision: Any) -> None:
    rule, plan = fipa.FIPA(damping=0.1), SketchPlan(rank=10)
    full = FIPA(rule, plan=plan, **QUIET).start(LocalGrid(app(), 3), initial(), 3)
    small = FIPA(rule, plan=plan, precision=precision, **QUIET).start(LocalGrid(app(), 3), initial(), 3)
    sizes = [result.train_metrics_clientapp[1]["uplink-bytes"] for result in (full, small)]
    assert sizes[1] < {"bfloat16": 0.65, "int8": 0.5}[precision] * sizes[0]
    for name, tensor in tensors(small.arrays).items():
        torch.testing.assert_close(tensor, tensors(full.arrays)[name], atol=0.02, rtol=0.02)


def test_warm_up_then_fipa_with_another_learning_rate() -> None:
    seen = []

    def delay(message: Message, partition: int) -> int:
        if "config" in message.content and message.metadata.message_type == "train":
            seen.append((message.content["config"]["lr-scale"], kind_of(Request.of(message.content).plan)))
        return 0

    FIPA(warmup_rounds=2, lr_scale=0.1, **QUIET).start(LocalGrid(app(), 2, delay), initial(), 4)
    assert seen == [(1.0, "none")] * 4 + [(0.1, "sketch")] * 4


def test_some_parameters_only() -> None:
    strategy = FIPA(params="2.*", **QUIET)
    result = strategy.start(LocalGrid(app(), 2), initial(), 2)
    before, after = tensors(initial()), tensors(result.arrays)
    assert all(torch.equal(before[name], after[name]) == name.startswith("0.") for name in before)
    assert result.train_metrics_clientapp[1]["uplink-bytes"] < 2 * 4 * 18 * 22  # of 43 parameters


def test_frozen_parameters_are_left_alone() -> None:
    def frozen() -> nn.Module:
        model = network()
        model[0].weight.requires_grad_(False)
        return model

    strategy = FIPA(**QUIET)
    result = strategy.start(LocalGrid(app(frozen), 2), initial(), 1)
    before, after = tensors(initial()), tensors(result.arrays)
    assert [name for name in before if torch.equal(before[name], after[name])] == ["0.weight"]
    assert not refusals(strategy)


def test_statistics_of_batchnorm_are_averaged() -> None:
    def normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    result = FIPA(fipa.FedAvg(), **QUIET).start(LocalGrid(app(normed), 2), initial(normed), 1)
    means, counts = [], [len(data(k)[0]) for k in range(2)]
    for k in range(2):
        model, (x, y) = normed(), data(k)
        train(model, x, y)
        means.append(model.state_dict()["1.running_mean"])
    expected = (means[0] * counts[0] + means[1] * counts[1]) / sum(counts)
    torch.testing.assert_close(tensors(result.arrays)["1.running_mean"], expected)


def test_clients_are_drawn_as_in_the_engine_and_metrics_weighted() -> None:
    asked: list[int] = []
    strategy = FIPA(fipa.FedAvg(), fraction_train=0.5, seed=3)
    grid = LocalGrid(app(), 6, lambda message, k: asked.append(k) or 0 if "config" in message.content else 0)
    result = strategy.start(grid, initial(), 1)
    from fipa.federation.participation import Participation

    assert asked[:3] == Participation("uniform", 3).select([1] * 6, 3, 1)
    assert 0 <= result.evaluate_metrics_clientapp[1]["accuracy"] <= 1
    assert result.train_metrics_clientapp[1]["clients"] == 3


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    settings = {"rule": fipa.FedAvgM(momentum=0.9), "seed": 1, "fraction_train": 0.7, **QUIET}
    whole = FIPA(**settings).start(LocalGrid(app(), 4), initial(), 5)
    file = tmp_path / "folder" / "state.pt"
    FIPA(**settings, checkpoint=file).start(LocalGrid(app(), 4), initial(), 2)
    result = FIPA(**settings, checkpoint=file).start(LocalGrid(app(), 4), initial(), 5)
    assert same(result.arrays, whole.arrays)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    with pytest.raises(FipaError, match="was written with seed = 1, now it is 2"):
        FIPA(**settings | {"seed": 2}, checkpoint=file).start(LocalGrid(app(), 4), initial(), 5)
    torch.save({"weights": torch.ones(3)}, file)
    with pytest.raises(FipaError, match="is no checkpoint of FIPA: delete it"):
        FIPA(**settings, checkpoint=file).start(LocalGrid(app(), 4), initial(), 5)
    file.write_bytes(b"no checkpoint")
    with pytest.raises(FipaError, match="cannot be read: delete it"):
        FIPA(**settings, checkpoint=file).start(LocalGrid(app(), 4), initial(), 5)


def test_quorum_deadline_and_dropped_late_answers() -> None:
    strategy = FIPA(fipa.FedAvg(), deadline=0.0, grace=0.0, quorum=0.6, **QUIET)
    grid = LocalGrid(app(), 3, lambda message, k: None if k == 2 and "config" in message.content else 0)
    result = strategy.start(grid, initial(), 2)
    assert [result.train_metrics_clientapp[k]["clients"] for k in (1, 2)] == [2, 2]
    expected = by_hand(fipa.FedAvg(), 2, 2)
    assert all(torch.equal(t, expected[name]) for name, t in tensors(result.arrays).items())


def test_below_the_quorum_the_model_stays() -> None:
    strategy = FIPA(fipa.FedAvg(), deadline=0.0, grace=0.0, quorum=1.0, **QUIET)
    grid = LocalGrid(app(), 3, lambda message, k: None if k == 2 and "config" in message.content else 0)
    result = strategy.start(grid, initial(), 1, timeout=0.2)
    assert same(result.arrays, initial())
    assert "2 of 3 clients answered, fewer than the quorum" in strategy.events[-1]["text"]


@pytest.mark.parametrize("late", [0.5, None])
def test_late_answers_are_used_with_a_discount_or_not_at_all(late: float | None) -> None:
    def delay(message: Message, k: int) -> int:
        return 1 if k == 2 and "config" in message.content and message.content["config"]["server-round"] == 1 else 0

    def second_round_without_client_2(message: Message, k: int) -> int | None:
        lost = k == 2 and "config" in message.content and message.content["config"]["server-round"] == 2
        return None if lost else delay(message, k)

    strategy = FIPA(fipa.FIPA(damping=0.1), plan=SketchPlan(rank=10), deadline=0.0, grace=0.0, late=late, **QUIET)
    result = strategy.start(LocalGrid(app(), 3, second_round_without_client_2), initial(), 2)
    assert result.train_metrics_clientapp[2]["late"] == (1 if late else 0)
    theta = fipa.parameters_of(network())
    old = None
    for k in (1, 2):
        updates = []
        for m in range(3):
            model, (x, y) = network(), data(m)
            model.load_state_dict(theta)
            curvature = fipa.sketch(model, (x, y), rank=10)
            train(model, x, y)
            delta = {name: p - theta[name] for name, p in fipa.parameters_of(model).items()}
            update = fipa.ClientUpdate(delta, len(x), curvature, m)
            if m < 2:
                updates.append(update)
            elif k == 1:
                old = fipa.ClientUpdate(delta, len(x), curvature, m, weight=0.5 * len(x))
        if k == 2 and late:
            updates.append(old)
        theta = fipa.aggregate(theta, updates, fipa.FIPA(damping=0.1)).theta
    assert all(torch.equal(t, theta[name]) for name, t in tensors(result.arrays).items())


def test_a_crash_of_a_client_is_an_event() -> None:
    crashing = client(app.__globals__["ClientApp"]())

    @crashing.train()
    def _(message: Message, context: Any) -> Message:
        raise RuntimeError("out of memory")

    strategy = FIPA(**QUIET)
    result = strategy.start(LocalGrid(crashing, 2), initial(), 1)
    assert same(result.arrays, initial())
    assert len(refusals(strategy)) == 2
    assert "out of memory" in strategy.events[0]["text"]


def test_clients_that_do_not_say_who_they_are() -> None:
    from flwr.clientapp import ClientApp

    with pytest.raises(FipaError, match=r"2 of 2 nodes do not say .* fipa.flower.client\(ClientApp\(\)\)"):
        FIPA(**QUIET).start(LocalGrid(ClientApp(), 2), initial(), 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "int4"},
        {"quorum": 0.0},
        {"late": 2.0},
        {"warmup_rounds": -1},
        {"params": "none"},
        {"params": ["2.*", "none"]},
    ],
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(FipaError):
        FIPA(**settings, **QUIET).start(LocalGrid(app(), 2), initial(), 1)


def test_evaluation_on_the_server() -> None:
    result = FIPA(**QUIET).start(
        LocalGrid(app(), 2), initial(), 2, evaluate_fn=lambda k, arrays: MetricRecord({"round": k})
    )
    assert [result.evaluate_metrics_serverapp[k]["round"] for k in (0, 1, 2)] == [0, 1, 2]


def when(message: Message) -> int:
    return int(message.content["config"]["server-round"]) if "config" in message.content else 0


def test_late_answers_do_not_make_a_quorum() -> None:
    """Round 2: two of four answer at once, a late one of round 1 comes in, a third one only after a while."""

    def delay(message: Message, k: int) -> int | None:
        late = {(1, 3): 1, (2, 2): 3, (2, 3): None}
        return late.get((when(message), k), 0)

    strategy = FIPA(fipa.FedAvg(), deadline=0.0, grace=0.0, quorum=0.75, late=0.5, **QUIET)
    result = strategy.start(LocalGrid(app(), 4, delay), initial(), 2)
    assert [result.train_metrics_clientapp[k]["clients"] for k in (1, 2)] == [3, 3]
    assert result.train_metrics_clientapp[2]["late"] == 1


def test_late_answers_wait_for_a_round_with_a_quorum() -> None:
    def delay(message: Message, k: int) -> int | None:
        return {(1, 2): 1, (2, 1): None, (2, 2): None, (3, 2): None}.get((when(message), k), 0)

    strategy = FIPA(fipa.FedAvg(), deadline=0.0, grace=0.0, quorum=0.6, late=0.5, **QUIET)
    result = strategy.start(LocalGrid(app(), 3, delay), initial(), 3, timeout=0.3)
    metrics = result.train_metrics_clientapp
    assert [metrics[k]["late"] for k in (1, 2, 3)] == [0, 0, 1]
    assert strategy.events[-1]["text"] == "late by 2: used with weight x 0.25"
    assert metrics[2]["uplink-bytes"] == metrics[1]["uplink-bytes"] == 2 * 4 * 43  # the late one travels, too


def test_late_answers_of_the_warm_up_are_not_used_after_it() -> None:
    def delay(message: Message, k: int) -> int | None:
        return {(1, 2): 1, (2, 2): None}.get((when(message), k), 0)

    strategy = FIPA(fipa.FedAvg(), warmup_rounds=1, deadline=0.0, grace=0.0, late=0.5, **QUIET)
    result = strategy.start(LocalGrid(app(), 3, delay), initial(), 2)
    assert result.train_metrics_clientapp[2]["late"] == 0
    assert "its late answer belongs to the last stage: not used" in [event["text"] for event in strategy.events]


@pytest.mark.parametrize(
    "numbers",
    [
        {"accuracy": 1.0, "num-examples": [1, 2]},
        {"accuracy": -5.0, "num-examples": 10**18},
        {"accuracy": 9.5, "num-examples": -69},
        {"accuracy": 1.0},
    ],
)
def test_forged_evaluations_are_refused(numbers: dict[str, Any]) -> None:
    class Forged(LocalGrid):
        def _answer(self, message: Message, node: int) -> Message:
            reply = super()._answer(message, node)
            if node == 102 and message.metadata.message_type == "evaluate":
                reply = Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)
            return reply

    strategy = FIPA(fipa.FedAvg())
    result = strategy.start(Forged(app(), 3), initial(), 1)
    assert 0 <= result.evaluate_metrics_clientapp[1]["accuracy"] <= 1
    assert len(refusals(strategy)) == 1


def test_numbers_that_are_no_numbers_are_left_out_of_means() -> None:
    class Odd(LocalGrid):
        def _answer(self, message: Message, node: int) -> Message:
            reply = super()._answer(message, node)
            if node == 102 and message.metadata.message_type == "evaluate":
                metrics = MetricRecord({"accuracy": float("nan"), "more": [1.0], "num-examples": 3})
                reply = Message(RecordDict({"metrics": metrics}), reply_to=message)
            return reply

    result = FIPA(fipa.FedAvg()).start(Odd(app(), 3), initial(), 1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {}


def test_other_buffers_stay_with_the_clients() -> None:
    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Linear(4, 3))
            self.register_buffer("scale", torch.ones(3))

    strategy = FIPA(params="0.*", **QUIET)
    result = strategy.start(LocalGrid(app(Scaled), 2), initial(Scaled), 1)
    assert not refusals(strategy)
    assert not same(result.arrays, initial(Scaled))


def test_examples_are_counted_in_lists_of_batches() -> None:
    from fipa.flower.client import _length

    x, y = data(0)
    assert _length([(x[:10], y[:10]), (x[10:], y[10:])]) == _length((x, y)) == len(x)
    with pytest.raises(FipaError, match="how many examples"):
        _length(iter([]))
