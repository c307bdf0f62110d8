"""Curvature in a shared basis, against the dense oracle; how it travels; and answers that are forged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from curvature.cases import CASES, CLASSES, HEAD_CASES, ROUTES, Case, case, make, mlp, model_and_inputs, randn
from fipa import BasisCurvature, BasisPlan, ClientUpdate, Layout, SketchError, UpdateError, basis_curvature
from fipa.curvature.basis import pack, unpack
from fipa.curvature.summary import Occasion

MODEL, X = make(mlp), randn(5, 3)
P = 59


def columns(parameters: int, k: int = 4, seed: int = 9) -> Tensor:
    return torch.linalg.qr(randn(parameters, min(k, parameters), seed=seed)).Q


def check(one: Case, route: str) -> None:
    Q, delta = columns(one.parameters), randn(one.parameters, seed=4)
    found = basis_curvature(one.model, one.data, one.loss, basis=Q, delta=delta, params=one.params, **ROUTES[route])
    torch.testing.assert_close(found.matrix, Q.T @ one.hessian @ Q, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.moment, Q.T @ one.hessian @ delta, rtol=1e-10, atol=1e-12)
    assert torch.equal(found.matrix, found.matrix.T)
    assert torch.equal(found.basis, Q)
    assert found.layout.numel == one.parameters
    assert found.flaw(one.parameters) is None
    assert not found.matrix.requires_grad


# --- against the oracle ---


@pytest.mark.parametrize("route", ["rows", "streamed", "matrix_free", "tight"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle_in_the_basis(name: str, route: str) -> None:
    check(case(name), route)


@pytest.mark.parametrize("name", HEAD_CASES)
def test_of_a_linear_head(name: str) -> None:
    check(case(name), "linear_head")


@pytest.mark.parametrize("route", ROUTES)
def test_without_an_update_there_is_no_moment(route: str) -> None:
    one = case("mlp/cross_entropy/head")
    Q = columns(one.parameters)
    found = basis_curvature(one.model, one.data, one.loss, basis=Q, params=one.params, **ROUTES[route])
    assert found.moment.shape == (0,)
    torch.testing.assert_close(found.matrix, Q.T @ one.hessian @ Q, rtol=1e-10, atol=1e-12)


def sampled(data: Any, loss: Any, route: str, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The same curvature twice, as a sketch of full rank seen through Q, and in the basis at once."""
    Q, settings = columns(P, 6), {"seed": seed, **ROUTES[route], **options}
    whole = fipa.sketch(MODEL, data, loss, rank=None, **settings)
    inside = Q.T @ whole.eigenvectors
    return (inside * whole.eigenvalues) @ inside.T, basis_curvature(MODEL, data, loss, basis=Q, **settings).matrix


@pytest.mark.parametrize("route", ["rows", "streamed", "matrix_free"])
@pytest.mark.parametrize("options", [{"sampled_labels": 1}, {"sampled_labels": 3}, {"max_examples": 3}], ids=str)
def test_draws_what_the_sketch_of_the_same_seed_draws(route: str, options: dict[str, int]) -> None:
    matrices = []
    for seed in (0, 2):
        expected, found = sampled(X, "cross_entropy", route, seed, **options)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        matrices.append(found)
    assert not torch.allclose(*matrices)


def test_draws_examples_of_squares_alike() -> None:
    expected, found = sampled(X, "mse", "rows", 3, max_examples=3)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_precision_of_the_computation() -> None:
    single = basis_curvature(MODEL, X, basis=columns(P), dtype=torch.float32)
    assert {t.dtype for t in single.tensors().values()} == {torch.float32}
    exact = basis_curvature(MODEL, X, basis=columns(P).float())  # the model is in double precision
    assert {t.dtype for t in exact.tensors().values()} == {torch.float64}
    torch.testing.assert_close(single.matrix.double(), exact.matrix, rtol=1e-4, atol=1e-6)


def test_a_basis_without_columns() -> None:
    for route in ROUTES:
        params = "4.*" if route == "linear_head" else None
        p = 15 if params else P
        found = basis_curvature(MODEL, X, basis=torch.zeros(p, 0), delta=randn(p), params=params, **ROUTES[route])
        assert (found.matrix.shape, found.moment.shape) == ((0, 0), (0,))
        assert found.flaw(p) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"basis": columns(P + 1)}, r"basis has shape \(60, 4\), expected 59 rows: one per parameter"),
        ({"basis": columns(P)[:, 0]}, r"basis has shape \(59,\), expected 59 rows"),
        ({"basis": columns(P), "delta": randn(P - 1)}, r"delta has 58 elements, expected 59"),
        ({"basis": columns(P) / 0}, r"the curvature is not finite"),
    ],
)
def test_mistakes_are_named(options: dict[str, Tensor], message: str) -> None:
    with pytest.raises(SketchError, match=message):
        basis_curvature(MODEL, X, **options)


# --- the plan ---


def test_the_plan_takes_the_basis_of_the_occasion() -> None:
    model, x = model_and_inputs("mlp")
    client, layout = fipa.Client((x, torch.zeros(len(x)).long()), "cross_entropy"), Layout.of(fipa.parameters_of(model))
    Q, delta, plan = columns(P), randn(P, seed=2), BasisPlan(sampled_labels=1, max_examples=4)
    found = plan.compute(model, layout, client, Occasion(7, delta=delta, basis=Q))
    expected = basis_curvature(model, x, basis=Q, delta=delta, sampled_labels=1, max_examples=4, seed=7)
    assert torch.equal(found.packed(), expected.packed())
    assert len(plan.compute(model, layout, client, Occasion(7, basis=Q)).moment) == 0
    with pytest.raises(SketchError, match=r"needs one: give Occasion\(\.\.\., basis=\.\.\.\)"):
        plan.compute(model, layout, client, Occasion(7))


# --- how it travels ---


@given(k=st.integers(0, 9), trained=st.booleans(), seed=st.integers(0, 2**31 - 1))
def test_packed_and_unpacked_with_all_digits(k: int, trained: bool, seed: int) -> None:
    one = in_basis(k, k + 1, trained, seed)
    sent = one.packed(32)
    assert sent.shape == (8 * (k * (k + 1) // 2 + len(one.moment)),)
    assert one.sent_bytes == len(sent)
    back = BasisCurvature.unpacked(sent, one.basis, one.layout, 32, trained)
    assert all(torch.equal(t, back.tensors()[name]) for name, t in one.tensors().items())
    assert back.flaw(12) is None


@given(
    k=st.integers(0, 9), rows=st.integers(1, 12), trained=st.booleans(), seed=st.integers(0, 2**31 - 1),
    scale=st.floats(-12, 12), dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_a_matrix_in_8_bits_is_a_curvature_again(
    k: int, rows: int, trained: bool, seed: int, scale: float, dtype: torch.dtype
) -> None:
    """Each entry is off by little beside its row's and its column's diagonal, and no eigenvalue is negative."""
    one = in_basis(k, rows, trained, seed, 10**scale).to(dtype)
    sent = one.packed(8)
    assert sent.dtype == torch.uint8
    assert len(sent) == k * (k + 1) // 2 + dtype.itemsize * (k + len(one.moment))
    back = BasisCurvature.unpacked(sent, one.basis, one.layout, 8, trained)
    assert torch.equal(back.moment, one.moment)
    assert torch.equal(back.matrix, back.matrix.T)
    sides = one.matrix.double().diagonal().clamp(min=0).sqrt()
    total = float(one.matrix.double().diagonal().sum())
    off = (back.matrix.double() - one.matrix.double()).abs()
    assert bool((off <= 0.03 * sides[:, None] * sides[None, :] + 2e-5 * total).all())
    if k:
        assert float(torch.linalg.eigvalsh(back.matrix.double())[0]) >= -1e-5 * total


def in_basis(k: int, rows: int, trained: bool, seed: int, scale: float = 1.0) -> BasisCurvature:
    """A curvature with so many rows, in a basis of k columns."""
    A = randn(rows, k, seed=seed) * scale
    matrix = A.T @ A
    moment = randn(k if trained else 0, seed=seed)
    return BasisCurvature((matrix + matrix.T) / 2, moment, columns(12, k), Layout(("w",), ((12,),)))


def test_half_of_a_matrix_by_hand() -> None:
    matrix = torch.tensor([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
    assert pack(matrix).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert torch.equal(unpack(pack(matrix), 3), matrix)


# --- forged answers ---


LAYOUT = Layout(("w",), ((CLASSES * 4,),))
BASIS = columns(12, 3)
GOOD = BasisCurvature(torch.eye(3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), BASIS, LAYOUT)


def answer_of(numbers: Any) -> Tensor:
    """Bytes of an answer with all digits."""
    return torch.from_numpy(np.frombuffer(np.asarray(numbers, "<f8").tobytes(), np.uint8).copy())


@pytest.mark.parametrize("length", [0, 5, 7, 8, 10, 100])
def test_an_answer_of_another_length(length: int) -> None:
    with pytest.raises(SketchError, match=f"has {8 * length} bytes for a basis of 3 columns, expected 48"):
        BasisCurvature.unpacked(answer_of(np.ones(length)), BASIS, LAYOUT, 32)
    with pytest.raises(SketchError, match="for a basis of 3 columns, expected 30"):
        BasisCurvature.unpacked(answer_of(np.ones(length)), BASIS, LAYOUT, 8)


def test_an_answer_of_another_form() -> None:
    for answer in (torch.ones(6, 1), torch.ones(48), answer_of(np.ones(6)).reshape(6, 8)):
        with pytest.raises(SketchError, match="bytes for a basis of 3 columns"):
            BasisCurvature.unpacked(answer, BASIS, LAYOUT, 32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 3, 8])
@pytest.mark.parametrize("bits", [8, 32])
def test_an_answer_that_is_not_finite(place: int, bad: float, bits: int) -> None:
    numbers = np.ones(9 if bits == 32 else 6)
    numbers[place % len(numbers)] = bad
    codes = torch.ones(6, dtype=torch.uint8) if bits == 8 else torch.ones(0, dtype=torch.uint8)
    with pytest.raises(SketchError, match="has NaN or infinity in it"):
        BasisCurvature.unpacked(torch.cat([codes, answer_of(numbers)]), BASIS, LAYOUT, bits, trained=True)


def test_finite_scales_of_an_infinite_matrix() -> None:
    codes, basis = torch.full((6,), 127, dtype=torch.uint8), BASIS.float()
    scales = torch.full((3,), 1e30).view(torch.uint8)
    with pytest.raises(SketchError, match="has NaN or infinity in it"):
        BasisCurvature.unpacked(torch.cat([codes, scales]), basis, LAYOUT, 8)


def test_a_negative_diagonal() -> None:
    answer = answer_of(pack(torch.diag(torch.tensor([1.0, -0.01, 2.0]))))
    with pytest.raises(SketchError, match=r"has a matrix with the eigenvalue -0\.01: a curvature is not negative"):
        BasisCurvature.unpacked(answer, BASIS, LAYOUT, 32)
    rounded = answer_of(pack(torch.diag(torch.tensor([1.0, -1e-7, 2.0]))))
    assert BasisCurvature.unpacked(rounded, BASIS, LAYOUT, 32).matrix[1, 1] < 0


def test_a_curvature_that_is_none_is_not_sent() -> None:
    with pytest.raises(SketchError, match="a curvature is not negative"):
        replace(GOOD, matrix=-GOOD.matrix).packed(8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrix": torch.eye(4).double()}, r"client 0 sent matrix of shape \(4, 4\), expected \(3, 3\)"),
        ({"matrix": -torch.eye(3).double()}, r"client 0 sent a matrix with the eigenvalue -1"),
        ({"matrix": torch.eye(3).double() / 0}, r"client 0 sent NaN or infinity in its matrix"),
        ({"moment": torch.ones(2).double()}, r"client 0 sent moment of shape \(2,\), expected \(3,\)"),
        ({"moment": torch.ones(3, 2).double()}, r"client 0 sent moment of shape \(3, 2\), expected \(3,\)"),
        ({"moment": torch.tensor(1.0).double()}, r"client 0 sent moment of shape \(\), expected \(3,\)"),
        ({"basis": columns(11, 3)}, r"client 0 sent basis of shape \(11, 3\), expected \(12, 3\)"),
    ],
    ids=str,
)
def test_rules_refuse_it(changes: dict[str, Tensor], message: str) -> None:
    update = ClientUpdate(torch.zeros(12).double(), 3, replace(GOOD, **changes), client_id=0)
    with pytest.raises(UpdateError, match=message):
        fipa.aggregate(torch.zeros(12).double(), [update], fipa.FedAvg())


def test_it_does_not_come_with_an_update() -> None:
    """It answers a second question; one that comes with the first answer was not asked for."""
    with pytest.raises(SketchError, match="where none was asked for"):
        BasisCurvature.expected(BasisPlan(), LAYOUT, {}, {})
