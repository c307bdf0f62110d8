"""Independent answers: expressions in sympy, and derivatives by dense autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import sympy as sp
import torch
from torch import Tensor, nn
from torch.func import hessian, jacrev, vmap

from fipa.clients.gauss_newton import GaussNewton
from fipa.curvature.sketch import SketchPlan
from fipa.federation.control import StepControl
from fipa.federation.stage import Stage
from fipa.pde import Field

DOUBLE = torch.float64
TORCH = [{name: getattr(torch, name) for name in ("sin", "cos", "exp", "tanh", "sqrt", "sigmoid")}, "math"]


def axes(d: int) -> tuple[sp.Symbol, ...]:
    return sp.symbols(f"x1:{d + 1}", real=True)


def points(n: int, d: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(n, d, generator=generator, dtype=DOUBLE)


def numbers(expression: sp.Expr, x: Tensor) -> Tensor:
    """An expression at points (n, d), by numpy: (n)."""
    function = sp.lambdify(axes(x.shape[1]), expression, "numpy")
    return torch.from_numpy(np.broadcast_to(np.asarray(function(*x.numpy().T), dtype=float), len(x)).copy())


def model_of(*expressions: sp.Expr, d: int) -> Callable[[Any], Any]:
    """Expressions as a model (n, d) -> (n, k) of torch's functions."""
    functions = [sp.lambdify(axes(d), expression, TORCH) for expression in expressions]
    return lambda x: torch.stack([function(*(x[:, i] for i in range(d))) for function in functions], dim=1)


def laplacian(u: sp.Expr, d: int) -> sp.Expr:
    return sum((sp.diff(u, s, 2) for s in axes(d)), sp.Integer(0))


def smooth(d: int) -> sp.Expr:
    """A function without symmetries."""
    x = axes(d)
    waves = sum((sp.sin((i + 2) * s + i) / (i + 1) for i, s in enumerate(x)), sp.Integer(0))
    return waves + sp.exp(-x[0] * x[-1]) + sp.prod([1 + s / (i + 3) for i, s in enumerate(x)])


def network(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """In float64, with biases, that does not require gradients."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, dtype=DOUBLE), activation()]
    model = nn.Sequential(*layers[:-1]).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) / math.sqrt(sizes[1]))
    return model


def dense(model: Callable[..., Any], x: Tensor, component: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Value (n), gradient (n, d) and Hessian (n, d, d), point by point."""

    def one(point: Tensor) -> Tensor:
        return model(point[None])[0, component]

    return vmap(one)(x), vmap(jacrev(one))(x), vmap(hessian(one))(x)


def assert_derivatives(
    u: Field, value: Tensor, gradient: Tensor, second: Tensor, *, only_laplacian: bool, tolerance: float = 1e-12
) -> None:
    """All that a field tells against (n), (n, d) and (n, d)."""

    def close(found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    close(u.value, value)  # without derivatives
    for axis in range(gradient.shape[1]):
        close(u.d(axis), gradient[:, axis])
        if not only_laplacian:
            close(u.dd(axis), second[:, axis])
    close(u.laplacian, second.sum(dim=1))
    close(u.value, value)  # from the expansion


def assert_is_dense(model: Callable[..., Any], x: Tensor, component: int = 0, tolerance: float = 1e-12) -> None:
    """The field of a model, in both forms, against dense autograd."""
    value, gradient, hessians = dense(model, x, component)
    for only in (False, True):
        u = Field(model, x, laplacian=only)
        second = hessians.diagonal(dim1=1, dim2=2)
        assert_derivatives(u[component], value, gradient, second, only_laplacian=only, tolerance=tolerance)


def newton(rule: Any, rounds: int) -> Stage:
    """Gauss-Newton clients that tell all of their curvature, and steps that the clients' loss decides on."""
    return Stage(rule, GaussNewton(), rounds, SketchPlan(rank=None), control=StepControl(initial=1e-3, boldness=0.1))
