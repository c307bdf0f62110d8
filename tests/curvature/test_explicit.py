"""Route 1, explicit rows, in memory and streamed."""

import pytest
import torch

from curvature.cases import CASES, LargestTensor, assert_is, build, case, make, operator_of, randn
from fipa.curvature import explicit


@pytest.mark.parametrize("route", ["rows", "streamed"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_oracle(name, route):
    one = case(name)
    operator = build(one, route)
    assert (operator.matrix is None) == (route == "streamed")
    assert_is(operator, one)


@pytest.mark.parametrize("block_bytes", [1, 4000])
@pytest.mark.parametrize("name", ["mlp/cross_entropy", "mlp/residual"])
@pytest.mark.parametrize("route", ["rows", "streamed"])
def test_block_size_does_not_matter(name, route, block_bytes, monkeypatch):
    # blocks of one example, and blocks that do not divide the number of examples
    monkeypatch.setattr(explicit, "BLOCK_BYTES", block_bytes)
    one = case(name)
    assert_is(build(one, route), one)


def test_blocks_run_from_top_to_bottom(monkeypatch):
    monkeypatch.setattr(explicit, "BLOCK_BYTES", 4000)
    one = case("mlp/residual")
    whole = build(one, "rows").matrix
    blocks = list(build(one, "streamed").blocks())
    assert len(blocks) > 2
    for start, block in blocks:
        torch.testing.assert_close(block, whole[start : start + len(block)], rtol=1e-12, atol=1e-14)
    assert sum(len(block) for _, block in blocks) == one.rows


@pytest.mark.parametrize("route", ["rows", "streamed"])
@pytest.mark.parametrize("name", ["cnn/mse", "tied/cross_entropy", "mlp/residual", "mlp/pde"])
def test_trace_is_exact(name, route):
    one = case(name)
    trace = build(one, route).trace(torch.Generator())
    assert trace == pytest.approx(float(one.hessian.trace()), rel=1e-12)


def wide_problem():
    """About 20 000 parameters and 750 rows: 120 MB of rows, and 3 GB for a p x p matrix."""
    model = make(lambda: torch.nn.Sequential(torch.nn.Linear(100, 190), torch.nn.Tanh(), torch.nn.Linear(190, 6)))
    return model, randn(125, 100)


def test_the_instrument_sees_rows_that_are_held():
    model, x = wide_problem()
    with LargestTensor() as largest:
        operator = operator_of(model, x[:50], "mse", route="rows")
    assert largest.nbytes >= operator.rows * operator.parameters * 8


def test_streamed_rows_stay_within_the_memory_limit():
    model, x = wide_problem()
    limit = 8 * 2**20
    with LargestTensor() as largest:
        operator = operator_of(model, x, "mse", route="rows", memory_limit=limit)
        operator.product(randn(operator.parameters, 3))
        operator.trace(torch.Generator())
    assert operator.rows * operator.parameters * 8 > 10 * limit
    assert largest.nbytes <= limit
