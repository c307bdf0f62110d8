"""The rules of the Taylor expansion against dense autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fipa.errors import FipaError
from fipa.pde import Field
from fipa.pde.jet import Jet, _apply, _general
from pde.cases import DOUBLE, assert_is_dense, network, points

W = points(3, 2, seed=5, low=-1, high=1)
B = points(1, 3, seed=6)[0]


def channels_of(jet: Jet) -> Tensor:
    return torch.cat([jet.value[None], jet.slopes, jet.curvatures])


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_number_of_channels(d: int) -> None:
    """2 d + 1, or d + 2 where only the Laplacian is asked for: never d^2."""
    x, model = points(7, d), network([d, 4, 3])
    full, short = model(Jet.of(x)), model(Jet.of(x, laplacian=True))
    assert channels_of(full).shape == (2 * d + 1, 7, 3)
    assert channels_of(short).shape == (d + 2, 7, 3)
    assert full.shape == short.shape == (7, 3)
    assert full.slopes.shape == short.slopes.shape == (d, 7, 3)
    assert (full.curvatures.shape, short.curvatures.shape) == ((d, 7, 3), (1, 7, 3))


def test_the_points_themselves() -> None:
    jet = Jet.of(torch.tensor([[2.0, 3.0], [5.0, 7.0]]))
    assert jet.value.tolist() == [[2.0, 3.0], [5.0, 7.0]]
    assert jet.slopes.tolist() == [[[1.0, 0.0]] * 2, [[0.0, 1.0]] * 2]
    assert not jet.curvatures.any()


def test_channels_stay_as_many_through_general_functions() -> None:
    x = points(7, 3)
    for laplacian, channels in ((False, 7), (True, 5)):
        jet = torch.cat([torch.sin(Jet.of(x, laplacian=laplacian)), Jet.of(x, laplacian=laplacian) ** 2], dim=1)
        assert channels_of(jet).shape == (channels, 7, 6)


def test_tanh_and_linear_by_hand() -> None:
    """tanh(3 x + 1): slope 3 s, curvature -18 t s, with s = 1 - t^2."""
    x = torch.tensor([[0.2], [-0.4]], dtype=DOUBLE)
    jet = torch.tanh(linear(Jet.of(x), torch.tensor([[3.0]], dtype=DOUBLE), torch.tensor([1.0], dtype=DOUBLE)))
    for i, place in enumerate((0.2, -0.4)):
        t = math.tanh(3 * place + 1)
        found = channels_of(jet)[:, i, 0].tolist()
        assert found == pytest.approx([t, 3 * (1 - t * t), -18 * t * (1 - t * t)], rel=1e-14)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": lambda x: torch.sin(3 * x),
    "method": lambda x: x.cos().mul(other=x),
    "exp": lambda x: torch.exp(-x * x),
    "sigmoid": lambda x: torch.sigmoid(x * 4 - 1),
    "log": lambda x: torch.log(x + 2),
    "add and subtract": lambda x: (1 - x) + (x - 2) * (3 + x) - x,
    "division": lambda x: x / (2 + x) + 1 / (1 + x),
    "division by a column": lambda x: x[:, :1] / (2 + x[:, 1:]),
    "power": lambda x: (x + 1) ** 3 + (x + 1) ** -1.5,
    "two to the power": lambda x: 2**x,
    "power of jets": lambda x: (x + 1) ** x,
    "negative": lambda x: -(x**2),
    "getitem": lambda x: x[:, 1:] ** 2 * x[..., 0, None],
    "getitem by list": lambda x: x[:, [1, 0]] ** 2 * torch.tensor([1.0, 2.0], dtype=DOUBLE),
    "column as a vector": lambda x: (x[:, 0] * x[:, 1] ** 2)[:, None],
    "cat": lambda x: torch.cat([torch.sin(x), x * x, torch.ones_like(x)], dim=1).prod(dim=1, keepdim=True),
    "stack": lambda x: torch.stack([x[:, 0], x[:, 0] * x[:, 1]], dim=1).exp().sum(dim=1, keepdim=True),
    "prod": lambda x: torch.sin(math.pi * x).prod(dim=1, keepdim=True),
    "mean": lambda x: (x**3).mean(dim=1, keepdim=True),
    "softmax": lambda x: torch.softmax(3 * x, dim=1),
    "norm": lambda x: (x + 1).norm(dim=1, keepdim=True),
    "matmul": lambda x: torch.cos(x @ W.T),
    "matmul from the left": lambda x: (W @ x.transpose(0, 1)).transpose(0, 1) ** 2,
    "transpose": lambda x: x[:, :1] * x.T[1][:, None],
    "einsum": lambda x: torch.einsum("ni,ji->nj", x, W).sin(),
    "linear": lambda x: linear(x, W) ** 2,
    "linear with a bias": lambda x: linear(x, W, B) ** 2,
    "linear by keyword": lambda x: linear(input=x, weight=W, bias=B) ** 2,
    "addmm": lambda x: torch.addmm(B, x, W.T).sin(),
    "relu cubed": lambda x: torch.relu(x - 0.5) ** 3,
    "tanh of an expression": lambda x: torch.tanh(x[:, :1] * x[:, 1:]) + (x**2).tanh(),
    "constant added": lambda x: x**2 + B[:2],
    "no curvature": lambda x: 3 * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_torch(name: str) -> None:
    assert_is_dense(FUNCTIONS[name], points(6, 2), tolerance=1e-12)


@pytest.mark.parametrize("laplacian", [False, True])
@pytest.mark.parametrize(
    ("function", "others"),
    [
        (Tensor.__getitem__, ((slice(None), 1),)),
        (Tensor.__getitem__, ((..., [1, 0]),)),
        (Tensor.__getitem__, (torch.arange(7) > 2,)),
        (Tensor.__rmul__, (math.pi,)),
        (Tensor.__mul__, (B[:2],)),
        (Tensor.__mul__, (points(28, 2).reshape(4, 7, 2),)),
        (Tensor.__neg__, ()),
    ],
)
def test_parts_and_multiples_have_the_bits_of_any_function(function: Any, others: Any, laplacian: bool) -> None:
    jet = torch.sin(Jet.of(points(7, 2), laplacian=laplacian))
    quick, general = (rule(function, (jet, *others), {}) for rule in (_apply, _general))
    assert torch.equal(quick.value, general.value)
    assert torch.equal(quick.slopes, general.slopes)
    assert torch.equal(quick.curvatures, general.curvatures)


@pytest.mark.parametrize("laplacian", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["columns", "a column and all"])
def test_products_are_those_of_any_function(wide: bool, laplacian: bool) -> None:
    x = Jet.of(points(7, 2), laplacian=laplacian)
    factors = torch.sin(x), (torch.exp(x) if not wide else torch.exp(x)[:, :1])
    for pair in (factors, factors[::-1]):
        quick, general = (rule(Tensor.__mul__, pair, {}) for rule in (_apply, _general))
        torch.testing.assert_close(channels_of(quick), channels_of(general), rtol=1e-14, atol=1e-14)


def test_linear_with_weights_that_vary_with_x() -> None:
    """Its own rule is for fixed weights: with ones for x, and weights x y B, the result (1, n) is x y sum(B)."""
    x, c = points(6, 2), B.sum()
    value = c * x.prod(dim=1)
    expected = torch.stack([value, c * x[:, 1], c * x[:, 0], 0 * value, 0 * value])[:, None, :]
    for only in (False, True):
        y = Jet.of(x, laplacian=only)
        jet = linear(torch.ones(1, 3, dtype=DOUBLE), y[:, :1] * y[:, 1:] * B)
        torch.testing.assert_close(channels_of(jet), expected[:4] if only else expected, rtol=1e-13, atol=1e-13)


def test_places_where_derivatives_need_care() -> None:
    """A product with zero factors, and powers of zero."""
    x = points(5, 3)
    x[0, 0] = x[1, :2] = x[2] = 0
    assert_is_dense(lambda x: torch.sin(math.pi * x).prod(dim=1, keepdim=True), x)
    assert_is_dense(lambda x: x**1 + x**2 + x**3, x)
    jet = torch.sin(math.pi * Jet.of(x)).prod(dim=1, keepdim=True)
    expected = math.pi * torch.sin(math.pi * x[:, 1]) * torch.sin(math.pi * x[:, 2])
    torch.testing.assert_close(jet.slopes[0, 0, 0], expected[0])


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 3 * W.T)
        self.out = network([6, 4, 2])

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.frequencies
        return self.out(torch.cat([z.sin(), z.cos()], dim=1))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.inner, self.out = network([2, 5]), network([5, 5]), network([5, 2])

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.lift(x))
        return self.out(z + torch.tanh(self.inner(z)))


class HardBoundary(nn.Module):
    """Zero at the ends by its form."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network([2, 5, 2])

    def forward(self, x: Tensor) -> Tensor:
        return (x * (1 - x)).prod(dim=1, keepdim=True) * self.body(x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: network([2, 5, 2], nn.GELU),
    "silu": lambda: network([2, 5, 2], nn.SiLU),
    "softplus": lambda: network([2, 5, 2], nn.Softplus),
    "elu": lambda: network([2, 5, 2], nn.ELU),
    "elu in place": lambda: network([2, 5, 2], lambda: nn.ELU(inplace=True)),
    "sigmoid": lambda: network([2, 5, 2], nn.Sigmoid),
    "no activation": lambda: network([2, 5, 2], nn.Identity),
    "layer norm": lambda: nn.Sequential(network([2, 5]), nn.LayerNorm(5, dtype=DOUBLE), nn.Tanh(), network([5, 2])),
    "group norm": lambda: nn.Sequential(network([2, 6]), nn.GroupNorm(2, 6, dtype=DOUBLE), nn.Tanh(), network([6, 2])),
    "without bias": lambda: nn.Sequential(nn.Linear(2, 4, bias=False, dtype=DOUBLE), nn.Tanh(), network([4, 2])),
    "dropout in evaluation": lambda: nn.Sequential(network([2, 4]), nn.Dropout(0.5), nn.Tanh(), network([4, 2])).eval(),
    "flatten": lambda: nn.Sequential(network([2, 4]), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Tanh()),
    "fourier features": Fourier,
    "residual connection": Skip,
    "hard boundary": HardBoundary,
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("component", [0, 1])
def test_modules(name: str, component: int) -> None:
    torch.manual_seed(0)
    model = MODULES[name]().requires_grad_(False)
    assert_is_dense(model, points(6, 2, low=-1), component, tolerance=1e-11)


def test_functions_that_overwrite_their_argument() -> None:
    """Refused, or right; but never an expansion of sin(sin(x))."""
    x = points(4, 2)
    try:
        jet = (1 * Jet.of(x)).sin_()
    except (TypeError, FipaError):
        return
    torch.testing.assert_close(jet.value, torch.sin(x))


def test_attributes_of_the_tensor_that_a_jet_stands_for() -> None:
    jet = Jet.of(points(4, 2))
    assert (jet.dtype, jet.device.type, jet.ndim) == (DOUBLE, "cpu", 2)
    assert jet.shape == (4, 2)
    with pytest.raises(AttributeError):
        _ = jet.no_such_thing


def test_parts_comparisons_and_views() -> None:
    """How models take their input apart."""

    def split(x):
        a, b = x.split(1, dim=1)
        return a.sin() * b**2

    assert_is_dense(split, points(5, 2))
    assert_is_dense(lambda x: (x.unbind(1)[0] * x.unbind(1)[1])[:, None], points(5, 2))
    assert_is_dense(lambda x: torch.where(x[:, :1] > 0.5, x[:, :1] ** 3, x[:, 1:].exp()), points(5, 2))
    assert_is_dense(lambda x: abs(x[:, :1] - 2.0) ** 3, points(5, 2))
    assert_is_dense(lambda x: x[:, :1].expand(-1, 3).square().sum(dim=1, keepdim=True), points(5, 2))
    with pytest.raises(FipaError, match="returns a float: no derivatives"):
        _general(lambda x: 1.0, (Jet.of(points(4, 2)),), {})


def test_a_long_chain_of_mixed_rules() -> None:
    """Both rules of their own and the general one carry curvature that is there already."""
    first, second = network([2, 4, 4], seed=1), network([4, 4, 1], seed=2)
    assert_is_dense(lambda x: torch.sin(second(torch.exp(-first(x * x)))) / (1 + x[:, :1] ** 2), points(5, 2))


def test_float32() -> None:
    x = points(6, 2).float()
    u = Field(network([2, 5, 1]).float(), x)
    assert u.laplacian.dtype == u.d(0).dtype == torch.float32
    assert_is_dense(network([2, 5, 1]).float(), x, tolerance=1e-5)
