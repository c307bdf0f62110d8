"""Local training against plain loops of torch.optim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clients.cases import DOUBLE, KINDS, at, client, edge, gradient_by_hand, layout_of, misfit, network, objectives
from clients.training import generators, start, trained, trained_by_hand
from fipa import Client, FipaError, Layout, Residual, parameters_of
from fipa.clients.descent import SGD, Adam, Batches, Descent, PlainSGD, descend
from fipa.clients.objective import Objective, StackedObjective, fast_way
from fipa.clients.scaffold import Scaffold
from fipa.models import cnn

RULES = {
    "sgd": (SGD(steps=1), torch.optim.SGD, {}),
    "momentum": (SGD(steps=1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "decay": (SGD(steps=1, weight_decay=0.3), torch.optim.SGD, {"weight_decay": 0.3}),
    "proximal": (SGD(steps=1, proximal=0.7), torch.optim.SGD, {"proximal": 0.7}),
    "adam": (Adam(steps=1), torch.optim.Adam, {}),
    "adam decay proximal": (
        Adam(steps=1, weight_decay=0.3, proximal=0.7),
        torch.optim.Adam,
        {"weight_decay": 0.3, "proximal": 0.7},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_equals_a_plain_loop_of_torch_optim(name: str, kind: str) -> None:
    """Unequal numbers of steps, one client that does not train at all; the learning rate is the argument's."""
    rule, optimizer, settings = RULES[name]
    steps = (6, 0, 3)
    updates = trained(rule, steps, kind=kind)
    for m, count in enumerate(steps):
        expected = trained_by_hand(client(kind, m), optimizer, count, kind=kind, lr=0.05, **settings)
        torch.testing.assert_close(updates[m], expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(updates[1], torch.zeros_like(updates[1]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 1e-3])
def test_plain_sgd_is_torchs_to_the_last_bit(momentum: float, decay: float) -> None:
    ours, theirs = (torch.randn(2, 33, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    by_torch = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, weight_decay=decay)
    plain = PlainSGD(ours, 0.1, momentum, decay)
    for seed in range(4):
        ours.grad = torch.randn(2, 33, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        plain.step()
        by_torch.step()
        assert torch.equal(ours, theirs)


def test_does_not_change_the_broadcast_model() -> None:
    theta = start()
    stack = StackedObjective(objectives(network(), [client("plain", 0)]))
    descend(stack, theta, SGD(steps=1), [3], lr=0.1, generators=generators(1))
    assert torch.equal(theta, start())


# --- bfloat16 ---


@pytest.mark.parametrize("size", [1, 2])
def test_products_in_bfloat16_change_little(size: int) -> None:
    """Alone and side by side, where traces of both kinds are kept apart; parameters stay in single precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    layout, rng = Layout.of(parameters_of(model)), torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 20, generator=rng), torch.randint(4, (16,), generator=rng)) for _ in range(size)]
    stack = StackedObjective([Objective(model, layout, Client(one, loss="cross_entropy")) for one in data])
    theta = layout.flatten(parameters_of(model))

    def updates(bfloat16: bool) -> Tensor:
        rule = SGD(steps=5, bfloat16=bfloat16)
        return descend(stack, theta, rule, [5] * size, lr=0.1, generators=generators(size))

    plain, rough, again = updates(False), updates(True), updates(False)
    assert rough.dtype == torch.float32
    assert torch.equal(plain, again)
    assert 1e-5 < float((rough - plain).norm() / plain.norm()) < 0.05


def test_compiled_loops_stay_as_exact_as_they_are() -> None:
    pytest.importorskip("numba")
    rng = torch.Generator().manual_seed(0)
    model = cnn([4, 8], 8, image=(3, 16), generator=rng)
    layout, data = Layout.of(parameters_of(model)), (torch.randn(6, 3, 16, 16, generator=rng), torch.arange(6))
    stack = StackedObjective([Objective(model, layout, Client(data, loss="cross_entropy"), fast_way(model, layout))])
    theta = layout.flatten(parameters_of(model))
    rules = [SGD(steps=2, bfloat16=bfloat16) for bfloat16 in (False, True)]
    updates = [descend(stack, theta, rule, [2], lr=0.1, generators=generators(1)) for rule in rules]
    assert torch.equal(*updates)


def test_losses_on_features_are_in_single_precision() -> None:
    rng = torch.Generator().manual_seed(0)
    model = cnn([3], 8, image=(3, 16), generator=rng)
    layout, data = Layout.of(parameters_of(model)), (torch.randn(6, 3, 16, 16, generator=rng), torch.arange(6))
    stack = StackedObjective([Objective(model, layout, Client(data, loss="cross_entropy"))])
    seen: set[torch.dtype] = set()

    def extra(features: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        pairs = features[0].flatten(1) @ features[0].flatten(1).T
        seen.update((features[0].dtype, pairs.dtype))
        return pairs.mean()

    theta = layout.flatten(parameters_of(model))
    rule = SGD(steps=1, bfloat16=True)
    descend(stack, theta, rule, [1], lr=0.1, generators=generators(1), extra=extra, levels=["2"])
    assert seen == {torch.float32}


def test_bfloat16_is_not_for_double_precision() -> None:
    with pytest.raises(FipaError, match=r"bfloat16 is for models in float32, and this one is in torch\.float64"):
        trained(SGD(steps=1, bfloat16=True), [1])


# --- batches ---


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (SGD(steps=1, batch=2, momentum=0.5), "terms"),
        (Adam(steps=1, batch=3), "plain"),
        (SGD(steps=1), "plain"),
        (SGD(steps=1), "terms"),
    ],
)
def test_any_grouping_gives_the_same_updates(rule: Descent, kind: str) -> None:
    """Side by side or one by one, with unequal numbers of steps that end in the middle of an epoch."""
    steps = (7, 4, 2)
    together = trained(rule, steps, kind=kind)
    for m, count in enumerate(steps):
        alone = trained(rule, [count], kind=kind, first=m)
        torch.testing.assert_close(together[m], alone[0], rtol=1e-9, atol=1e-12)
    pair = trained(rule, steps[1:], kind=kind, first=1)
    torch.testing.assert_close(together[1:], pair, rtol=1e-9, atol=1e-12)


def test_minibatch_sgd_by_hand() -> None:
    """Two epochs of batches of 2, 2 and 1: each epoch is one permutation, cut in order."""
    one, model = client("plain", 0), network()
    layout, rng = layout_of(model), torch.Generator().manual_seed(0)
    theta = start()
    for _ in range(2):
        order = torch.randperm(5, generator=rng)
        for batch in (order[:2], order[2:4], order[4:]):
            theta = theta - 0.05 * gradient_by_hand(at(model, layout, theta), layout.names, one, [batch])
    update = trained(SGD(epochs=2, batch=2), [SGD(epochs=2, batch=2).steps_for(5)])
    torch.testing.assert_close(update[0], theta - start(), rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 12), batch=st.integers(1, 14), size=st.integers(1, 3), seed=st.integers(0, 1000))
def test_every_example_once_per_epoch(length: int, batch: int, size: int, seed: int) -> None:
    batches = Batches((length,), batch, generators(size, seed))
    per_epoch = -(-length // batch)
    assert SGD(epochs=3, batch=batch).steps_for(length) == 3 * per_epoch
    for epoch in range(2):
        drawn = [batches.draw(epoch * per_epoch + step)[0] for step in range(per_epoch)]
        sizes = [index.shape[1] for index in drawn]
        assert sizes == [batch] * (per_epoch - 1) + [length - (per_epoch - 1) * batch]
        for m in range(size):
            assert sorted(torch.cat([index[m] for index in drawn]).tolist()) == list(range(length))


def test_epochs_and_clients_differ_in_their_order() -> None:
    batches = Batches((30,), 30, generators(2))
    first, second = batches.draw(0)[0], batches.draw(1)[0]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0])


@settings(deadline=None, max_examples=60)
@given(first=st.integers(1, 12), other=st.integers(1, 12), batch=st.integers(1, 12), seed=st.integers(0, 1000))
def test_other_terms_keep_pace_with_the_first(first: int, other: int, batch: int, seed: int) -> None:
    """A shorter term starts over, evenly; a batch never holds an example twice; a longer one is cut."""
    batches = Batches((first, other), batch, generators(2, seed))
    counts: Counter[int] = Counter()
    seen = 0
    for step in range(-(-first // batch)):
        own, index = batches.draw(step)
        assert index.shape == (2, min(own.shape[1], other))
        for row in index:
            assert len(set(row.tolist())) == len(row)
        counts.update(index[0].tolist())
        seen += index.shape[1]
    if other >= first:
        assert set(counts.values()) == {1}
    elif batch <= other:
        assert set(counts) == set(range(other))
        assert max(counts.values()) - min(counts.values()) <= 1
    assert sum(counts.values()) == seen


def test_lengths_of_training() -> None:
    assert SGD(steps=7).steps_for(100) == 7
    assert SGD(epochs=4).steps_for(100) == 4
    assert SGD(epochs=4, batch=30).steps_for(100) == 16


# --- settings ---


@pytest.mark.parametrize("kind", [SGD, Adam, Scaffold])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "steps or epochs"),
        ({"steps": 2, "epochs": 2}, "steps or epochs"),
        ({"steps": 0}, "at least 1"),
        ({"epochs": 0}, "at least 1"),
        ({"epochs": -1}, "at least 1"),
        ({"steps": 2, "batch": 0}, "batch"),
        ({"steps": 2, "batch": -5}, "batch"),
        ({"steps": 2, "lr": 0.0}, "lr"),
        ({"steps": 2, "lr": float("nan")}, "lr"),
        ({"steps": 2, "lr_decay": 0.0}, "lr_decay"),
        ({"steps": 2, "weight_decay": -0.1}, "weight_decay"),
        ({"steps": 2, "proximal": -0.1}, "proximal"),
    ],
)
def test_bad_settings_of_descent(kind: type[Descent], settings: dict[str, float], message: str) -> None:
    with pytest.raises(FipaError, match=f"{kind.__name__}: .*{message}"):
        kind(**settings)


def test_bad_momentum() -> None:
    with pytest.raises(FipaError, match="momentum"):
        SGD(steps=1, momentum=-0.5)


def test_training_on_several_terms_of_unequal_length_in_batches() -> None:
    """A boundary term of 2 examples under batches of 3: it is used whole in every step."""
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    one = Client((Residual(misfit, x, x[:, 0]), Residual(edge, x[:2], weight=2.0)))
    update = trained(SGD(steps=1, batch=3), [2], clients=[one])
    rng, model = torch.Generator().manual_seed(0), network()
    layout, theta = layout_of(model), start()
    order = torch.randperm(6, generator=rng)
    for batch in (order[:3], order[3:]):
        index = [batch, torch.arange(2)]
        theta = theta - 0.05 * gradient_by_hand(at(model, layout, theta), layout.names, one, index)
    torch.testing.assert_close(update[0], theta - start(), rtol=1e-10, atol=1e-12)
