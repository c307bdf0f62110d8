"""FIPA in a shared basis, against dense algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fipa import ClientUpdate, FipaError, Layout, UpdateError, aggregate
from fipa.aggregation.shared import ClientMemory, SharedFIPA, usual_curvature
from fipa.curvature.basis import BasisCurvature

P, K = 12, 5
LAYOUT = Layout(("w",), ((P,),))
THETA = torch.zeros(P, dtype=torch.float64)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def Q_of(columns: int = K) -> Tensor:  # noqa: N802
    return torch.linalg.qr(randn(P, columns, seed=1))[0]


def client(seed: int, Q: Tensor, examples: int, trains: bool = False) -> tuple[ClientUpdate, Tensor, Tensor]:
    """An update, and the dense curvature and delta behind it."""
    A = randn(7, P, seed=seed)
    H, delta = A.T @ A, randn(P, seed=seed + 100)
    moment = Q.T @ H @ delta if trains else delta.new_zeros(0)
    return ClientUpdate(delta, examples, BasisCurvature(Q.T @ H @ Q, moment, Q, LAYOUT), seed), H, delta


def cohort(Q: Tensor, trains: bool = False) -> tuple[list[ClientUpdate], Tensor, Tensor, Tensor]:
    """Updates, and by their weights the mean curvature, mean delta and mean of curvature times delta."""
    rows = [client(i, Q, examples, trains) for i, examples in enumerate((10, 30))]
    w = (0.25, 0.75)
    H = sum((a * h for a, (_, h, _) in zip(w, rows, strict=True)), torch.zeros(P, P, dtype=torch.float64))
    D = sum((a * d for a, (_, _, d) in zip(w, rows, strict=True)), THETA)
    HD = sum((a * h @ d for a, (_, h, d) in zip(w, rows, strict=True)), THETA)
    return [row[0] for row in rows], H, D, HD


def test_usual_curvature() -> None:
    """Of 1, 4, 9 and a 0 that rounding has made negative: the square of (1 + 2 + 3 + 0) / 4, scaled as they are."""
    Q = Q_of(4)
    values = torch.tensor([9.0, 4.0, 1.0, -1e-12], dtype=torch.float64)
    turn = torch.linalg.qr(randn(4, 4, seed=9))[0]
    for size in (1.0, 1e-6, 1e6):
        S = size * (turn * values) @ turn.T
        found = usual_curvature(BasisCurvature((S + S.T) / 2, THETA[:0], Q, LAYOUT))
        assert found == pytest.approx(size * 1.5**2, rel=1e-4)
    assert usual_curvature(BasisCurvature(THETA.new_zeros(0, 0), THETA[:0], Q[:, :0], LAYOUT)) == 0.0


@given(st.floats(1e-3, 10.0))
def test_gradients(damping: float) -> None:
    Q = Q_of()
    updates, H, D, _ = cohort(Q)
    expected = Q @ torch.linalg.solve(Q.T @ H @ Q + damping * torch.eye(K, dtype=torch.float64), Q.T @ D)
    torch.testing.assert_close(aggregate(THETA, updates, SharedFIPA(damping)).theta, expected, rtol=1e-9, atol=1e-9)


@given(st.floats(1e-3, 10.0))
def test_updates_of_training_are_weighed_as_by_the_completed_rule(damping: float) -> None:
    Q = Q_of(P)  # all directions: nothing of the curvature is lost
    updates, H, D, HD = cohort(Q, trains=True)
    expected = torch.linalg.solve(H + damping * torch.eye(P, dtype=torch.float64), HD + damping * D)
    torch.testing.assert_close(aggregate(THETA, updates, SharedFIPA(damping)).theta, expected, rtol=1e-8, atol=1e-8)


def test_outside_of_the_basis_training_is_averaged() -> None:
    Q = Q_of()
    updates, _, D, _ = cohort(Q, trains=True)
    step = aggregate(THETA, updates, SharedFIPA(0.1)).theta
    outside = torch.eye(P, dtype=torch.float64) - Q @ Q.T
    torch.testing.assert_close(outside @ step, outside @ D)


@given(st.floats(1e-3, 5.0))
def test_a_radius_is_kept_and_its_step_is_the_best_within(radius: float) -> None:
    Q = Q_of()
    updates, H, D, _ = cohort(Q)
    S, b = Q.T @ H @ Q, Q.T @ D
    step = Q.T @ aggregate(THETA, updates, SharedFIPA(radius=radius)).theta
    length = float(step.norm())
    assert length <= radius * (1 + 1e-9)
    free = torch.linalg.solve(S, b)
    if float(free.norm()) <= radius:
        torch.testing.assert_close(step, free, rtol=1e-5, atol=1e-7)
        return
    assert length == pytest.approx(radius, rel=1e-6)
    shift = float(step @ (b - S @ step)) / length**2  # (S + shift I) step = b
    assert shift > 0
    torch.testing.assert_close(S @ step + shift * step, b, rtol=1e-5, atol=1e-6)


def test_no_curvature_and_no_columns_move_nothing_far() -> None:
    Q = Q_of()
    flat = BasisCurvature(torch.zeros(K, K, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), Q, LAYOUT)
    update = ClientUpdate(Q[:, 0].clone(), 10, flat)
    assert float(aggregate(THETA, [update], SharedFIPA(radius=0.5)).theta.norm()) == pytest.approx(0.5)
    empty = BasisCurvature(flat.matrix[:0, :0], flat.moment, Q[:, :0].contiguous(), LAYOUT)
    assert float(aggregate(THETA, [ClientUpdate(Q[:, 0], 10, empty)], SharedFIPA(radius=0.5)).theta.norm()) == 0.0


def test_clients_in_other_bases_are_named() -> None:
    one, _, _ = client(0, Q_of(), 10)
    other, _, _ = client(1, torch.linalg.qr(randn(P, K, seed=2))[0], 10)
    with pytest.raises(UpdateError, match=r"client 1 sent a curvature in another basis"):
        aggregate(THETA, [one, other], SharedFIPA(0.1))


def test_gradients_and_updates_do_not_mix() -> None:
    one, _, _ = client(0, Q_of(), 10)
    other, _, _ = client(1, Q_of(), 10, trains=True)
    with pytest.raises(UpdateError, match="ask all of them alike"):
        aggregate(THETA, [one, other], SharedFIPA(0.1))


@pytest.mark.parametrize(
    "settings",
    [{"damping": -1.0}, {"radius": 0.0}, {"columns": 0}, {"directions": 0}, {"weight_decay": -1.0}, {"column_bits": 3}],
)
def test_settings_that_make_no_sense(settings: dict[str, float]) -> None:
    with pytest.raises(FipaError, match="SharedFIPA"):
        SharedFIPA(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"memory": ClientMemory(0.5)}, {"columns": 7}, {"weight_decay": 0.1}])
def test_what_is_for_rounds_is_refused_where_there_is_only_one(settings: dict[str, Any]) -> None:
    update, _, _ = client(0, Q_of(), 10)
    with pytest.raises(FipaError, match=rf"SharedFIPA\({next(iter(settings))}=...\) is for the rounds of a federation"):
        aggregate(THETA, [update], SharedFIPA(**settings))


@pytest.mark.parametrize("settings", [{"discount": 0.0}, {"forget": 0}, {"limit": 0}, {"precision": "int4"}])
def test_memories_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(FipaError, match="ClientMemory"):
        ClientMemory(**settings)
