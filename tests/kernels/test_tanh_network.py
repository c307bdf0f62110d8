"""The loops for tanh networks against torch's autograd through the same network."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from fipa import Client, Layout, Residual, parameters_of
from fipa.clients.objective import Objective, StackedObjective, fast_way
from fipa.kernels import tanh_network
from fipa.kernels.tanh_network import TanhNetwork
from fipa.models import mlp
from fipa.pde import Field
from fipa.pde.jet import Jet

pytest.importorskip("numba")

DOUBLE = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ready(widths: list[int], seed: int = 0) -> tuple[nn.Module, Layout, Tensor, TanhNetwork]:
    """A network with biases, its layout, its parameters, and the loops for it."""
    model = mlp(widths, generator=rng(seed))
    layout = Layout.of(parameters_of(model))
    flat = torch.randn(layout.numel, generator=rng(seed + 1), dtype=DOUBLE) / 2
    net = TanhNetwork.of(model, layout)
    assert net is not None
    return model, layout, flat, net


def parts(jet: Jet) -> Tensor:
    return torch.cat([jet.value[None], jet.slopes, jet.curvatures])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(0, 70),
    st.sampled_from(["values", "laplacian", "curvatures"]),
    st.integers(0, 1000),
)
def test_outputs_and_gradients_are_those_of_torch(widths: list[int], n: int, kind: str, seed: int) -> None:
    model, layout, flat, net = ready(widths, seed)
    points = torch.randn(n, widths[0], generator=rng(seed + 2), dtype=DOUBLE)
    x = points if kind == "values" else Jet.of(points, laplacian=kind == "laplacian")

    def plain(theta: Tensor, x: Any) -> Any:
        return functional_call(model, layout.unflatten(theta), (x,))

    found, expected = net.at(flat, model)(x), plain(flat, x)
    whole = [one[None] if isinstance(one, Tensor) else parts(one) for one in (found, expected)]
    torch.testing.assert_close(whole[0], whole[1], rtol=1e-11, atol=1e-12)
    weights = torch.randn(whole[0].shape, generator=rng(seed + 3), dtype=DOUBLE)

    def loss(theta: Tensor, call: Any) -> Tensor:
        out = call(theta)
        return ((out[None] if isinstance(out, Tensor) else parts(out)) * weights).sum()

    slopes = [grad(loss)(flat, call) for call in (lambda t: net.at(t, model)(x), lambda t: plain(t, x))]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("n", [0, 1, 40, 3000])
def test_a_stack_of_networks_has_the_bits_of_each(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and whether blocks were kept for the way back or not."""
    _, _, _, net = ready([2, 20, 7, 1])
    thetas = torch.randn(3, 2 * 20 + 20 + 140 + 7 + 7 + 1, generator=rng(), dtype=DOUBLE)
    points = torch.rand(3, 3, n, 2, generator=rng(1), dtype=DOUBLE)

    def loss(theta: Tensor, x: Tensor) -> Tensor:
        return net.jets(theta, x, 1).square().sum()

    together = vmap(grad(loss))(thetas, points)
    for kept in (0, 2**40):
        monkeypatch.setattr(tanh_network, "KEPT", kept)
        for i in range(3):
            assert torch.equal(grad(loss)(thetas[i], points[i]), together[i])


def test_tanh_to_the_last_digits() -> None:
    from fipa.kernels.tanh_loops import tanh

    special = [0.0, -0.0, 1e-300, 0.62499999, 0.625, -0.625, 19.0, 40.0, -800.0, math.inf, -math.inf, math.nan]
    x = np.concatenate([np.linspace(-1, 1, 9001), np.linspace(-25, 25, 9001), special])
    found, spare = np.empty_like(x), np.empty_like(x)
    tanh(x, found, spare)
    expected = np.tanh(x)
    assert np.isnan(found[-1])
    assert np.all(np.abs(found[:-1] - expected[:-1]) <= 6 * np.spacing(np.abs(expected[:-1])))  # numpy's errs as well


def test_what_is_no_number_is_not_lost() -> None:
    _, _, flat, net = ready([2, 5, 1])
    x = torch.rand(1, 9, 2, generator=rng(), dtype=DOUBLE)
    broken = flat.clone()
    broken[3] = math.nan
    assert bool(net.jets(broken, x, 0).isnan().all())
    assert bool(grad(lambda t: net.jets(t, x, 0).sum())(broken).isnan().any())


def laplace(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return Field(model, x, laplacian=True).laplacian - y


def nested(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Asks the network about its own outputs."""
    return model(model(x[:, :1]))[:, 0] - y


def transformed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Takes a derivative by itself."""
    return jvp(model, (x[:, :1],), (torch.ones_like(x[:, :1]),))[1][:, 0] - y


def one_by_one(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Asks about points that have lost their axis, as well."""
    return model(x[:, :1])[:, 0] + model(x[0, :1])[0] - y


@pytest.mark.parametrize(
    ("residual", "inputs", "by_loops"),
    [(laplace, 2, True), (one_by_one, 1, True), (nested, 1, False), (transformed, 1, False)],
)
def test_losses_of_all_kinds(residual: Any, inputs: int, by_loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loops cannot do is done by torch, and the gradient is the same."""
    from fipa.kernels import tanh_loops

    back, calls = tanh_loops.backward, list[int]()
    monkeypatch.setattr(tanh_loops, "backward", lambda *args: (calls.append(1), back(*args)))
    model, layout, _, _ = ready([inputs, 8, 1])
    x = torch.rand(3, 11, 2, generator=rng(), dtype=DOUBLE)
    y = torch.rand(3, 11, generator=rng(1), dtype=DOUBLE)
    clients = [Client((Residual(residual, x[m], y[m]),), loss="least_squares") for m in range(3)]
    fast = fast_way(model, layout)
    thetas = torch.randn(3, layout.numel, generator=rng(2), dtype=DOUBLE)
    stacks = [StackedObjective([Objective(model, layout, one, way) for one in clients]) for way in (fast, None)]
    found, expected = (stack.gradients(thetas) for stack in stacks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert bool(calls) == by_loops
    alone = StackedObjective([Objective(model, layout, clients[1], fast)], alone=True)
    often = alone.gradients(thetas[1:2], often=True)
    if by_loops:
        assert torch.equal(often[0], found[1])
    torch.testing.assert_close(often[0], expected[1], rtol=1e-10, atol=1e-12)


def watching() -> nn.Sequential:
    model = mlp([1, 3, 1], generator=rng())
    model[0].register_forward_hook(lambda *_: None)
    return model


def replaced() -> nn.Sequential:
    """Wider than its layers say."""
    model = mlp([1, 3, 1], generator=rng())
    for layer, shape in ((model[0], (5, 1)), (model[2], (1, 5))):
        layer.weight, layer.bias = (nn.Parameter(torch.zeros(s, dtype=DOUBLE)) for s in (shape, shape[:1]))
    return model


def turned_round() -> nn.Sequential:
    """With the bias before the weight, as what takes a parametrization off leaves it."""
    model = mlp([1, 3, 1], generator=rng())
    weight = model[0].weight
    del model[0].weight
    model[0].weight = weight
    return model


def own_forward() -> nn.Sequential:
    model = mlp([1, 3, 1], generator=rng())
    model[0].forward = lambda x: 2 * x @ model[0].weight.T
    return model


def watching_backward() -> nn.Sequential:
    model = mlp([1, 3, 1], generator=rng())
    model[0].register_full_backward_pre_hook(lambda *_: None)
    return model


def tied() -> nn.Sequential:
    one = nn.Linear(3, 3, dtype=DOUBLE)
    return nn.Sequential(nn.Linear(1, 3, dtype=DOUBLE), nn.Tanh(), one, nn.Tanh(), one)


@pytest.mark.parametrize(
    "model",
    [
        mlp([1, 3, 1], generator=rng(), dtype=torch.float32),
        nn.Sequential(nn.Linear(1, 3, dtype=DOUBLE), nn.ReLU(), nn.Linear(3, 1, dtype=DOUBLE)),
        nn.Sequential(nn.Linear(1, 3, dtype=DOUBLE), nn.Tanh()),
        nn.Sequential(nn.Linear(1, 3, bias=False, dtype=DOUBLE), nn.Tanh(), nn.Linear(3, 1, dtype=DOUBLE)),
        nn.Sequential(nn.Linear(1, 3, dtype=DOUBLE), nn.Tanh(), nn.Linear(4, 1, dtype=DOUBLE)),
        nn.Sequential(mlp([1, 3, 1], generator=rng())),
        watching(),
        watching_backward(),
        own_forward(),
        replaced(),
        turned_round(),
        tied(),
    ],
)
def test_other_models_are_left_alone(model: nn.Module) -> None:
    assert TanhNetwork.of(model, Layout.of(parameters_of(model))) is None


def test_parts_of_the_parameters_are_left_alone() -> None:
    model = mlp([1, 3, 1], generator=rng())
    some = {name: p for name, p in parameters_of(model).items() if name.startswith("2.")}
    assert TanhNetwork.of(model, Layout.of(some)) is None
