"""The diagonal of the curvature."""

import pytest
import torch

from curvature.cases import CASES, case, dense, make, mlp, operator_of, randn
from fipa import LayoutError, SketchError, diagonal_fisher
from fipa.curvature import explicit


@pytest.mark.parametrize("name", CASES)
def test_equals_the_diagonal_of_the_oracle(name):
    one = case(name)
    result = diagonal_fisher(one.model, one.data, one.loss, params=one.params)
    torch.testing.assert_close(result.values, one.hessian.diagonal(), rtol=1e-10, atol=1e-12)
    assert result.layout.numel == one.parameters
    assert not result.values.requires_grad


def test_blocks_are_summed(monkeypatch):
    monkeypatch.setattr(explicit, "BLOCK_BYTES", 2000)
    one = case("mlp/residual")
    result = diagonal_fisher(one.model, one.data, one.loss)
    torch.testing.assert_close(result.values, one.hessian.diagonal(), rtol=1e-10, atol=1e-12)
    assert result.num_examples == 5 + 3


def test_sampled_labels_and_examples_are_those_of_the_operator():
    model, x, options = make(mlp), randn(9, 3), {"sampled_labels": 2, "max_examples": 4, "seed": 3}
    H = dense(operator_of(model, x, "cross_entropy", **options))
    result = diagonal_fisher(model, x, **options)
    torch.testing.assert_close(result.values, H.diagonal(), rtol=1e-10, atol=1e-12)
    assert result.num_examples == 4
    assert torch.equal(result.values, diagonal_fisher(model, x, **options).values)


def test_dtype():
    model, x = make(mlp).float(), randn(5, 3)
    assert diagonal_fisher(model, x).values.dtype == torch.float32
    assert diagonal_fisher(model, x, dtype=torch.float64).values.dtype == torch.float64


def test_what_is_refused():
    x = randn(5, 3)
    with pytest.raises(SketchError, match="there is no loss"):
        diagonal_fisher(make(mlp), x, "hinge")
    with pytest.raises(SketchError, match="empty"):
        diagonal_fisher(make(mlp), [])
    with pytest.raises(LayoutError, match="matches no parameter"):
        diagonal_fisher(make(mlp), x, params="nothing")


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(SketchError, match="not finite"):
        diagonal_fisher(make(mlp), randn(5, 3) * float("nan"))
