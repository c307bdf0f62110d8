"""Route 3, linear head: closed form, backbone once."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import fipa
from curvature.cases import (
    HEAD_CASES,
    HEADS,
    assert_is,
    build,
    case,
    dense,
    gauss_newton,
    loss_hessian,
    make,
    model_and_inputs,
    operator_of,
    randn,
)
from fipa import Residual, SketchError
from fipa.curvature.explicit import ExplicitRows
from fipa.curvature.linear_head import LinearHead, find_head


def auto(model, data, loss="mse", params=None, **options):
    return operator_of(model, data, loss, params=params, route="auto", **options)


@pytest.mark.parametrize("memory_limit", [2**30, 1])
@pytest.mark.parametrize("name", HEAD_CASES)
def test_equals_the_dense_oracle(name, memory_limit):
    one = case(name)
    assert_is(build(one, "linear_head", memory_limit=memory_limit), one)


@pytest.mark.parametrize("name", HEAD_CASES)
def test_trace_is_exact(name):
    one = case(name)
    trace = build(one, "linear_head").trace(torch.Generator())
    assert trace == pytest.approx(float(one.hessian.trace()), rel=1e-12)


@pytest.mark.parametrize("name", HEAD_CASES)
def test_auto_picks_it(name):
    one = case(name)
    assert isinstance(auto(one.model, one.data, one.loss, one.params), LinearHead)


def test_a_linear_model_is_its_own_head():
    model, x = make(lambda: nn.Linear(4, 3)), randn(6, 4)
    operator = auto(model, x)
    assert isinstance(operator, LinearHead)
    torch.testing.assert_close(dense(operator), dense(operator_of(model, x, "mse", route="rows")))


def test_more_examples_than_one_forward_pass_takes():
    model, x = make(lambda: nn.Linear(3, 2)), randn(300, 3)
    expected = dense(operator_of(model, x, "cross_entropy", route="rows"))
    torch.testing.assert_close(dense(operator_of(model, x, "cross_entropy", route="linear_head")), expected)


@pytest.mark.parametrize("route", ["auto", "linear_head"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_backbone_runs_exactly_once_per_example(route, loss):
    model, x = model_and_inputs("mlp", examples=300)  # more than one forward batch
    x[:, 0] = torch.arange(300)  # so that an example is known by its first input
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.extend(args[0][:, 0].tolist()))
    fipa.sketch(model, x, loss, rank=2, params=HEADS["mlp"], route=route, solver="subspace")
    assert sorted(seen) == list(range(300))


class Doubled(nn.Module):
    """Its last step is not its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return 2 * self.head(x)


class Repeated(nn.Module):
    """Uses its linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.head(x)))


class SumOfOutputs(nn.Module):
    """Its output has another size than its linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x).sum(dim=1)


class TiedToModule(nn.Module):
    """Another module holds the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.first.weight = self.head.weight  # counts under its first name, head.weight

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


class TiedInForward(nn.Module):
    """The features depend on the head's weight, which only the forward pass shows (a tied embedding, say)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.tanh(functional.linear(x, self.head.weight)))


class Tempered(Doubled):
    """Scales the outputs of a head that was initialised with zeros: the values before and after are equal."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class Cut(nn.Module):
    """ReLU after the head: the identity on the first example below, not on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.bias)
        nn.init.constant_(self.head.weight, 1.0)

    def forward(self, x):
        return torch.relu(self.head(x))


class CosineLinear(nn.Linear):
    """Derives from a linear layer and computes something else."""

    def forward(self, x):
        return functional.linear(functional.normalize(x), functional.normalize(self.weight), self.bias)


class ThenClamped(Doubled):
    """Cuts the outputs in place: memory and identity are the head's."""

    def forward(self, x):
        return self.head(x).clamp_(max=0.2)


def parametrized(function):
    return lambda: nn.Sequential(function(nn.Linear(4, 3)))


def hooked(register, hook):
    def build_model():
        model = nn.Sequential(nn.Linear(4, 3))
        getattr(model[0], register)(hook)
        return model

    return build_model


class Clamp(nn.Module):
    def forward(self, z):
        return z.clamp(max=0.2)


def patched_forward():
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].forward = lambda x: 2 * nn.functional.linear(x, model[0].weight, model[0].bias)
    return model


NOT_HEADS = {
    "not last": (Doubled, None),
    "forward replaced": (patched_forward, None),
    "used twice": (Repeated, None),
    "other width": (SumOfOutputs, None),
    "weight in two modules": (TiedToModule, "head.*"),
    "tied in forward": (TiedInForward, None),
    "zero head, then scaled": (Tempered, None),
    "identity on the first example": (Cut, None),
    "cosine": (lambda: nn.Sequential(CosineLinear(4, 3)), None),
    "weight norm": (parametrized(parametrizations.weight_norm), None),
    "spectral norm": (parametrized(parametrizations.spectral_norm), None),
    "orthogonal": (parametrized(parametrizations.orthogonal), None),
    "hardtanh": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-0.2, 0.2)), None),
    "hardtanh in place": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-0.2, 0.2, inplace=True)), None),
    "clamp": (lambda: nn.Sequential(nn.Linear(4, 3), Clamp()), None),
    "clamp in place": (ThenClamped, None),
    "forward hook": (hooked("register_forward_hook", lambda module, args, out: 2 * out), None),
    "hook in place": (hooked("register_forward_hook", lambda module, args, out: out.mul_(2)), None),
    "pre-hook": (hooked("register_forward_pre_hook", lambda module, args: (args[0] ** 2,)), None),
}


def not_a_head(name):
    build_model, params = NOT_HEADS[name]
    x = randn(6, 4)
    x[0] = x[0].abs()
    x[1] = -x[1].abs()
    return make(build_model), x, params


@pytest.mark.parametrize("name", NOT_HEADS)
def test_auto_takes_rows_where_there_is_no_head(name):
    model, x, params = not_a_head(name)
    operator = auto(model, x, params=params)
    assert isinstance(operator, ExplicitRows)
    torch.testing.assert_close(dense(operator), dense(operator_of(model, x, "mse", params=params, route="rows")))


@pytest.mark.parametrize(
    ("name", "loss"),
    [(name, "mse") for name in NOT_HEADS]
    + [(name, "cross_entropy") for name in NOT_HEADS if name != "other width"],  # that one has a single output
)
def test_auto_equals_the_dense_oracle_where_there_is_no_head(name, loss):
    model, x, params = not_a_head(name)

    def blocks():
        z = model(x).reshape(len(x), -1)
        return [(z, loss_hessian(z, loss, len(x)))]

    expected = gauss_newton(model, blocks, params)
    torch.testing.assert_close(dense(auto(model, x, loss, params)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NOT_HEADS)
def test_named_route_says_why_it_does_not_apply(name):
    model, x, params = not_a_head(name)
    with pytest.raises(SketchError, match=r"linear.*(rows|last|shares|depend)"):
        operator_of(model, x, "mse", params=params, route="linear_head")


@pytest.mark.parametrize("params", ["0.*", "4.weight", None])
def test_other_selections_are_no_head(params):
    model, x = model_and_inputs("mlp")
    assert isinstance(auto(model, x, params=params), ExplicitRows)
    with pytest.raises(SketchError, match="linear"):
        operator_of(model, x, "mse", params=params, route="linear_head")


def test_a_residual_that_starts_at_zero_is_no_head():
    # u(x) - y equals u(x) on the first example alone
    model, x, y = make(lambda: nn.Linear(4, 1)), randn(6, 4), torch.arange(6.0)[:, None].double()
    data = Residual(lambda u, x, y: u(x) - y, x, y)
    expected = dense(operator_of(model, data, "least_squares", route="rows"))
    torch.testing.assert_close(dense(auto(model, data, "least_squares")), expected)


@pytest.mark.parametrize("derivative", ["forward", "reverse"])
def test_residuals_that_differentiate_the_head_fall_back_to_rows(derivative):
    model, x = make(lambda: nn.Linear(4, 1)), randn(6, 4)

    def residual(u, x):
        if derivative == "forward":
            return torch.func.jvp(u, (x,), (torch.ones_like(x),))[1][:, 0]
        return torch.func.vmap(torch.func.grad(lambda s: u(s[None])[0, 0]))(x).sum(1)

    assert isinstance(auto(model, Residual(residual, x), "least_squares"), ExplicitRows)


def test_find_head():
    model = make(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, bias=False)))
    assert find_head(model, ["1.weight"]) is model[1]
    assert find_head(model, ["0.weight", "0.bias"]) is model[0]
    assert find_head(model, ["0.weight"]) is None
    assert find_head(model, ["0.weight", "0.bias", "1.weight"]) is None


def test_hooks_are_removed_when_the_model_fails():
    model, x = model_and_inputs("mlp")
    with pytest.raises(RuntimeError):
        operator_of(model, x[:, :2], "mse", params=HEADS["mlp"], route="linear_head")
    assert not any(module._forward_hooks for module in model.modules())


def test_a_global_hook_that_changes_outputs_is_noticed():
    model, x = make(lambda: nn.Sequential(nn.Linear(4, 3))), randn(6, 4)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: 2 * out if isinstance(module, nn.Linear) else None
    )
    try:
        assert isinstance(auto(model, x), ExplicitRows)
    finally:
        handle.remove()
