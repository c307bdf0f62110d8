"""Values, derivatives and gradients of tanh networks, by the loops of `fipa.kernels.tanh_loops`.

The loops are two operations of torch, one for each way through the network. So they can be part of a trace, and of
`vmap(grad(loss))`: a stack of networks is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fipa.kernels.small_cnn import COMPILED, watched
from fipa.layout import Layout

ROW = 256  # numbers of a unit in one block: enough for the vector registers, and all units fit in the cache
KEPT = 2**17  # numbers that are kept for the way back, twice: 2 MiB; of more, each block is computed again
LANES = 8  # numbers in the widest register
Shape = tuple[int, int, int]  # points, blocks, and points in a block


class TanhNetwork:
    """A network of linear layers with tanh in between, in double precision, as a function of flat parameters."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)

    @staticmethod
    def of(model: nn.Module, layout: Layout) -> TanhNetwork | None:
        """For models that the loops can run, if numba is there."""
        if not COMPILED or type(model) is not nn.Sequential or any(watched(module) for module in model.modules()):
            return None
        linear, tanh = list(model)[::2], list(model)[1::2]
        if len(linear) != len(tanh) + 1 or any(type(module) is not nn.Tanh for module in tanh):
            return None
        widths: list[int] = []
        for module in linear:
            if type(module) is not nn.Linear or not _plain(module) or widths[-1:] not in ([], [module.in_features]):
                return None
            widths += [module.out_features] if widths else [module.in_features, module.out_features]
        names = tuple(name for name, _ in model.named_parameters())  # a layer that is there twice has its names once
        shapes = tuple(shape for inputs, units in pairwise(widths) for shape in ((units, inputs), (units,)))
        return TanhNetwork(widths) if names == layout.names and shapes == tuple(map(tuple, layout.shapes)) else None

    def at(self, flat: Tensor, model: Callable[..., Any]) -> Callable[..., Any]:
        """The network at flat parameters (p), for points (n x d) or their jets; `model` is asked about all else."""

        def jets(x: Tensor, axes: int) -> Tensor:
            return self.jets(flat, x, axes)

        def call(*args: Any) -> Any:
            if len(args) != 1 or not self._takes(x := args[0]):
                return model(*args)
            return jets(x[None], 0)[0] if isinstance(x, Tensor) else x.through(jets)

        return call

    def _takes(self, x: Any) -> bool:
        """Whether these are points, or a jet of them."""
        values = x if isinstance(x, Tensor) else getattr(x, "value", None)
        if not isinstance(values, Tensor) or values.dtype != torch.float64:
            return False
        return values.dim() == 2 and values.shape[1] == self.widths[0] and (values is x or hasattr(x, "through"))

    def jets(self, flat: Tensor, x: Tensor, axes: int) -> Tensor:
        """Of inputs x (c x n x d) with their values, slopes along `axes` and curvatures: the outputs' (c x n x o)."""
        return cast(Callable[..., tuple[Tensor, ...]], _Jets.apply)(flat[None], x[None], self.widths, axes)[0][0]


def _plain(linear: nn.Linear) -> bool:
    weight = linear.weight
    return linear.bias is not None and weight.dtype == torch.float64 and weight.device.type == "cpu"


class _Jets(torch.autograd.Function):
    """The way through a stack of networks, and the way back to their parameters (m x p), but not to x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Tensor, x: Tensor, widths: list[int], axes: int) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], torch.ops.fipa.tanh_forward(flat, x, widths, axes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        flat, x, *ctx.settings = inputs
        ctx.save_for_backward(flat, x, *output[1:])

    @staticmethod
    def backward(ctx: Any, slopes: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            raise RuntimeError("the loops have no gradient in what goes into the network")
        return torch.ops.fipa.tanh_backward(*ctx.saved_tensors, slopes, *ctx.settings), None, None, None


def _forward(flat: Tensor, x: Tensor, widths: list[int], axes: int) -> tuple[Tensor, Tensor, Tensor]:
    from fipa.kernels import tanh_loops

    m, components, n, _ = x.shape
    shape, units = _shape(components, n), sum(widths[1:])
    _, blocks, b = shape
    kept = blocks if m * blocks * units * components * b <= KEPT else 1
    sums, results = (torch.empty(m, kept, units, components * b, dtype=x.dtype) for _ in range(2))
    out = torch.empty(m, blocks, widths[-1], components * b, dtype=x.dtype)
    cast(Any, tanh_loops).forward(
        flat.contiguous().numpy(), np.array(widths), _in_blocks(x, shape), sums.numpy(), results.numpy(), out.numpy(),
        b, axes, components - 1 - axes,
    )  # fmt: skip
    found = out.reshape(m, blocks, widths[-1], components, b).permute(0, 3, 1, 4, 2)
    return found.reshape(m, components, blocks * b, widths[-1])[:, :, :n].contiguous(), sums, results


def _backward(
    flat: Tensor, x: Tensor, sums: Tensor, results: Tensor, slopes: Tensor, widths: list[int], axes: int
) -> Tensor:
    from fipa.kernels import tanh_loops

    components = x.shape[1]
    shape, into = _shape(components, x.shape[2]), torch.zeros(flat.shape, dtype=x.dtype)
    cast(Any, tanh_loops).backward(
        flat.contiguous().numpy(), np.array(widths), _in_blocks(x, shape), sums.numpy(), results.numpy(),
        _in_blocks(slopes, shape), shape[2], axes, components - 1 - axes, into.numpy(),
    )  # fmt: skip
    return into


def _shape(components: int, n: int) -> Shape:
    """Blocks of about one size, in whole registers."""
    b = LANES * -(-n // (LANES * max(1, -(-components * n // ROW))))
    return n, -(-n // max(b, 1)), b


def _in_blocks(x: Tensor, shape: Shape) -> Any:
    """(m x c x n x d) as (m x blocks x d x c b), an array; the last block is filled with zeros."""
    (m, components, n, d), (_, blocks, b) = x.shape, shape
    padded = x if blocks * b == n else torch.nn.functional.pad(x, (0, 0, 0, blocks * b - n))
    found = padded.reshape(m, components, blocks, b, d).permute(0, 2, 4, 1, 3)
    return found.reshape(m, blocks, d, components * b).contiguous().numpy()


def _stacked(operation: Callable[..., Any]) -> Callable[..., Any]:
    """How torch's vmap calls an operation on stacks: with one more axis, as one longer stack."""

    def call(info: Any, dims: tuple[int | None, ...], *args: Any) -> Any:
        size = info.batch_size
        flat = [
            _joined(arg, dim, size) if isinstance(arg, Tensor) else arg for arg, dim in zip(args, dims, strict=True)
        ]
        found = operation(*flat)
        parts = [t.unflatten(0, (size, len(t) // size)) for t in ([found] if isinstance(found, Tensor) else found)]
        return (parts[0], 0) if isinstance(found, Tensor) else (tuple(parts), (0,) * len(parts))

    return call


def _joined(x: Tensor, dim: int | None, size: int) -> Tensor:
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


FORWARD = "(Tensor flat, Tensor x, int[] widths, int axes) -> (Tensor, Tensor, Tensor)"
BACKWARD = "(Tensor flat, Tensor x, Tensor sums, Tensor results, Tensor slopes, int[] widths, int axes) -> Tensor"
for _name, _schema, _function in (("tanh_forward", FORWARD, _forward), ("tanh_backward", BACKWARD, _backward)):
    if not hasattr(torch.ops.fipa, _name):  # operations outlive a module that is imported anew
        torch.library.define(f"fipa::{_name}", _schema)
        cast(Any, torch.library.impl)(f"fipa::{_name}", "cpu", _function)
        torch.library.register_vmap(f"fipa::{_name}", _stacked(getattr(torch.ops.fipa, _name)))
