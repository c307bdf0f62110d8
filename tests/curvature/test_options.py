"""Options that all functions of curvature share: passed on to the last, and refused where they are misspelt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fipa
from fipa.curvature.options import Options

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
DELTA = torch.zeros(15)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sketch": lambda model, **more: fipa.sketch(model, X, rank=2, **more),
    "additive": lambda model, **more: fipa.additive_statistics(
        model, X, **{"delta": DELTA, "width": 3, "test_seed": 1, "num_examples": 30} | more
    ),
    "diagonal": lambda model, **more: fipa.diagonal_fisher(model, X, **more),
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_option_arrives(function: Callable[..., Any], model: nn.Module) -> None:
    plain = function(model)
    assert plain.layout.names == ("weight", "bias")
    double = function(model, dtype=torch.float64)
    assert {t.dtype for t in double.tensors().values()} == {torch.float64}
    some = {"params": "bias", "delta": DELTA[:3]} if "delta" in plain.tensors() else {"params": "bias"}
    assert function(model, **some).layout.names == ("bias",)
    for fewer in ({"max_examples": 10}, {"sampled_labels": 1}):
        first, again, other = (function(model, seed=seed, **fewer).sizes() for seed in (1, 1, 2))
        assert first == again
        assert first != other
        assert first != plain.sizes()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_misspelt_options_are_refused_by_name(function: Callable[..., Any], model: nn.Module) -> None:
    with pytest.raises(
        TypeError, match=r"'max_exmaples': did you mean 'max_examples'\? Choose one of params, max_examples"
    ):
        function(model, max_exmaples=10)


@pytest.mark.parametrize("plan", [fipa.SketchPlan, fipa.AdditivePlan, fipa.DiagonalPlan])
def test_plans_pass_their_options_on(plan: Any, model: nn.Module) -> None:
    layout, occasion = fipa.Layout.of(fipa.parameters_of(model, "bias")), fipa.Occasion(seed=7)
    options = plan(max_examples=10, sampled_labels=1).options(layout, occasion)
    assert options == {"params": ("bias",), "max_examples": 10, "sampled_labels": 1, "seed": 7}
    assert set(options) <= set(Options.__annotations__)
    assert {field.name for field in dataclasses.fields(plan)} >= {"max_examples", "sampled_labels"}
