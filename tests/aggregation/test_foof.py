"""FOOF (FedPM's mixing) against the dense Kronecker curvature C (x) I."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fipa
from aggregation.strategies import (
    DOUBLE,
    FAST,
    SEEDS,
    Round,
    dense,
    dense_covariance,
    dense_parts,
    generator,
    normal,
    random_round,
)
from fipa import FOOF, ClientUpdate, InputCovariance, Layout, UpdateError

# Two layers, one with a bias that does not stand next to its weight, and a parameter of no layer.
TWO_LAYERS = Layout(("a.weight", "b.weight", "scale", "a.bias"), ((2, 3), (3, 2, 1, 2), (2,), (2,)))


@st.composite
def covariance_rounds(draw: st.DrawFn) -> Round:
    """Covariances of few inputs, singular more often than not, of a linear and a convolutional layer."""
    rng = generator(draw(SEEDS))
    updates, deltas, curvatures = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        layers = {}
        for weight, bias, inputs in (("a.weight", "a.bias", 3), ("b.weight", None, 4)):
            x = normal(draw(st.integers(1, 6)), inputs, rng=rng)
            if bias:
                x = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], dim=1)
            layers[weight] = (bias, x.T @ x / len(x))
        covariance, delta = InputCovariance(layers, TWO_LAYERS), normal(TWO_LAYERS.numel, rng=rng)
        updates.append(ClientUpdate(delta, draw(st.integers(1, 50)), covariance))
        deltas.append(delta)
        curvatures.append(dense_covariance(covariance))
    return Round(updates, deltas, curvatures)


@FAST
@given(clients=covariance_rounds(), damping=st.floats(1e-4, 10.0), step=st.floats(0.1, 2.0))
def test_equals_dense_kronecker_solve(clients: Round, damping: float, step: float) -> None:
    rule = FOOF(damping, step)
    torch.testing.assert_close(clients.change(rule), sum(dense_parts(rule, clients)), rtol=0, atol=1e-8)


@FAST
@given(clients=covariance_rounds(), damping=st.floats(1e-3, 1.0))
def test_uncovered_parameters_are_averaged(clients: Round, damping: float) -> None:
    where = TWO_LAYERS.slices["scale"]
    torch.testing.assert_close(clients.change(FOOF(damping))[where], clients.mean[where], rtol=0, atol=1e-13)


@FAST
@given(clients=covariance_rounds())
def test_tends_to_fedavg_under_strong_damping(clients: Round) -> None:
    near, far = (float((clients.change(FOOF(damping)) - clients.mean).norm()) for damping in (1e4, 1e5))
    assert far <= 0.11 * near + 1e-12
    assert near <= 1e-2 * max(1.0, float(torch.stack(clients.deltas).norm()))


@FAST
@given(clients=covariance_rounds(), seed=SEEDS)
def test_clients_that_agree_are_followed(clients: Round, seed: int) -> None:
    v = normal(clients.p, rng=generator(seed))
    agreed = clients.with_deltas([v] * len(clients.updates))
    torch.testing.assert_close(agreed.change(FOOF()), v, rtol=0, atol=1e-9)


LINEAR_IN_PARAMETERS = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "linear, no bias": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2, padding=1, stride=2), nn.Flatten()), (2, 3, 3)),
}


@pytest.mark.parametrize("model", LINEAR_IN_PARAMETERS)
def test_equals_gauss_newton_of_one_layer(model: str) -> None:
    """Where C (x) I is the Gauss-Newton matrix of squared errors, up to the number of positions of a convolution.

    Damping is relative, so that such a factor cancels.
    """
    build, shape = LINEAR_IN_PARAMETERS[model]
    torch.manual_seed(0)
    layer, rng = build().double(), generator(2)
    theta = fipa.parameters_of(layer)
    layout = Layout.of(theta)
    updates, deltas, curvatures = [], [], []
    for n in (4, 9):
        x, delta = normal(n, *shape, rng=rng), normal(layout.numel, rng=rng)
        updates.append(ClientUpdate(layout.unflatten(delta), n, fipa.input_covariance(layer, x)))
        deltas.append(delta)
        curvatures.append(dense(fipa.sketch(layer, x, "mse", rank=None)))
    H = sum(n / 13 * C for n, C in zip((4, 9), curvatures, strict=True))
    beta = 0.01 * H.diagonal().mean() * torch.eye(layout.numel, dtype=DOUBLE)
    moved = sum(n / 13 * (C + beta) @ D for n, C, D in zip((4, 9), curvatures, deltas, strict=True))
    expected = layout.unflatten(torch.linalg.solve(H + beta, moved))
    change = fipa.aggregate(theta, updates, FOOF(damping=0.01)).theta
    for name in theta:
        torch.testing.assert_close(change[name], theta[name] + expected[name], rtol=0, atol=1e-9)


def test_network_with_conv_linear_and_norm_layers() -> None:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2)
    model = nn.Sequential(conv, norm, nn.Tanh(), nn.Flatten(), nn.Linear(8, 2, bias=False)).double()
    theta, rng = fipa.parameters_of(model), generator(3)
    layout = Layout.of(theta)
    updates, deltas, curvatures = [], [], []
    for n in (5, 2, 8):
        covariance = fipa.input_covariance(model, normal(n, 1, 3, 3, rng=rng))
        assert list(covariance.layers) == ["0.weight", "4.weight"]
        delta = normal(layout.numel, rng=rng)
        updates.append(ClientUpdate(layout.unflatten(delta), n, covariance))
        deltas.append(delta)
        curvatures.append(dense_covariance(covariance))
    clients = Round(updates, deltas, curvatures)
    result = fipa.aggregate(theta, updates, FOOF())
    expected = layout.unflatten(sum(dense_parts(FOOF(), clients)))
    for name in theta:
        torch.testing.assert_close(result.theta[name], theta[name] + expected[name], rtol=0, atol=1e-9)
    for name in ("1.weight", "1.bias"):
        average = layout.unflatten(clients.mean)[name]
        torch.testing.assert_close(result.theta[name], theta[name] + average, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_layer_without_input_is_averaged(dtype: torch.dtype) -> None:
    """All inputs of a layer may be zero, behind dead units: damping has nothing to be relative to."""
    layout = Layout(("weight",), ((2, 3),))
    zero = InputCovariance({"weight": (None, torch.zeros(3, 3, dtype=dtype))}, layout)
    deltas = [torch.linspace(-1, 1, 6, dtype=dtype), torch.linspace(3, 1, 6, dtype=dtype)]
    updates = [ClientUpdate(d, n, zero) for d, n in zip(deltas, (1, 3), strict=True)]
    result = fipa.aggregate(torch.zeros(6, dtype=dtype), updates, FOOF())
    torch.testing.assert_close(result.theta, 0.25 * deltas[0] + 0.75 * deltas[1])  # default: to the dtype's precision
    assert result.diagnostics.effective_rank == pytest.approx(0.0, abs=1e-6)
    assert result.diagnostics.condition_number == pytest.approx(1.0)


def test_damping_too_weak_for_the_dtype_is_explained() -> None:
    """Few inputs of many features in float32: singular up to rounding, which may well be negative."""
    rng = generator(4)
    x = torch.randn(3, 60, generator=rng)
    covariance = InputCovariance({"weight": (None, x.T @ x / 3)}, Layout(("weight",), ((2, 60),)))
    update = ClientUpdate(torch.ones(120), 1, covariance)
    with pytest.raises(fipa.FipaError, match=r"weight.*damping|damping.*weight"):
        fipa.aggregate(torch.zeros(120), [update], FOOF(damping=1e-12))


# --- what clients can get wrong ---


def covariance_of(matrix: Tensor, weight: str = "layer.weight", bias: str | None = "layer.bias") -> InputCovariance:
    return InputCovariance({weight: (bias, matrix)}, random_round(FOOF(), 0).updates[0].sketch.layout)


def aggregate_with(curvature: InputCovariance, position: int = 1) -> Tensor:
    """A round in which one of three clients sends another curvature."""
    updates = random_round(FOOF(), 0, ids=[0, 1, 2]).updates
    updates[position] = replace(updates[position], sketch=curvature)
    theta = {"layer.weight": torch.zeros(3, 2), "scale": torch.zeros(4), "layer.bias": torch.zeros(3)}
    return fipa.aggregate({name: t.double() for name, t in theta.items()}, updates, FOOF()).theta


@pytest.mark.parametrize(
    ("curvature", "message"),
    [
        (covariance_of(torch.full((3, 3), float("nan"), dtype=DOUBLE)), "NaN or infinity.*layer.weight"),
        (covariance_of(torch.full((3, 3), float("inf"), dtype=DOUBLE)), "NaN or infinity.*layer.weight"),
        (covariance_of(torch.eye(3)), "float32.*theta is torch.float64"),
        (covariance_of(torch.eye(4, dtype=DOUBLE)), r"layer.weight.*\(4, 4\)|\(4, 4\).*layer.weight"),
        (covariance_of(torch.ones(3, 2, dtype=DOUBLE)), r"layer.weight.*\(3, 2\)|\(3, 2\).*layer.weight"),
        (covariance_of(torch.eye(3, dtype=DOUBLE), weight="layer.wait"), "layer.wait"),
        (covariance_of(torch.eye(3, dtype=DOUBLE), bias="layer.buyers"), "layer.buyers"),
        (covariance_of(-torch.eye(3, dtype=DOUBLE)), "negative"),
    ],
    ids=["nan", "inf", "dtype", "too large", "not square", "unknown weight", "unknown bias", "negative"],
)
@pytest.mark.parametrize("position", [0, 1])
def test_bad_covariances_name_their_client(curvature: InputCovariance, message: str, position: int) -> None:
    """Whichever place the client has: the first must not be the measure of all others."""
    with pytest.raises(UpdateError, match=f"client {position} .*({message})"):
        aggregate_with(curvature, position)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_layer_that_not_all_clients_cover(position: int) -> None:
    """Who of them is right cannot be told; but to average it in silence, or not, must not depend on their order."""
    with pytest.raises(UpdateError, match=r"client \d .*layer.weight"):
        aggregate_with(InputCovariance({}, covariance_of(torch.eye(3)).layout), position)


@pytest.mark.parametrize("settings", [{"damping": -1}, {"step": -1}, {"damping": 0}])
def test_bad_settings(settings: dict[str, float]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(fipa.FipaError, match=rf"FOOF\({name}={value}\)"):
        FOOF(**settings)
