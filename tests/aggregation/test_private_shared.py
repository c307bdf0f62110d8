"""The private rule in a shared basis: the plain one without noise, bounded in every client, and noisy as stated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fipa
from fipa import ClientMemory, ClientUpdate, FipaError, PrivateSharedFIPA, SharedFIPA, UpdateError
from fipa.aggregation.private_shared import RELEASES
from fipa.layout import Layout

P, K, M = 12, 4, 5
DOUBLE = torch.float64
HUGE = 1e9
WIDE: dict[str, Any] = {"clip": HUGE, "clip_matrix": HUGE, "noise": 0.0}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def clients(count: int = M, examples: int = 1) -> list[ClientUpdate]:
    basis, _ = torch.linalg.qr(normal(P, K, seed=99))
    layout, empty = Layout.of({"parameters": basis[:, 0]}), torch.zeros(0, dtype=DOUBLE)
    updates = []
    for m in range(count):
        rows = normal(7, P, seed=m) @ basis
        curvature = fipa.BasisCurvature(rows.T @ rows, empty, basis, layout)
        updates.append(ClientUpdate(normal(P, seed=50 + m), examples + m * (examples > 1), curvature))
    return updates


def change(updates: list[ClientUpdate], rule: fipa.Rule, state: Any = None) -> Tensor:
    return fipa.aggregate(torch.zeros(P, dtype=DOUBLE), updates, rule, state).theta


@pytest.mark.parametrize("radius", [None, 0.1])
def test_without_noise_it_is_the_plain_rule_of_equal_clients(radius: float | None) -> None:
    expected = change(clients(), SharedFIPA(0.3, radius))
    for examples in (1, 10):  # a client's number of examples is its own word
        found = change(clients(examples=examples), PrivateSharedFIPA(0.3, radius, **WIDE))
        torch.testing.assert_close(found, expected)


def test_one_client_moves_the_sums_by_no_more_than_the_clips() -> None:
    rule = PrivateSharedFIPA(clip=0.5, clip_matrix=0.7, noise=0.0)
    updates, matrices = [normal(P, seed=m) for m in range(M)], [1e3 * normal(K, K, seed=m) for m in range(M)]
    matrices = [one @ one.T for one in matrices]
    without = [*updates[:-1], torch.zeros_like(updates[-1])]
    moved = M * (rule.update(updates, torch.zeros) - rule.update(without, torch.zeros))
    assert float(moved.norm()) == pytest.approx(0.5)
    moved = M * (rule.matrix(matrices, M, torch.zeros) - rule.matrix(matrices[:-1], M, torch.zeros))
    assert float(moved.norm()) == pytest.approx(0.7)


def test_noise_is_as_large_as_stated() -> None:
    rule = PrivateSharedFIPA(clip=0.5, clip_matrix=2.0, noise=3.0, split=(3.0, 1.0))
    assert rule.multipliers == pytest.approx((3 / math.sqrt(0.75), 3 / math.sqrt(0.25)))
    assert sum(z**-2 for z in rule.multipliers) == pytest.approx(1 / 3**2)
    generator = torch.Generator().manual_seed(3)

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    k = 300
    update = rule.update([torch.zeros(90_000, dtype=DOUBLE)] * M, drawn)
    matrix = rule.matrix([torch.zeros(k, k, dtype=DOUBLE)], M, drawn)
    assert float(update.std()) == pytest.approx(rule.multipliers[0] * 0.5 / M, rel=0.01)
    deviation = rule.multipliers[1] * 2.0 / M
    assert torch.equal(matrix, matrix.T)
    assert float(matrix.diagonal().std()) == pytest.approx(deviation, rel=0.1)
    assert float(matrix[tuple(torch.tril_indices(k, k, -1))].std()) == pytest.approx(deviation / math.sqrt(2), rel=0.01)
    assert float(rule.above_noise(matrix, M).norm()) <= 1.1 * deviation * math.sqrt(2 * k)  # an eigenvalue, or none
    steep = matrix + 5 * deviation * math.sqrt(2 * k) * torch.ones(k, k, dtype=DOUBLE) / k
    assert int((torch.linalg.eigvalsh(rule.above_noise(steep, M)) > 1e-6).sum()) in (1, 2)


def test_nothing_of_the_matrices_is_released_without_a_share_of_the_budget() -> None:
    rule = PrivateSharedFIPA(0.5, clip=HUGE, noise=0.0, split=(1.0, 0.0))
    updates = clients()
    basis = updates[0].sketch.basis  # type: ignore[union-attr]
    mean = torch.stack([torch.as_tensor(update.delta) for update in updates]).mean(0)
    torch.testing.assert_close(change(updates, rule), basis @ (basis.T @ mean) / 0.5)
    assert rule.multipliers == (0.0, math.inf)


def test_seeds_repeat_the_noise_and_rounds_differ() -> None:
    rule = PrivateSharedFIPA(seed=1)
    first = fipa.aggregate(torch.zeros(P, dtype=DOUBLE), clients(), rule)
    assert torch.equal(first.theta, change(clients(), rule))
    assert not torch.equal(first.theta, change(clients(), rule, first.state))
    unseeded = [change(clients(), PrivateSharedFIPA()) for _ in range(2)]
    assert not torch.equal(*unseeded)


def test_clients_that_cannot_be_pooled() -> None:
    updates = clients()
    other = replace(updates[1].sketch, basis=updates[1].sketch.basis.flip(1))  # type: ignore[union-attr,type-var]
    with pytest.raises(UpdateError, match="another basis"):
        change([updates[0], replace(updates[1], sketch=other)], PrivateSharedFIPA())
    trained = [replace(one, sketch=replace(one.sketch, moment=normal(K))) for one in updates]  # type: ignore[type-var]
    with pytest.raises(UpdateError, match="gradients only"):
        change(trained, PrivateSharedFIPA())
    with pytest.raises(UpdateError, match="alike"):
        change([replace(updates[0], weight=3.0), replace(updates[1], weight=1.0)], PrivateSharedFIPA())


@pytest.mark.parametrize(
    "settings",
    [
        {"damping": 0.0},
        {"clip": 0.0},
        {"clip_matrix": -1.0},
        {"noise": -1.0},
        {"split": (0.0, 1.0)},
        {"split": (1.0,)},
        {"parts": 2},
        {"directions": 3},
        {"bits": 8},
        {"memory": ClientMemory(forget=3)},
        {"memory": replace(RELEASES, limit=3)},
    ],
)
def test_misuse(settings: dict[str, Any]) -> None:
    with pytest.raises(FipaError, match="PrivateSharedFIPA"):
        PrivateSharedFIPA(**settings)
