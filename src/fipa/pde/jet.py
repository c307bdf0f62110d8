r"""Derivatives by Taylor expansion: one forward pass carries a function's value and its derivatives along each axis.

For a point $x$ and the axes $e_1, \dots, e_d$ a jet holds $u$, the slopes $\partial_i u$ and the curvatures
$\partial_i^2 u$: $2d + 1$ numbers instead of a d x d Hessian. Layer by layer, with $z = h(y)$ applied to each entry,

$$\partial_i z = h'(y)\, \partial_i y, \qquad \partial_i^2 z = h'(y)\, \partial_i^2 y + h''(y)\, (\partial_i y)^2 .$$

Both are linear in $\partial_i^2$, so that for a Laplacian the sum of the curvatures is enough: $d + 2$ numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.functional import instance_norm, layer_norm, linear
from torch.utils import _pytree as pytree

from fipa.errors import FipaError

Function = Callable[..., Any]


class Jet:
    """Takes the place of a tensor (n, k) in a model's forward pass.

    Linear layers, tanh, parts and products have rules of their own. Whatever else a model calls (any function of torch
    that maps tensors to a tensor) goes through nested forward-mode derivatives: general, and some three times slower.

    Parameters
    ----------
    value
        (n, k).
    slopes
        (d, n, k).
    curvatures
        (d, n, k), or (1, n, k) if only their sum is carried.
    """

    def __init__(self, value: Tensor, slopes: Tensor, curvatures: Tensor) -> None:
        self.value, self.slopes, self.curvatures = value, slopes, curvatures

    @classmethod
    def of(cls, x: Tensor, *, laplacian: bool = False) -> Jet:
        """The points (n, d) themselves: slope one along each axis, no curvature."""
        n, d = x.shape
        slopes = torch.eye(d, dtype=x.dtype, device=x.device)[:, None, :].expand(d, n, d)
        return cls(x, slopes, x.new_zeros(1 if laplacian else d, n, d))

    def through(self, function: Callable[[Tensor, int], Tensor]) -> Jet:
        """What a function makes of value, slopes and curvatures, one tensor (c, n, k), and of the number of axes."""
        d = len(self.slopes)
        parts = function(torch.cat([self.value[None], self.slopes, self.curvatures]), d)
        return Jet(parts[0], parts[1 : 1 + d], parts[1 + d :])

    @property
    def summed(self) -> bool:
        """Whether it carries the Laplacian only."""
        return len(self.curvatures) < len(self.slopes)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that it stands for."""
        return self.value.shape

    def __len__(self) -> int:
        return len(self.value)

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors, `x.sin()`, and attributes that do not vary with x, `x.dtype`."""
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(Tensor, name)
        if name in ("size", "dim"):
            return getattr(self.value, name)
        if callable(found):
            return lambda *args, **kwargs: _apply(found, (self, *args), kwargs)
        if isinstance(getattr(self.value, name), Tensor):  # a view such as x.T
            return _apply(lambda x: getattr(x, name), (self,), {})
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _apply(function, args, kwargs or {})


def _operator(name: str) -> Function:
    return lambda self, *args: _apply(getattr(Tensor, name), (self, *args), {})


_OPERATORS = (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "rpow",
    "neg",
    "getitem",
    "abs",
    "gt",
    "ge",
    "lt",
    "le",
)
for _name in _OPERATORS:
    setattr(Jet, f"__{_name}__", _operator(f"__{_name}__"))


def _apply(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = _RULES.get(function, _general)
    plain = not kwargs and isinstance(args[0], Jet) and not any(isinstance(a, Jet) for a in args[1:])
    if rule in (_linear, _tanh, _each) and not plain:
        rule = _general
    return rule(function, args, kwargs)


def _linear(_: Function, args: tuple[Any, ...], __: dict[str, Any]) -> Jet:
    jet, weight, *bias = args
    if len(jet) > 1:
        return Jet(linear(jet.value, weight, *bias), jet.slopes @ weight.T, jet.curvatures @ weight.T)
    # One point at a time, under vmap: a single product makes a single gradient of the weight per point.
    parts = [jet.value[None], jet.slopes, jet.curvatures]
    value, slopes, curvatures = (torch.cat(parts) @ weight.T).split([len(part) for part in parts])
    return Jet(value[0] + bias[0] if bias and bias[0] is not None else value[0], slopes, curvatures)


def _tanh(_: Function, args: tuple[Any, ...], __: dict[str, Any]) -> Jet:
    (jet,) = args
    t = jet.value.tanh()
    slope = 1 - t * t
    squares = jet.slopes.square()
    if jet.summed:
        squares = squares.sum(dim=0, keepdim=True)
    return Jet(t, slope * jet.slopes, slope * (jet.curvatures - 2 * t * squares))


def _each(function: Function, args: tuple[Any, ...], _: dict[str, Any]) -> Jet:
    """A function that is linear in its first argument, of the value and of every derivative alike."""
    jet, *others = args

    def call(part: Tensor) -> Tensor:
        return function(part, *others)

    return Jet(call(jet.value), vmap(call)(jet.slopes), vmap(call)(jet.curvatures))


def _product(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Jet:
    """Of two jets, or of a jet and what does not vary with x."""
    if not all(isinstance(factor, Jet) for factor in args):
        return _each(function, args, kwargs) if isinstance(args[0], Jet) else _general(function, args, kwargs)
    a, b = args
    mixed = 2 * a.slopes * b.slopes
    if a.summed:
        mixed = mixed.sum(dim=0, keepdim=True)
    return Jet(
        a.value * b.value, a.slopes * b.value + a.value * b.slopes,
        a.curvatures * b.value + mixed + a.value * b.curvatures,
    )  # fmt: skip


def _general(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any function of one jet or several, by Jacobian-vector products along each axis."""
    if kwargs.get("inplace"):
        kwargs = {**kwargs, "inplace": False}
    name = getattr(function, "__name__", "")
    if function is instance_norm:
        raise FipaError("torch has no second forward derivative of instance_norm: use layer_norm or group_norm")
    if name.endswith("_") and not name.endswith("__"):
        raise FipaError(f"{name} works in place: a jet cannot follow it, use {name[:-1]}")
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Jet))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Jet)]
    jets: list[Jet] = [leaves[i] for i in places]

    def call(*values: Tensor) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return function(*args, **kwargs)

    values = tuple(jet.value.contiguous() for jet in jets)
    plain = call(*values)
    if isinstance(plain, tuple | list):  # such as split: each part on its own
        parts = range(len(plain))
        return tuple(_general(lambda *a, i=i, **k: function(*a, **k)[i], args, kwargs) for i in parts)
    if not isinstance(plain, Tensor):
        raise FipaError(f"{function} returns a {type(plain).__name__}: no derivatives can follow it")
    if not plain.is_floating_point():
        return plain  # a comparison: constant but for jumps

    def bend(*slopes: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of the result, and its curvature where the arguments have none."""
        (_, slope), (_, curvature) = jvp(lambda *v: jvp(call, v, slopes), values, slopes)  # type: ignore[misc]
        return slope, curvature

    def push(*curvatures: Tensor) -> Tensor:
        return jvp(call, values, curvatures)[1]

    slopes, bends = vmap(bend)(*(jet.slopes for jet in jets))
    pushed = vmap(push)(*(jet.curvatures for jet in jets))
    if jets[0].summed:
        bends = bends.sum(dim=0, keepdim=True)
    return Jet(plain, slopes, bends + pushed)


def _layer_norm(_: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Jet:
    """Torch's own has no second forward derivative: it takes mean and deviation for constants."""

    def plain(
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        axes = list(range(-len(normalized_shape), 0))
        centred = input - input.mean(axes, keepdim=True)
        z = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
        z = z if weight is None else z * weight
        return z if bias is None else z + bias

    return _general(plain, args, kwargs)


_RULES: dict[Function, Callable[[Function, tuple[Any, ...], dict[str, Any]], Jet]] = {
    linear: _linear,
    torch.tanh: _tanh,
    Tensor.tanh: _tanh,
    Tensor.__getitem__: _each,
    Tensor.__mul__: _product,
    Tensor.__rmul__: _product,
    Tensor.__neg__: _each,
    layer_norm: _layer_norm,
}
