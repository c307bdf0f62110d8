"""A model, clients and a metric."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from federation.cases import DOUBLE, START, linear, lines
from fipa import Client, FipaError, LayoutError, Problem, Residual
from fipa.problems.fitting import misfit

X, Y = torch.ones(4, 2, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE)


def test_theta_load_and_evaluate() -> None:
    problem = lines(0)
    assert problem.theta().tolist() == list(START)
    assert problem.evaluate(torch.tensor([3.0, 4.0], dtype=DOUBLE)) == 25.0
    assert problem.theta().tolist() == [3.0, 4.0]
    assert problem.load(torch.tensor([1.0, 2.0], dtype=DOUBLE)) is problem.model
    assert problem.model.weight.tolist() == [[1.0, 2.0]]
    assert problem.model.weight.requires_grad


def test_selected_parameters_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    frozen = model[0].weight.clone()
    problem = Problem(model, [Residual(misfit, X, Y)], lambda model: 0.0, params="1.*")
    assert problem.layout.names == ("1.weight", "1.bias")
    problem.load(torch.ones(3, dtype=DOUBLE))
    assert torch.equal(model[0].weight, frozen)
    assert problem.theta().tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(LayoutError, match="'head'"):
        Problem(model, [Residual(misfit, X, Y)], lambda model: 0.0, params="head")


def test_metric_sees_the_model_in_evaluation_mode_without_gradients() -> None:
    seen = []

    def metric(model: nn.Module) -> torch.Tensor:
        seen.append((model.training, torch.is_grad_enabled()))
        return model(X).sum()

    problem = Problem(linear(), [Residual(misfit, X, Y)], metric)
    problem.model.train()
    assert problem.evaluate(torch.tensor([1.0, 2.0], dtype=DOUBLE)) == 12.0
    assert seen == [(False, False)]


def test_kinds_of_clients() -> None:
    whole = Client((Residual(misfit, X, Y),), num_examples=9)
    problem = Problem(linear(), [whole, Residual(misfit, X, Y), [Residual(misfit, X, Y)] * 2], lambda model: 0.0)
    assert [client.num_examples for client in problem.clients] == [9, 4, 8]
    assert problem.least_squares
    assert Problem(linear(), [(X, Y[:, None])], lambda model: 0.0, loss="mse").least_squares
    labels = torch.zeros(4, dtype=torch.long)
    assert not Problem(linear(), [(X, labels)], lambda model: 0.0, loss="cross_entropy").least_squares
    mixed = [Client((X, labels), "cross_entropy"), Residual(misfit, X, Y)]
    assert not Problem(linear(), mixed, lambda model: 0.0).least_squares


def test_no_clients() -> None:
    with pytest.raises(FipaError, match="at least one client"):
        Problem(linear(), [], lambda model: 0.0)
