"""A memory of quadratics, against the quadratics themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fipa import FipaError
from fipa.federation import quadratics
from fipa.federation.basis import Basis, Move
from fipa.federation.quadratics import HEARSAY, OTHERS, UNTOLD, News, Quadratics

P, K, CLIENTS = 9, 5, 4
THETA = torch.zeros(P, dtype=torch.float64)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(columns: int = K, seed: int = 0) -> Basis:
    start = Basis.empty(P)
    return start.widened(list(randn(columns, P, seed=seed)), torch.Generator().manual_seed(1))


class Client:
    """A client whose loss is a quadratic with curvature in the span of the basis, and its minimum anywhere."""

    def __init__(self, seed: int, Q: Tensor) -> None:
        A = randn(K + 2, Q.shape[1], seed=seed)
        self.S = A.T @ A
        self.H = Q @ self.S @ Q.T
        self.g, self.n = randn(P, seed=seed + 50), 10 * (seed + 1)

    def loss(self, theta: Tensor) -> float:
        return float(self.g @ theta + theta @ self.H @ theta / 2) + 3.0

    def gradient(self, theta: Tensor) -> Tensor:
        return self.g + self.H @ theta


def wide(one: Basis) -> Tensor:
    return one.columns.double()


def scene(visits: tuple[int, ...] = (0, 1, 2, 3), steps: bool = True) -> tuple[Basis, list[Client], Quadratics, Tensor]:
    """Clients visited one after the other, with a step of the model after each."""
    Q = basis()
    clients = [Client(i, wide(Q)) for i in range(CLIENTS)]
    known, theta = Quadratics.none(THETA).widened(K), THETA.clone()
    for k, i in enumerate(visits):
        one = clients[i]
        S = wide(Q).T @ one.H @ wide(Q)
        known = known.told(News(i, one.n, k, -one.gradient(theta), one.loss(theta), S))
        step = randn(K, seed=90 + k) if steps else torch.zeros(K, dtype=torch.float64)
        theta, known = theta + wide(Q) @ step, known.moved(step)
    return Q, clients, known, theta


def mean_gradient(clients: list[Client], theta: Tensor) -> Tensor:
    total = sum(c.n for c in clients)
    return sum((c.n / total * c.gradient(theta) for c in clients), torch.zeros_like(theta))


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_gradients_and_losses_are_those_of_the_present_model(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(quadratics, "AT_ONCE", at_once)
    Q, clients, known, theta = scene()
    pull, moment = known.pull(Q, known.weights(10), trained=False)
    torch.testing.assert_close(-pull, mean_gradient(clients, theta), rtol=1e-5, atol=1e-5)
    assert len(moment) == 0
    expected = torch.tensor([c.loss(theta) for c in clients], dtype=torch.float64)
    torch.testing.assert_close(known.predicted(Q), expected, rtol=1e-5, atol=1e-5)


def test_clients_that_train_pull_towards_their_minimum() -> None:
    Q, D, step = basis(), randn(P, seed=3), randn(K, seed=4)
    one = Client(0, wide(Q))
    moment = wide(Q).T @ one.H @ D
    known = Quadratics.none(THETA).widened(K).told(News(7, 10, 1, D, None, one.S, moment)).moved(step)
    update, found = known.pull(Q, known.weights(1), trained=True)
    left = D - wide(Q) @ step
    torch.testing.assert_close(update, left, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, wide(Q).T @ one.H @ left, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [K, K - 2])
def test_a_turn_changes_the_basis_and_not_what_is_known(keep: int) -> None:
    Q, _, known, _ = scene()
    weights = known.weights(5)
    move = Q.turn(known.curvature(weights), keep)
    turned, after = Q.moved(move), known.turned(move.turn(Q.gram()), Q.gram())
    R = wide(turned)
    S = wide(Q) @ torch.einsum("m,mkl->kl", weights, torch.stack(known.matrices)) @ wide(Q).T
    torch.testing.assert_close(
        torch.einsum("m,mkl->kl", weights, torch.stack(after.matrices)), R.T @ S @ R, rtol=1e-4, atol=1e-4
    )
    if keep == K:
        torch.testing.assert_close(after.predicted(turned), known.predicted(Q), rtol=1e-4, atol=1e-4)
        before, _ = known.pull(Q, weights, trained=False)
        torch.testing.assert_close(after.pull(turned, weights, trained=False)[0], before, rtol=1e-4, atol=1e-4)
    else:  # what goes is the least curvature
        values = torch.linalg.eigvalsh(known.curvature(weights)).flip(0)
        found = torch.linalg.eigvalsh(after.curvature(weights)).flip(0)
        torch.testing.assert_close(found, values[:keep], rtol=1e-3, atol=1e-3)


def test_columns_that_few_know_have_the_mean_of_those_who_do() -> None:
    _, clients, known, _ = scene((0, 1), steps=False)
    grown = known.widened(K + 1)
    S = torch.eye(K + 1, dtype=torch.float64) * 4.0
    grown = grown.told(News(2, 30, 5, THETA, None, S))
    curvature = grown.curvature(grown.weights(5))
    assert curvature[K, K].item() == pytest.approx(4.0)  # one of three knows it
    w = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64) / 60
    expected = w[0] * known.matrices[0] + w[1] * known.matrices[1] + w[2] * S[:K, :K]
    torch.testing.assert_close(curvature[:K, :K], expected)
    assert bool((torch.linalg.eigvalsh(curvature) > -1e-10).all())
    assert clients[0].n == 10


def test_clients_of_a_warm_up_have_a_gradient_and_no_curvature() -> None:
    known = Quadratics.none(THETA).told(News(3, 5, 0, torch.ones_like(THETA))).widened(K)
    assert int(known.rounds[0]) == UNTOLD
    assert bool((known.curvature(known.weights(9)) == 0).all())
    assert math.isnan(float(known.predicted(basis())[0]))
    assert known.weights(100, discount=0.5).tolist() == [1.0]  # nobody knows how old they are


def test_clients_of_a_warm_up_count_for_less_beside_those_who_have_told_their_gradient() -> None:
    here = torch.zeros(P)
    none = Quadratics.none(here).widened(K)
    told = none.told(News(0, 10, 0, here), News(1, 30, 0, here))
    assert told.weights(1).tolist() == [0.25, 0.75]  # nobody has told more than others
    told = told.told(News(1, 30, 1, here, loss=2.0))  # a gradient, with or without curvature
    expected = torch.tensor([10 * HEARSAY, 30.0]).double() / (10 * HEARSAY + 30)
    torch.testing.assert_close(told.weights(1), expected)


def test_merging_leaves_the_weights_of_a_warm_up_as_they_are() -> None:
    here = torch.zeros(P)
    known = Quadratics.none(here).widened(K).told(News(0, 100, 0, here), News(1, 200, 0, here))
    known = known.told(News(2, 50, 1, here, loss=2.0, matrix=torch.eye(K)), News(3, 70, 2, here, loss=1.0))
    before, after = known.weights(2), known.within(2, basis(), 2).weights(2)
    torch.testing.assert_close(after, torch.stack([before[:3].sum(), before[3]]))
    only = known.within(3, basis(), 2).weights(2)  # none of the two has told more
    torch.testing.assert_close(only, torch.stack([before[:2].sum(), *before[2:]]))


def test_news_without_curvature_keep_the_one_told_before() -> None:
    _, _, known, _ = scene()
    again = known.told(News(2, 30, 9, torch.ones_like(THETA), 1.5))
    place = again.place(2)
    assert place is not None
    assert torch.equal(again.matrices[place], known.matrices[place])
    assert int(again.rounds[place]) == int(known.rounds[place])
    assert bool((again.moves[place] == 0).all())
    assert float(again.losses[place]) == 1.5


def test_old_answers_count_less() -> None:
    _, _, known, _ = scene()
    raw = [10 * 0.5**3, 20 * 0.5**2, 30 * 0.5, 40.0]
    expected = [value / sum(raw) for value in raw]
    assert known.weights(3, discount=0.5).tolist() == pytest.approx(expected)


def test_clients_that_leave_are_forgotten() -> None:
    _, _, known, _ = scene()
    assert known.without([1, 8]).ids.tolist() == [0, 2, 3]


def test_those_who_have_not_been_seen_for_long_are_forgotten() -> None:
    _, _, known, _ = scene()
    again = known.told(News(0, 10, 7, THETA))  # its curvature is of round 0, its gradient of round 7
    assert again.since(2).ids.tolist() == [0, 2, 3]
    few = known.within(2, basis(), now=4)
    assert few.since(3).ids.tolist() == [3]
    assert len(few.since(3).merged) == 0


def test_an_older_answer_does_not_replace_a_fresher_one() -> None:
    _, _, known, _ = scene()
    assert torch.equal(known.told(News(3, 40, 2, THETA)).updates[3], known.updates[3])


def test_a_memory_that_another_version_has_written() -> None:
    _, _, known, _ = scene()
    tensors = known.tensors()
    del tensors["updates.2"]
    with pytest.raises(FipaError, match="another version of fipa: begin the run anew"):
        Quadratics.of(tensors)


def test_news_of_one_client_copy_nothing_of_the_others() -> None:
    _, _, known, _ = scene()
    update = THETA.clone()
    after = known.told(News(1, 20, 9, update))
    assert [new is old for new, old in zip(after.updates, known.updates, strict=True)] == [True, False, True, True]
    update.zero_()  # what was told is the memory's own
    assert torch.equal(after.updates[1], THETA)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_merging_changes_nothing_of_what_clients_that_train_pull_towards(discount: float) -> None:
    Q, known = basis(), Quadratics.none(THETA).widened(K)
    for i in range(CLIENTS):
        one, D = Client(i, wide(Q)), randn(P, seed=20 + i)
        known = known.told(News(i, one.n, i, D, None, one.S, wide(Q).T @ one.H @ D)).moved(randn(K, seed=30 + i))
    few = known.within(2, Q, 4, discount, trained=True)
    if discount == 1.0:
        pairs = zip(known.pull(Q, known.weights(4), True), few.pull(Q, few.weights(4), True), strict=True)
        for expected, found in pairs:
            torch.testing.assert_close(found, expected)
    else:  # within the merged ones, those seen later count more
        old = known.without([3])
        torch.testing.assert_close(few.updates[0], old.pull(Q, old.weights(4, discount), True)[0])


def test_columns_that_nobody_knows_are_steep() -> None:
    _, _, known, _ = scene()
    curvature = known.widened(K + 2).curvature(known.weights(4))
    assert curvature[K, K] == curvature[K + 1, K + 1] == curvature.diagonal().max() > 0


def test_the_oldest_are_merged_and_nothing_of_their_sum_is_lost() -> None:
    Q, _, known, _ = scene()
    few = known.within(2, Q, now=4)
    assert few.ids.tolist() == [OTHERS, 3]
    assert few.merged.tolist() == [[0, 10], [1, 20], [2, 30]]
    assert few.examples.tolist() == [60, 40]
    before, after = (one.pull(Q, one.weights(4), False)[0] for one in (known, few))
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(few.curvature(few.weights(4)), known.curvature(known.weights(4)))
    assert few.within(2, Q, now=4) is few


def test_who_was_merged_and_comes_back_counts_once() -> None:
    Q, _, known, _ = scene()
    few = known.within(2, Q, now=4)
    again = few.told(News(1, 20, 5, THETA, 1.0, torch.eye(K, dtype=torch.float64)))
    assert again.ids.tolist() == [OTHERS, 1, 3]
    assert again.examples.tolist() == [40, 20, 40]
    assert again.merged.tolist() == [[0, 10], [2, 30]]
    greedy = few.told(News(1, 10**7, 5, THETA, 1.0, torch.eye(K, dtype=torch.float64)))
    assert greedy.examples.tolist() == [40, 10**7, 40]  # what it has now takes nothing from the others
    back = [News(i, 10 * (i + 1), 6, THETA) for i in (0, 2)]
    assert again.told(*back).ids.tolist() == [0, 1, 2, 3]


def test_half_the_memory_for_a_little_less_accuracy() -> None:
    Q, _, known, _ = scene()
    small = Quadratics.none(THETA, torch.bfloat16).widened(K)
    rows = zip(known.ids.tolist(), known.updates, known.matrices, strict=True)
    small = small.told(*(News(i, 10 * (i + 1), 0, update, 1.0, S) for i, update, S in rows))
    assert {tensor.dtype for tensor in (*small.updates, *small.matrices)} == {torch.bfloat16}
    weights = known.weights(0)
    assert small.curvature(weights).dtype == torch.float64
    torch.testing.assert_close(small.curvature(weights), known.curvature(weights), rtol=0.02, atol=0.2)
    assert small.turned(torch.eye(K, dtype=torch.float64)[:, :3], Q.gram()).matrices[0].dtype == torch.bfloat16


@given(st.permutations(range(CLIENTS)))
def test_the_order_of_visits_changes_no_bit(order: list[int]) -> None:
    _, _, expected, _ = scene(steps=False)
    _, _, known, _ = scene(tuple(order), steps=False)
    weights = expected.weights(0)
    for one, other in zip(expected.pull(basis(), weights, False), known.pull(basis(), weights, False), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(expected.curvature(weights), known.curvature(weights))


def test_survives_a_file(tmp_path: Any) -> None:
    _, _, known, _ = scene()
    torch.save(known.tensors(), tmp_path / "known.pt")
    again = Quadratics.of(torch.load(tmp_path / "known.pt", weights_only=True))
    for name, tensor in known.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])


def test_widening_adds_nothing_that_was_told() -> None:
    Q, _, known, _ = scene()
    extra = Q.moved(Move(Basis.empty(P).widened([randn(P, seed=77)], torch.Generator()).columns))
    grown = known.widened(len(extra))
    assert bool((grown.known[:, K:] == 0).all())
    assert bool((grown.known[:, :K] == 1).all())
    torch.testing.assert_close(grown.predicted(extra), known.predicted(Q))


def test_a_curvature_takes_no_more_than_was_told() -> None:
    """Nothing of a client that has told none, and of others what there was then, however wide the basis is now."""
    told = News(1, 10, 0, THETA, 1.0, torch.eye(K, dtype=torch.float64))
    known = Quadratics.none(THETA).widened(K).told(News(0, 10, 0, THETA), told).widened(K + 3)
    known = known.told(News(2, 10, 1, THETA, 1.0, torch.eye(K + 3, dtype=torch.float64)))
    assert [tuple(S.shape) for S in known.matrices] == [(0, 0), (K, K), (K + 3, K + 3)]
    turned = known.turned(torch.eye(K + 3, dtype=torch.float64)[:, :K], torch.eye(K + 3, dtype=torch.float64))
    assert [tuple(S.shape) for S in turned.matrices] == [(0, 0), (K, K), (K, K)]


def test_how_news_come_changes_no_bit() -> None:
    """Neither as a transposed matrix, nor from a checkpoint at another address."""
    Q, S = basis(), randn(K, K, seed=8)
    S = (S + S.T).contiguous()
    none, moves = Quadratics.none(THETA).widened(K), randn(K, seed=9)
    plain, other = (none.told(News(1, 10, 0, THETA, 1.0, one, moves=moves)) for one in (S, S.T.contiguous().T))
    odd = {name: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].reshape(t.shape) for name, t in plain.tensors().items()}
    for name, t in plain.tensors().items():
        odd[name].copy_(t)
    for known in (other, Quadratics.of(odd)):
        assert torch.equal(known.pull(Q, known.weights(0), False)[0], plain.pull(Q, plain.weights(0), False)[0])
        assert torch.equal(known.predicted(Q), plain.predicted(Q))
