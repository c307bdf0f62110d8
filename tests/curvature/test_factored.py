"""Rows of small CNNs whose linear parts stay factored, against the rows of `vmap`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import images, network, rng
from torch import Tensor, nn

from curvature.cases import LargestTensor, operator_of
from fipa import Layout, Residual, basis_curvature, diagonal_fisher, parameters_of, sketch
from fipa.curvature import factored, solvers
from fipa.curvature.explicit import ExplicitRows
from fipa.curvature.factored import FactoredRows
from fipa.curvature.operator import CurvatureOperator
from fipa.curvature.solvers import _normalise as normalise
from fipa.errors import NotFinite
from fipa.kernels.small_cnn import BLOCK, Factors, SmallCNN

pytest.importorskip("numba")

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mse", {}),
    ("cross_entropy", {}),
    *(("cross_entropy", {"sampled_labels": labels}) for labels in (1, 3)),
]


def close(found: Tensor, expected: Tensor) -> None:
    """Within some roundings of float32 of the largest entry."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 4e-6 * max(1.0, float(expected.abs().max()))


def both(model: nn.Module, x: Any, loss: str, **options: Any) -> tuple[CurvatureOperator, Tensor]:
    """The operator with factors, and the rows by vmap."""
    fast = operator_of(model, x, loss, **options)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(SmallCNN, "of", staticmethod(lambda *_: None))
        slow = operator_of(model, x, loss, **options)
    assert isinstance(fast, FactoredRows)
    assert isinstance(slow, ExplicitRows)
    assert slow.matrix is not None
    return fast, slow.matrix


def check(operator: CurvatureOperator, A: Tensor) -> None:
    """All that an operator can do, against its rows."""
    assert isinstance(operator, FactoredRows)
    assert (operator.rows, operator.parameters) == A.shape
    V, Z = torch.randn(A.shape[1], 4, generator=rng(5)), torch.randn(len(A), 3, generator=rng(6))
    close(operator.forward(V), A @ V)
    close(operator.adjoint(Z), A.T @ Z)
    close(operator.gram(), A @ A.T)
    close(operator.diagonal(), A.square().sum(0))
    assert operator.trace(rng()) == pytest.approx(float(A.square().sum()), rel=1e-5)


@pytest.mark.parametrize(("loss", "options"), OPTIONS)
@pytest.mark.parametrize("n", [1, BLOCK, 2 * BLOCK + 7])
def test_equals_the_rows_of_vmap(loss: str, options: dict[str, Any], n: int) -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(n, (1, 5, 6))
    check(*both(model, x, loss, **options))


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    widths=st.sampled_from([(3,), (5, 3), (6, 5, 3)]), n=st.integers(1, 9), labels=st.integers(1, 3),
    block=st.sampled_from([1, 300, 10**6]), many=st.sampled_from([1, 4, 10**6]),
)  # fmt: skip
def test_any_number_of_layers_labels_blocks_and_columns(
    widths: tuple[int, ...], n: int, labels: int, block: int, many: int
) -> None:
    model, (x, _) = network([3], [True], (1, 4, 4), widths), images(n, (1, 4, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factored, "BLOCK_BYTES", block)
        patch.setattr(factored, "MANY", many)
        check(*both(model, x, "cross_entropy", sampled_labels=labels))


@pytest.mark.parametrize("sizes", [(13, 7), (1, 1), (1, 100), (101, 1)])
def test_several_batches(sizes: tuple[int, int]) -> None:
    """Of different dtypes, else they would be joined; blocks of one image must not share memory."""
    n = sum(sizes)
    model, (x, y) = network([3], [True], (1, 4, 4)), images(n, (1, 4, 4))
    first, rest = slice(sizes[0]), slice(sizes[0], n)
    batches = [(x[first], y[first]), (x[rest].double(), y[rest])]
    whole, pieces = (operator_of(model, data, "mse") for data in (x, batches))
    assert len(pieces.terms) == 2
    close(pieces.gram(), whole.gram())


def test_the_sketch_and_the_diagonal_are_those_of_explicit_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(40, (1, 5, 6))
    found, diagonal = sketch(model, x, rank=5), diagonal_fisher(model, x)
    monkeypatch.setattr(SmallCNN, "of", staticmethod(lambda *_: None))
    expected = sketch(model, x, rank=5)
    close(found.eigenvalues, expected.eigenvalues)
    close((found.eigenvectors.T @ expected.eigenvectors).abs(), torch.eye(5))
    close(diagonal.values, diagonal_fisher(model, x).values)


@pytest.mark.parametrize(("spread", "mended"), [(1.0, False), (0.1, False), (0.01, True)])
def test_eigenvectors_of_nearly_equal_images_are_orthonormal(
    spread: float, mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small eigenvalues are differences of large rows: mended only where they are lost in rounding."""
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(12, (1, 5, 6))
    operator, A = both(model, x[:1] + spread * x, "mse")
    calls = []
    monkeypatch.setattr(solvers, "_normalise", lambda *args: (calls.append(args), normalise(*args))[1])
    vectors, values = solvers.exact(operator, 12)
    assert bool(calls) == mended
    expected = torch.linalg.svdvals(A.double()).square()[: len(values)]
    assert len(values) >= 8
    torch.testing.assert_close(values.double(), expected, rtol=1e-5 / spread, atol=0)
    found = vectors.double().T @ vectors.double()
    assert float((found - torch.eye(len(values))).abs().max()) < 2e-6


@pytest.mark.parametrize("scale", [0.0, 1e-22, 1e-40])
def test_eigenvalues_that_a_float_cannot_hold_are_left_out(scale: float) -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(12, (1, 5, 6))
    operator, _ = both(model, x * torch.logspace(0, -2, 12)[:, None, None, None], "mse")
    assert isinstance(operator, FactoredRows)
    operator._factors = Factors(
        operator._factors.convolutions * scale, tuple((s * scale, h) for s, h in operator._factors.linear)
    )
    vectors, values = solvers.exact(operator, 12)
    assert bool((values > 0).all())
    assert bool(vectors.isfinite().all())
    assert len(values) < 12


@pytest.mark.parametrize("scale", [1e20, 1e25])
def test_eigenvalues_that_overflow_are_an_error(scale: float) -> None:
    """Even where the outputs, and the Gram matrix in double precision, do not."""
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(12, (1, 5, 6))
    with pytest.raises(NotFinite):
        sketch(model, x * scale, "mse", rank=4)
    certain = sketch(model, x * scale, rank=4, sampled_labels=1)  # slopes are zero to the last bit
    assert (certain.rank, certain.trace) == (0, 0.0)


def test_no_row_of_a_linear_layer_is_formed() -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6), (40, 3)), images(2 * BLOCK + 7, (1, 5, 6))
    p = sum(t.numel() for t in model.parameters())
    basis = torch.randn(p, 3, generator=rng(4))
    with LargestTensor() as largest:
        basis_curvature(model, x, basis=basis, sampled_labels=1)
    assert largest.nbytes < len(x) * p  # a quarter of the rows


def test_too_many_rows_are_left_to_others() -> None:
    model, (x, _) = network([3], [True], (1, 4, 4)), images(5, (1, 4, 4))
    assert isinstance(operator_of(model, x, "mse", memory_limit=100), ExplicitRows)
    assert not isinstance(operator_of(model, x, "mse", memory_limit=100, route="auto"), FactoredRows)


def test_other_networks_are_left_to_vmap() -> None:
    model, (x, _) = network([3], [True], (1, 4, 4)), images(5, (1, 4, 4))
    residual = Residual(lambda u, x: u(x).square(), x)
    cases: list[tuple[nn.Module, Any, str, dict[str, Any]]] = [
        (model, x, "mse", {"dtype": torch.float64}),
        (model, x, "mse", {"params": "0.*"}),
        (model, {"input": x}, "mse", {}),
        (model, residual, "least_squares", {}),
        (network([64], [True], (1, 4, 4)), x, "mse", {}),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3)), x, "mse", {}),
    ]
    for one, data, loss, options in cases:
        assert isinstance(operator_of(one, data, loss, **options), ExplicitRows)
    assert isinstance(operator_of(model, x, "mse"), FactoredRows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("where", ["images", "convolution", "linear"])
def test_what_is_not_finite_is_an_error(bad: float, where: str) -> None:
    """Also what is finite, but so large that outputs are not."""
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(BLOCK + 7, (1, 5, 6))
    place = {"images": x[-1], "convolution": model[0].weight.data, "linear": model[-1].weight.data}[where]
    place.copy_(torch.randn(place.shape, generator=rng(4)).sign() * bad)
    basis = torch.eye(Layout.of(parameters_of(model)).numel)
    with pytest.raises(NotFinite):
        basis_curvature(model, x, basis=basis, sampled_labels=1)
    with pytest.raises(NotFinite):
        sketch(model, x, rank=2, sampled_labels=1)
