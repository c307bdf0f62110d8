"""Route 2, matrix-free products."""

import pytest
import torch
from torch import nn

from curvature.cases import (
    CASES,
    ROUTES,
    LargestTensor,
    assert_is,
    build,
    case,
    dense,
    gauss_newton,
    make,
    mlp,
    operator_of,
    randn,
)
from fipa import Residual


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_oracle(name):
    one = case(name)
    assert_is(build(one, "matrix_free"), one)


@pytest.mark.parametrize("name", CASES)
def test_products_in_many_small_blocks_equal_the_dense_oracle(name):
    one = case(name)
    V = randn(one.parameters, 3, seed=5)
    torch.testing.assert_close(build(one, "tight").product(V), one.hessian @ V, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory_limit", [0, 3000, 20_000])
def test_memory_limit_does_not_change_the_products(memory_limit):
    one = case("mlp/residual")
    V = randn(one.parameters, 5, seed=5)
    product = build(one, "matrix_free", memory_limit=memory_limit).product(V)
    torch.testing.assert_close(product, one.hessian @ V, rtol=1e-10, atol=1e-12)


def test_more_examples_than_one_block_takes():
    # 256 examples are the most that a block takes, whatever the memory
    model, x = make(lambda: nn.Linear(2, 2)), randn(300, 2)
    expected = dense(operator_of(model, x, "cross_entropy"))
    torch.testing.assert_close(
        dense(operator_of(model, x, "cross_entropy", **ROUTES["matrix_free"])), expected, rtol=1e-10, atol=1e-12
    )


def test_residuals_may_differentiate_in_reverse_mode():
    # A PDE residual by torch.func.grad is as natural as one by jvp.
    model, x = make(mlp), randn(4, 3)

    def residual(u, x):
        return torch.func.vmap(torch.func.grad(lambda s: u(s[None])[0, 0]))(x)

    def blocks():
        moved = x.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(model(moved)[:, 0].sum(), moved, create_graph=True)
        return [(slopes, torch.eye(3, dtype=torch.float64).expand(4, 3, 3) / 4)]

    operator = operator_of(model, Residual(residual, x), "least_squares", route="matrix_free")
    torch.testing.assert_close(dense(operator), gauss_newton(model, blocks), rtol=1e-10, atol=1e-12)


def test_trace_estimate_is_unbiased():
    # Hutchinson with signs: the mean over many seeds lies within 6 standard errors (false alarm below 1e-8) and
    # those are small enough (1 %) to tell the trace from its neighbours
    one = case("mlp/cross_entropy")
    operator = build(one, "matrix_free")
    traces = torch.tensor([operator.trace(torch.Generator().manual_seed(seed)) for seed in range(60)])
    error = float(traces.std() / len(traces) ** 0.5)
    exact = float(one.hessian.trace())
    assert abs(float(traces.mean()) - exact) < 6 * error
    assert 0 < 6 * error < 0.2 * exact


def test_trace_estimate_is_exact_for_a_diagonal_matrix():
    # random signs cancel in every diagonal entry, whatever their number: no statistics in this test
    model, x = make(lambda: nn.Linear(3, 2, bias=False)), torch.diag(torch.tensor([1.0, 2.0, 3.0]).double())
    trace = operator_of(model, x, "mse", route="matrix_free").trace(torch.Generator())
    assert trace == pytest.approx(2 * (1 + 4 + 9) / 3, rel=1e-12)


def test_trace_is_deterministic():
    operator = build(case("mlp/mse"), "matrix_free")
    assert operator.trace(torch.Generator().manual_seed(3)) == operator.trace(torch.Generator().manual_seed(3))
    assert operator.trace(torch.Generator().manual_seed(3)) != operator.trace(torch.Generator().manual_seed(4))


def test_nothing_of_the_size_of_the_rows_is_made():
    model = make(lambda: nn.Sequential(nn.Linear(100, 190), nn.Tanh(), nn.Linear(190, 6)))
    x, limit = randn(125, 100), 8 * 2**20
    with LargestTensor() as largest:
        operator = operator_of(model, x, "mse", route="matrix_free", memory_limit=limit)
        operator.product(randn(operator.parameters, 3))
        operator.trace(torch.Generator())
    assert operator.rows * operator.parameters * 8 > 10 * limit
    assert largest.nbytes <= limit


def dominated():
    """One eigenvalue of 90 % of the trace, in a direction that random signs do not favour."""
    turn = torch.linalg.qr(randn(12, 12, seed=4)).Q
    x = torch.linspace(1, 0.5, 12, dtype=torch.float64).diag() @ turn
    x[0] *= 10
    operator = operator_of(make(lambda: nn.Linear(12, 1, bias=False)), x, "mse", route="matrix_free")
    values, vectors = torch.linalg.eigh(dense(operator))
    return operator, vectors.flip(1), values.flip(0)


def test_kept_eigenpairs_sharpen_the_trace():
    operator, vectors, values = dominated()
    exact = float(values.sum())
    assert float(values[0]) > 0.9 * exact

    def error(kept):
        found = [operator.trace(torch.Generator().manual_seed(seed), kept) for seed in range(20)]
        return sum(abs(trace - exact) for trace in found) / len(found)

    assert error((vectors[:, :1], values[:1])) < 0.1 * error(None)
    assert error(None) < 0.5 * exact


def test_trace_is_exact_when_all_eigenpairs_are_kept():
    operator, vectors, values = dominated()
    assert operator.trace(torch.Generator(), (vectors, values)) == pytest.approx(float(values.sum()), rel=1e-12)
