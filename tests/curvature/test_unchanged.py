"""Looking at a model leaves it as it was: parameters, buffers, ties, gradients, modes, hooks, and the random state."""

import math

import pytest
import torch
from torch import nn

import fipa
from curvature.cases import HEADS, MODELS, assert_unchanged, make, model_and_inputs, randn, snapshot
from fipa import Residual, SketchError, sketch

X = randn(5, 3)

LOOKS = {
    "rows": lambda model, x: sketch(model, x, rank=2, route="rows"),
    "streamed": lambda model, x: sketch(model, x, rank=2, route="rows", memory_limit=0),
    "matrix_free": lambda model, x: sketch(model, x, rank=2, route="matrix_free"),
    "auto": lambda model, x: sketch(model, x, rank=2),
    "float32": lambda model, x: sketch(model, x, rank=2, dtype=torch.float32),
    "least_squares": lambda model, x: sketch(model, Residual(lambda u, x: u(x), x), "least_squares", rank=2),
    "diagonal": lambda model, x: fipa.diagonal_fisher(model, x),
    "covariance": lambda model, x: fipa.input_covariance(model, x),
    "additive": lambda model, x: fipa.additive_statistics(
        model, x, delta=fipa.parameters_of(model), width=2, test_seed=0, num_examples=5
    ),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", MODELS)
def test_the_model_and_the_global_random_state_are_not_changed(name, look):
    model, x = model_and_inputs(name)
    model.train()
    list(model.children())[-1].eval()  # modes of its own for a part
    before, random_state = snapshot(model), torch.get_rng_state()
    LOOKS[look](model, x)
    assert_unchanged(model, before)
    assert torch.equal(random_state, torch.get_rng_state())


def test_the_head_route_leaves_the_model_alone():
    for name in ("mlp", "cnn", "resnet", "normed", "aliased"):
        model, x = model_and_inputs(name)
        model.train()
        before = snapshot(model)
        sketch(model, x, rank=2, params=HEADS[name], route="linear_head")
        assert_unchanged(model, before)


def test_training_goes_on_as_if_nothing_had_happened():
    def losses(look):
        model, x = make(MODELS["aliased"]), X
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            if look:
                sketch(model, x, rank=2)
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [float(p.detach().sum()) for p in model.parameters()]

    assert losses(look=True) == losses(look=False)


class Fails(nn.Module):
    """Raises in its n-th forward pass."""

    def __init__(self, at):
        super().__init__()
        self.body, self.norm, self.left = nn.Linear(3, 4), nn.BatchNorm1d(4), at
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no luck")
        return self.head(self.norm(self.body(x)))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_model_is_not_changed_by_an_exception(look, at):
    model = make(lambda: Fails(at))
    model.train()
    model.head.eval()
    before = snapshot(model)
    try:  # some looks are content with fewer passes than `at`
        LOOKS[look](model, X)
    except (RuntimeError, SketchError) as error:
        assert "no luck" in str(error)  # noqa: PT017
    assert_unchanged(model, before)


def test_the_model_is_not_changed_when_the_data_are_refused():
    model = make(MODELS["normed"]).train()
    before = snapshot(model)
    for bad in ([], X * math.nan, X[:, :0]):
        with pytest.raises((SketchError, RuntimeError)):
            sketch(model, bad, "mse", rank=2)
        assert_unchanged(model, dict(before))
