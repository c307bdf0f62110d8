"""Derivatives of a model: against sympy, against dense autograd, and under the transformations of torch.func."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fipa.errors import FipaError
from fipa.pde import Field
from pde.cases import DOUBLE, assert_derivatives, assert_is_dense, axes, laplacian, model_of, network, numbers, points
from pde.cases import smooth as smooth_expression

EXPRESSIONS: dict[str, Callable[[tuple[sp.Symbol, ...]], sp.Expr]] = {
    "polynomial": lambda x: sum(((i + 1) * s**3 - s**2 / 2 for i, s in enumerate(x)), x[0] * x[-1]) + 4,
    "product of sines": lambda x: sp.prod([sp.sin((i + 1) * s + 1) for i, s in enumerate(x)]),
    "sum of sines": lambda x: sum((sp.sin(sp.pi * s) for s in x), sp.Integer(0)),
    "gaussian": lambda x: sp.exp(-sum(((s - sp.Rational(i + 1, 3)) ** 2 for i, s in enumerate(x)), sp.Integer(0))),
    "front": lambda x: sp.tanh(3 * sum(x, sp.Integer(0)) - 1),
    "mixed": lambda x: smooth_expression(len(x)),
}


@pytest.mark.long
@pytest.mark.parametrize("only", [False, True], ids=["all", "laplacian"])
@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_derivatives_by_sympy(d: int, name: str, only: bool) -> None:
    x, u = points(6, d, seed=d), EXPRESSIONS[name](axes(d))
    gradient = torch.stack([numbers(sp.diff(u, s), x) for s in axes(d)], dim=1)
    second = torch.stack([numbers(sp.diff(u, s, 2), x) for s in axes(d)], dim=1)
    torch.testing.assert_close(numbers(laplacian(u, d), x), second.sum(dim=1))
    field = Field(model_of(u, d=d), x, laplacian=only)
    assert_derivatives(field, numbers(u, x), gradient, second, only_laplacian=only and d > 1, tolerance=1e-11)


@pytest.mark.parametrize("d", [1, 2, 3, 5])
@pytest.mark.parametrize("component", [0, 2])
def test_networks_by_dense_autograd(d: int, component: int) -> None:
    assert_is_dense(network([d, 8, 8, 3], seed=d), points(6, d, low=-1), component)


def test_components_share_one_pass_over_the_model() -> None:
    calls = []

    def model(x: Any) -> Any:
        calls.append(type(x).__name__)
        return torch.cat([x[:, :1] ** 2, x[:, 1:] ** 3], dim=1)

    u = Field(model, torch.tensor([[2.0, 3.0]]))
    assert u[1].d(1).tolist() == [27.0]
    assert u[1].dd(1).tolist() == [18.0]
    assert u.dd(0).tolist() == u[0].dd(0).tolist() == [2.0]
    assert u.value.tolist() == [4.0]
    assert u[1].value.tolist() == [27.0]
    assert calls == ["Jet"]


def test_a_value_alone_needs_no_derivatives() -> None:
    calls = []
    u = Field(lambda x: calls.append(type(x).__name__) or x * 2, torch.tensor([[2.0]]))
    assert u.value.tolist() == [4.0]
    assert calls == ["Tensor"]


# --- properties ---

COEFFICIENT = st.floats(-3, 3)


@settings(max_examples=25, deadline=None)
@given(COEFFICIENT, COEFFICIENT, st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_derivatives_are_linear_in_the_function(a: float, b: float, d: int, seed: int, only: bool) -> None:
    f, g, x = network([d, 4, 1], seed=seed), network([d, 3, 1], nn.Sigmoid, seed=seed + 1), points(3, d, seed)
    both, one, other = (Field(m, x, laplacian=only) for m in (lambda x: a * f(x) - b * g(x), f, g))
    torch.testing.assert_close(both.laplacian, a * one.laplacian - b * other.laplacian, rtol=1e-10, atol=1e-12)
    for axis in range(d):
        torch.testing.assert_close(both.d(axis), a * one.d(axis) - b * other.d(axis), rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_chain_rule_with_an_affine_map(d: int, k: int, seed: int, only: bool) -> None:
    """f(y) = sin(w y) of y = A x + b: slopes cos(.) A^T w, curvatures -sin(.) (A^T w)^2."""
    A, b, w = points(k, d, seed, -1), points(1, k, seed + 1, -1)[0], points(1, k, seed + 2, -1)[0]
    x = points(3, d, seed + 3)
    phase, v = (x @ A.T + b) @ w, A.T @ w
    u = Field(lambda x: torch.sin(nn.functional.linear(nn.functional.linear(x, A, b), w[None])), x, laplacian=only)
    second = -torch.sin(phase)[:, None] * v**2
    slope = torch.cos(phase)[:, None] * v
    assert_derivatives(u, torch.sin(phase), slope, second, only_laplacian=only and d > 1)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(0, 99), st.booleans())
def test_the_laplacian_does_not_see_rotations(d: int, seed: int, only: bool) -> None:
    Q = torch.linalg.qr(points(d, d, seed, -1))[0]
    f, x = network([d, 5, 1], seed=seed), points(4, d, seed, -1)
    turned = Field(lambda x: f(nn.functional.linear(x, Q)), x, laplacian=only).laplacian
    plain = torch.stack([hessian(lambda p: f(p[None])[0, 0])(Q @ p).trace() for p in x])
    torch.testing.assert_close(turned, plain, rtol=1e-9, atol=1e-11)


# --- transformations ---

ACTIVATIONS = {"rules": nn.Tanh, "general": nn.SiLU}


def dense_loss(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """mean (Laplacian + u u_1)^2 without jets."""

    def one(point: Tensor) -> Tensor:
        return functional_call(model, params, (point[None],))[0, 0]

    trace = vmap(lambda p: hessian(one)(p).trace())(x)
    return (trace + vmap(one)(x) * vmap(jacrev(one))(x)[:, 0]).square().mean()


def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, only: bool) -> Tensor:
    u = Field(lambda x: functional_call(model, params, (x,)), x, laplacian=only)
    return (u.laplacian + u.value * u.d(0)).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("only", [False, True])
def test_gradients_in_the_parameters(activation: str, only: bool) -> None:
    """By torch.func.grad, by autograd, for a stack of models at once, and traced: always the dense gradient."""
    model, x = network([2, 4, 1], ACTIVATIONS[activation]), points(5, 2)
    params = dict(model.named_parameters())
    expected = grad(lambda p: dense_loss(model, p, x))(params)

    def gradient(params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return grad(lambda p: loss(model, p, x, only))(params)

    torch.testing.assert_close(gradient(params, x), expected, rtol=1e-10, atol=1e-12)

    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    plain = torch.autograd.grad(loss(model, leaves, x, only), list(leaves.values()))
    torch.testing.assert_close(dict(zip(leaves, plain, strict=True)), expected, rtol=1e-10, atol=1e-12)

    others = [{name: value * scale for name, value in params.items()} for scale in (1.0, 0.5, -2.0)]
    stacked = {name: torch.stack([other[name] for other in others]) for name in params}
    places = torch.stack([x, 1 - x, x * x])
    found = vmap(gradient)(stacked, places)
    for i, other in enumerate(others):
        one = grad(lambda p, i=i: dense_loss(model, p, places[i]))(other)
        torch.testing.assert_close({n: t[i] for n, t in found.items()}, one, rtol=1e-10, atol=1e-12)

    traced = make_fx(vmap(gradient))(stacked, places)
    again = traced({name: -value for name, value in stacked.items()}, places / 2)
    one = grad(lambda p: dense_loss(model, p, places[1] / 2))({name: -value for name, value in others[1].items()})
    torch.testing.assert_close({n: t[1] for n, t in again.items()}, one, rtol=1e-10, atol=1e-12)


def test_vmap_over_points() -> None:
    """One point at a time, as per-example Jacobians are taken."""
    model, x = network([3, 4, 1]), points(5, 3)
    single = vmap(lambda point: Field(model, point[None], laplacian=True).laplacian[0])(x)
    expected = torch.stack([hessian(lambda p: model(p[None])[0, 0])(p).trace() for p in x])
    torch.testing.assert_close(single, expected, rtol=1e-11, atol=1e-12)


# --- what is refused ---


def test_a_model_that_ignores_x() -> None:
    u = Field(lambda x: torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(FipaError, match="the function returned a Tensor that does not vary with x"):
        _ = u.laplacian
    with pytest.raises(FipaError, match="the function returned a NoneType"):
        Field(lambda x: None, torch.ones(2, 1)).d(0)


SHAPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "vector": (lambda x: x[:, 0], r"\(3,\)"),
    "scalar": (lambda x: x.sum(), r"\(\)"),
    "three axes": (lambda x: x[:, :, None], r"\(3, 2, 1\)"),
    "too few": (lambda x: x[:2], r"\(2, 2\)"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("what", ["value", "laplacian"])
def test_outputs_of_a_wrong_shape(name: str, what: str) -> None:
    model, got = SHAPES[name]
    with pytest.raises(FipaError, match=rf"the model must return \(3, k\) at 3 points, got {got}"):
        getattr(Field(model, points(3, 2)), what)


def test_second_derivatives_of_a_field_that_has_only_their_sum() -> None:
    u = Field(lambda x: x**3, torch.ones(2, 2), laplacian=True)
    with pytest.raises(FipaError, match="carries the Laplacian only: leave out laplacian=True"):
        u.dd(0)
    assert u.d(0).tolist() == [3.0, 3.0]
    assert Field(lambda x: x**3, torch.ones(2, 1), laplacian=True).dd(0).tolist() == [6.0, 6.0]  # one and the same


def test_pi_stays_exact() -> None:
    """-Laplacian of sin(pi x) sin(pi y) is 2 pi^2 times itself, to rounding."""
    x = points(50, 2)
    u = Field(lambda x: torch.sin(math.pi * x).prod(dim=1, keepdim=True), x, laplacian=True)
    expected = 2 * math.pi**2 * torch.sin(math.pi * x).prod(dim=1)
    torch.testing.assert_close(-u.laplacian, expected, rtol=1e-13, atol=1e-13)
    assert u.x.dtype == DOUBLE
