"""Contrastive losses against sums over pairs written out in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from fipa.clients.contrastive import directions_of, divergence_penalty, moon, relaxed_contrastive
from fipa.errors import FipaError

DOUBLE = torch.float64
T = 0.3  # mild, so that no term vanishes

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "relaxed": partial(relaxed_contrastive, temperature=T),
    "supervised": partial(relaxed_contrastive, temperature=T, kind="supervised"),
    "penalty": partial(divergence_penalty, temperature=T, threshold=0.2),
    "penalty, least": partial(divergence_penalty, temperature=T, threshold=0.2, pairs="least"),
}
losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def cosine(x: list[float], y: list[float]) -> float:
    lengths = math.sqrt(sum(a * a for a in x)) * math.sqrt(sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / lengths if lengths else 0.0


def groups(features: Tensor, labels: list[int], i: int) -> tuple[list[float], list[float]]:
    """Similarities of i to others of its class and to other classes."""
    rows = features.tolist()
    similar = [cosine(rows[i], row) for row in rows]
    own = [s for j, s in enumerate(similar) if j != i and labels[j] == labels[i]]
    return own, [s for j, s in enumerate(similar) if labels[j] != labels[i]]


def contrastive_by_hand(features: Tensor, labels: list[int], temperature: float, kind: str) -> float:
    total = 0.0
    for i in range(len(labels)):
        own, other = groups(features, labels, i)
        if not own or not other:
            continue
        if kind == "relaxed":
            own, other = [min(own)], sorted(other)[-2:]
        rest = sum(math.exp(s / temperature) for s in other)
        total += sum(-math.log(math.exp(s / temperature) / (math.exp(s / temperature) + rest)) for s in own) / len(own)
    return total / len(labels)


def penalty_by_hand(features: Tensor, labels: list[int], threshold: float, temperature: float, pairs: str) -> float:
    total = 0.0
    for i in range(len(labels)):
        own, _ = groups(features, labels, i)
        if pairs == "least" and own:
            own = [min(own)]
        rest = sum(math.exp(s / temperature) for s in own if s > threshold)
        total += -math.log(math.exp(1 / temperature) / (math.exp(1 / temperature) + rest))
    return total / len(labels)


batches = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 99))


@given(batches, st.sampled_from(["relaxed", "supervised"]), st.sampled_from([0.05, 0.3, 2.0]))
@settings(deadline=None)
def test_contrastive(batch: tuple[list[int], int], kind: str, temperature: float) -> None:
    labels, seed = batch
    features = draw(len(labels), 3, seed=seed)
    value = relaxed_contrastive(features, torch.tensor(labels), temperature, kind)  # type: ignore[arg-type]
    assert float(value) == pytest.approx(contrastive_by_hand(features, labels, temperature, kind), abs=1e-12)


@given(batches, st.sampled_from(["all", "least"]), st.sampled_from([-1.0, 0.2, 0.7]), st.sampled_from([0.05, 0.3, 2.0]))
@settings(deadline=None)
def test_penalty(batch: tuple[list[int], int], pairs: str, threshold: float, temperature: float) -> None:
    labels, seed = batch
    features = draw(len(labels), 2, seed=seed)
    value = divergence_penalty(features, torch.tensor(labels), threshold, temperature, pairs)  # type: ignore[arg-type]
    assert float(value) == pytest.approx(penalty_by_hand(features, labels, threshold, temperature, pairs), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 3.0])
def test_moon(temperature: float) -> None:
    features, broadcast, previous = (draw(5, 4, seed=seed) for seed in range(3))
    total = 0.0
    for z, b, p in zip(features.tolist(), broadcast.tolist(), previous.tolist(), strict=True):
        near, far = math.exp(cosine(z, b) / temperature), math.exp(cosine(z, p) / temperature)
        total -= math.log(near / (near + far))
    assert float(moon(features, broadcast, previous, temperature)) == pytest.approx(total / 5, abs=1e-12)


def test_moon_limits() -> None:
    features, other = draw(5, 4), draw(5, 4, seed=1)
    assert float(moon(features, other, other, 0.1)) == pytest.approx(math.log(2))
    assert float(moon(features, features, -features, 0.5)) == pytest.approx(math.log1p(math.exp(-4)))
    assert float(moon(features, -features, features, 1e-6)) == pytest.approx(2e6)  # no overflow
    assert float(moon(torch.zeros(5, 4), other.float(), features.float(), 0.5)) == pytest.approx(math.log(2))


def test_defaults_are_fedrcl_s() -> None:
    features, labels = draw(12, 3), torch.arange(12) % 3
    assert torch.equal(relaxed_contrastive(features, labels), relaxed_contrastive(features, labels, 0.05, "relaxed"))
    assert torch.equal(divergence_penalty(features, labels), divergence_penalty(features, labels, 0.7, 0.05, "all"))


def test_three_examples_by_head() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]], dtype=DOUBLE)
    labels = torch.tensor([0, 0, 1])  # similarities: 0 within the class; -1 and 0 to the stranger
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(0))) / 3
    for kind in ("relaxed", "supervised"):
        assert float(relaxed_contrastive(features, labels, 1.0, kind)) == pytest.approx(expected)  # type: ignore[arg-type]
    assert float(divergence_penalty(features, labels, -0.5, 0.5)) == pytest.approx(2 / 3 * math.log1p(math.exp(-2)))
    assert float(divergence_penalty(features, labels, 0.5, 0.5)) == 0


def test_relaxed_sees_hard_pairs_only() -> None:
    angles = torch.tensor([0.0, 0.1, 0.2, 1.5, 1.6, 3.0], dtype=DOUBLE)
    labels = torch.tensor([0, 0, 0, 1, 2, 3])  # of 0: farthest friend 0.2, nearest strangers 1.5 and 1.6
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    changed = features.clone()
    changed[5] *= -1  # behind the anchors, 3.0 or so away, to 0.14 before them
    far = features.clone()
    far[5] = -features[1]  # still the farthest stranger of each anchor
    value = relaxed_contrastive(features, labels, T)
    assert torch.equal(relaxed_contrastive(far, labels, T), value)
    assert not torch.equal(relaxed_contrastive(changed, labels, T), value)
    everything = partial(relaxed_contrastive, temperature=T, kind="supervised")
    assert not torch.equal(everything(far, labels), everything(features, labels))


def test_penalty_of_a_collapsed_class() -> None:
    features = torch.ones(4, 3, dtype=DOUBLE)
    labels = torch.zeros(4, dtype=torch.int64)
    assert float(divergence_penalty(features, labels)) == pytest.approx(math.log(1 + 3))
    assert float(divergence_penalty(features, labels, pairs="least")) == pytest.approx(math.log(1 + 1))


def test_one_far_friend_silences_the_least_penalty() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], dtype=DOUBLE)
    labels = torch.zeros(3, dtype=torch.int64)
    assert float(divergence_penalty(features, labels, pairs="least")) == 0
    assert float(divergence_penalty(features, labels, pairs="all")) > 0.1


@losses
@pytest.mark.parametrize("labels", [[0] * 5, [0, 1, 2, 3, 4], [0], [0, 0, 0, 0, 1]])
@pytest.mark.parametrize("collapsed", [False, True])
def test_missing_pairs_leave_no_nan(loss: Loss, labels: list[int], collapsed: bool) -> None:
    features = torch.ones(len(labels), 3) if collapsed else draw(len(labels), 3).float()
    features.requires_grad_()
    value = loss(features, torch.tensor(labels))
    value.backward()
    assert features.grad is not None
    assert bool(value.isfinite())
    assert bool(features.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["relaxed", "supervised"])
@pytest.mark.parametrize("labels", [[0] * 5, [0, 1, 2, 3, 4], [0]])
def test_nothing_to_contrast(kind: str, labels: list[int]) -> None:
    features = draw(len(labels), 3).requires_grad_()
    value = relaxed_contrastive(features, torch.tensor(labels), 0.05, kind)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(value, features)
    assert value.item() == 0
    assert float(gradient.abs().max()) == 0


@losses
def test_invariances(loss: Loss) -> None:
    features, labels = draw(9, 4), torch.arange(9) % 3
    value = float(loss(features, labels))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(draw(4, 4, seed=2)).Q
    lengths = draw(9, 1, seed=3).exp()
    assert value > 0
    assert float(loss(features[order], labels[order])) == pytest.approx(value)
    assert float(loss(features @ rotation, labels)) == pytest.approx(value)
    assert float(loss(features * lengths, labels)) == pytest.approx(value)
    assert float(loss(directions_of(features), labels)) == pytest.approx(value)
    assert float(loss(features, 7 - 2 * labels)) == pytest.approx(value)  # names of classes


@losses
@pytest.mark.parametrize("labels", [[0, 1, 0, 1, 2, 0], [0] * 6, [0, 0, 0, 0, 0, 1], [0]])
def test_gradients(loss: Loss, labels: list[int]) -> None:
    features = (draw(len(labels), 3) + 1).requires_grad_()  # near each other, so that the penalties act
    assert torch.autograd.gradcheck(lambda x: loss(x, torch.tensor(labels)), features)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, torch.tensor(labels)), features)


def test_gradient_of_moon() -> None:
    assert torch.autograd.gradcheck(moon, tuple(draw(3, 4, seed=seed).requires_grad_() for seed in range(3)))


@losses
def test_side_by_side(loss: Loss) -> None:
    features = draw(4, 6, 3)
    labels = torch.tensor([[0, 1, 0, 1, 2, 0], [0] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]])
    together = vmap(grad(loss))(features, labels)
    for one, x, y in zip(together, features, labels, strict=True):
        x = x.clone().requires_grad_()
        (alone,) = torch.autograd.grad(loss(x, y), x)
        assert torch.allclose(one, alone)


def test_moon_side_by_side() -> None:
    features, broadcast, previous = (draw(4, 6, 3, seed=seed) for seed in range(3))
    together = vmap(grad(moon))(features, broadcast, previous)
    for one, *three in zip(together, features, broadcast, previous, strict=True):
        assert torch.allclose(one, grad(moon)(*three))


@losses
def test_a_step_along_the_gradient_helps(loss: Loss) -> None:
    features, labels = draw(8, 4) + 1, torch.arange(8) % 2
    gradient = grad(loss)(features, labels)
    assert float(loss(features - 1e-3 * gradient, labels)) < float(loss(features, labels))


def test_directions_of() -> None:
    maps = draw(2, 3, 4, 5)
    expected = []
    for image in maps.tolist():
        means = [sum(map(sum, channel)) / 20 for channel in image]
        length = math.sqrt(sum(m * m for m in means))
        expected.append([m / length for m in means])
    assert torch.allclose(directions_of(maps), torch.tensor(expected, dtype=DOUBLE))
    assert torch.allclose(directions_of(maps), directions_of(maps.mean((2, 3))))
    assert torch.allclose(directions_of(directions_of(maps)), directions_of(maps))
    assert torch.autograd.gradcheck(directions_of, maps.requires_grad_())


def test_directions_of_nothing_and_of_extremes() -> None:
    features = torch.tensor([[0.0, 0.0], [3e-30, 4e-30], [3e30, 4e30]], requires_grad=True)
    directions = directions_of(features)
    assert torch.allclose(directions, torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, 0.8]]))
    directions[:, 0].sum().backward()
    assert features.grad is not None
    assert bool(features.grad.isfinite().all())
    assert features.grad[0].tolist() == [0, 0]


def test_dead_features_leave_no_nan() -> None:
    for loss in LOSSES.values():
        features = draw(5, 3).float()
        features[1:3] = 0
        features.requires_grad_()
        loss(features, torch.tensor([0, 0, 1, 1, 0])).backward()
        assert features.grad is not None
        assert bool(features.grad.isfinite().all())


def test_errors() -> None:
    features, labels = draw(4, 3), torch.arange(4)
    for call in (
        lambda: moon(features, features, features, 0),
        lambda: relaxed_contrastive(features, labels, -1),
        lambda: divergence_penalty(features, labels, 0.7, float("nan")),
    ):
        with pytest.raises(FipaError, match="temperature must be positive"):
            call()
    with pytest.raises(FipaError, match=r"one shape, got \(4, 3\), \(4, 2\), \(4, 3\)"):
        moon(features, features[:, :2], features)
    with pytest.raises(FipaError, match="4 features need as many labels"):
        relaxed_contrastive(features, labels[:3])
    with pytest.raises(FipaError, match='"relaxed" or "supervised", got \'hard\''):
        relaxed_contrastive(features, labels, kind="hard")  # type: ignore[arg-type]
    with pytest.raises(FipaError, match='"all" or "least", got \'some\''):
        divergence_penalty(features, labels, pairs="some")  # type: ignore[arg-type]
