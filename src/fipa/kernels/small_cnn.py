"""Loss and gradient of small CNNs, by the loops of `fipa.kernels.loops`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fipa.layout import Layout

COMPILED = find_spec("numba") is not None  # it is optional, and imported only where a network needs it
BLOCK = 100  # images that are taken at once: few enough for the cache
LANES = 16  # with as many channels, torch's convolutions fill the processor's registers as well


@dataclass(frozen=True)
class Convolution:
    """A 3x3 convolution without bias, the maximum of 2x2 squares if `pooled`, and ReLU."""

    weight: str
    pooled: bool


@dataclass(frozen=True)
class Layers:
    """What such a network is made of: convolutions, then linear layers without bias with ReLU in between."""

    convolutions: tuple[Convolution, ...]
    linear: tuple[str, ...]


def layers_of(model: nn.Module, layout: Layout) -> Layers | None:
    """The layers of a network that the kernels can run, or None for any other."""
    if type(model) is not nn.Sequential or any(_watched(module) for module in model.modules()):
        return None  # a forward of its own, or hooks
    convolutions: list[Convolution] = []
    linear: list[str] = []
    flat, modules = False, list(model._modules.items())
    while modules:
        name, module = modules.pop(0)
        if type(module) is nn.Conv2d and not flat and _plain(module):
            pooled = bool(modules) and type(modules[0][1]) is nn.MaxPool2d
            if pooled and not _halves(modules.pop(0)[1]):
                return None
            if not modules or type(modules.pop(0)[1]) is not nn.ReLU:
                return None
            convolutions.append(Convolution(f"{name}.weight", pooled))
        elif type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1) and convolutions and not flat:
            flat = True
        elif type(module) is nn.Linear and flat and module.bias is None:
            linear.append(f"{name}.weight")
            if modules and (type(modules.pop(0)[1]) is not nn.ReLU or not modules):
                return None
        else:
            return None
    names = (*(c.weight for c in convolutions), *linear)
    if len({id(module) for module in model if isinstance(module, nn.Conv2d | nn.Linear)}) < len(names):
        return None  # a layer that is used twice
    return Layers(tuple(convolutions), tuple(linear)) if linear and names == layout.names else None


def _finite(tensor: Tensor) -> bool:
    """The sum tells it quickly; only where it overflows is every element looked at."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _plain(conv: nn.Conv2d) -> bool:
    return (
        (conv.kernel_size, conv.stride, conv.dilation, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and conv.padding in ((1, 1), "same")
        and conv.padding_mode == "zeros"
        and conv.bias is None
        and conv.weight.dtype == torch.float32
        and conv.weight.device.type == "cpu"
        and conv.out_channels < LANES
    )


def _halves(pool: nn.Module) -> bool:
    settings = [getattr(pool, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
    return settings in ([2, 2, 0, 1, False], [(2, 2), (2, 2), (0, 0), (1, 1), False])


@dataclass(frozen=True, eq=False)
class View:
    """Some of the images x (all x channels x height x width), each with its own rows and columns."""

    x: Tensor
    index: Tensor  # (n)
    rows: Tensor  # (n x height)
    columns: Tensor  # (n x width)

    @classmethod
    def of(cls, x: Tensor, index: Tensor | None = None, places: tuple[Tensor, Tensor] | None = None) -> View:
        """The images at `index`, all by default, as they are or with pixels from `places` (see `Augment.places`)."""
        index = torch.arange(len(x)) if index is None else index
        x = x.contiguous(memory_format=torch.channels_last)
        n, height, width = len(index), *x.shape[2:]
        if places is None:
            return cls(x, index, torch.arange(height).expand(n, -1), torch.arange(width).expand(n, -1))
        rows, columns = places
        return cls(x, index, rows.reshape(n, height), columns.reshape(n, width))

    def split(self, size: int) -> list[View]:
        """The same images, at most `size` at a time."""
        pieces = zip(self.index.split(size), self.rows.split(size), self.columns.split(size), strict=True)
        return [View(self.x, *piece) for piece in pieces]


class SmallCNN:
    """Loss and gradient of one network for batches of images."""

    def __init__(self, layers: Layers, layout: Layout) -> None:
        self._layers = layers
        self._layout = layout
        self._workspaces: dict[tuple[int, ...], _Workspace] = {}

    @staticmethod
    def of(model: nn.Module, layout: Layout) -> SmallCNN | None:
        """For networks that the kernels can run, if numba is there."""
        layers = layers_of(model, layout) if COMPILED else None
        return SmallCNN(layers, layout) if layers is not None else None

    def logits(self, flat: Tensor, x: Tensor) -> Tensor:
        """Logits (n x classes) of images x (n x channels x height x width)."""
        view = View.of(x)
        return self._workspace(view).forward(self._layout.unflatten(flat), view)[-1].T.clone()

    def loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy; NaN wherever torch's would be, though the loops do not pass NaN on."""
        if not _finite(flat) or not _finite(x):
            return flat.new_tensor(math.nan)
        return cross_entropy(torch.cat([self.logits(flat, block) for block in x.split(BLOCK)]), y)

    def gradient(self, flat: Tensor, view: View, y: Tensor) -> Tensor:
        """Gradient of the mean cross entropy, flat."""
        weights, total, n = self._layout.unflatten(flat), torch.empty_like(flat), len(y)
        blocks = [(view, y)]
        if n >= 2 * BLOCK:
            size = math.ceil(n / (n // BLOCK))  # all of about one size: a short block takes longer per image
            blocks = list(zip(view.split(size), y.split(size), strict=True))
        for i, (some, labels) in enumerate(blocks):
            work = self._workspace(some)
            outputs = work.forward(weights, some)
            slope = outputs[-1].softmax(dim=0)
            slope[labels, torch.arange(len(labels))] -= 1
            gradient = torch.empty_like(flat) if i else total
            work.gradient(weights, outputs, slope.div_(n), self._layout.unflatten(gradient))
            if i:
                total += gradient
        return total

    def rows(self, flat: Tensor, x: Tensor, extra: Any, factor: Callable[[Tensor, Any], Tensor], out: Tensor) -> None:
        """Gradients of each image on its own, into out (n k x p): the k of an image one after the other.

        `factor(logits, extra)` gives their slopes at the logits (n x classes x k). As in `loss`, NaN is not lost.
        """
        if not _finite(flat) or not _finite(x):
            out.fill_(math.nan)
            return
        weights, view = self._layout.unflatten(flat), View.of(x)
        work = self._workspace(view)
        outputs = work.forward(weights, view)
        slopes = factor(outputs[-1].T.contiguous(), extra).permute(2, 1, 0).contiguous()
        for slope, rows in zip(slopes, out.unflatten(0, (len(x), -1)).unbind(1), strict=True):
            work.rows(weights, outputs, slope, self._layout.unflatten(rows))

    def _workspace(self, view: View) -> _Workspace:
        shape = (len(view.index), *view.x.shape[1:])
        if shape not in self._workspaces:
            if len(self._workspaces) >= 4:
                self._workspaces.pop(next(iter(self._workspaces)))
            self._workspaces[shape] = _Workspace(self._layers, self._layout, shape)
        return self._workspaces[shape]


class _Workspace:
    """Memory for a batch of one shape, and the passes through it."""

    def __init__(self, layers: Layers, layout: Layout, shape: tuple[int, ...]) -> None:
        from fipa.kernels import loops

        self._layers, self._loops = layers, cast(Any, loops)
        n, channels, height, width = shape
        self._n = n
        widths = dict(zip(layout.names, layout.shapes, strict=True))

        def empty(*size: int) -> Any:
            return torch.zeros(size).numpy()  # aligned, as numpy's own need not be: products round by addresses

        self._inputs = [empty(channels, height + 2, (width + 2) * n)]
        self._sums, self._places, self._slopes, self._input_slopes = [], [], [], []
        for i, layer in enumerate(layers.convolutions):
            self._input_slopes.append(empty(channels, height, width * n) if i else None)
            channels = widths[layer.weight][0]
            self._sums.append(empty(channels, height, width * n))
            self._slopes.append(empty(channels, height + 2, (width + 2) * n))
            if layer.pooled:
                height, width = height // 2, width // 2
            self._places.append(np.zeros((channels, height, width * n), np.int32) if layer.pooled else None)
            border = i + 1 < len(layers.convolutions)
            self._inputs.append(empty(channels, height + 2 * border, (width + 2 * border) * n))
        self._shape = (channels, height, width * n)

    def forward(self, weights: Mapping[str, Tensor], view: View) -> list[Tensor]:
        """The outputs of the linear layers (features x n), after the flat input to the first of them."""
        n = self._n
        places = (t.numpy() for t in (view.index, view.rows, view.columns))
        self._loops.images_last(view.x.permute(0, 2, 3, 1).numpy(), *places, self._inputs[0])
        last = len(self._layers.convolutions) - 1
        for i, layer in enumerate(self._layers.convolutions):
            self._loops.convolve(self._inputs[i], weights[layer.weight].numpy(), self._sums[i], n)
            if layer.pooled:
                self._loops.pool(self._sums[i], self._inputs[i + 1], self._places[i], n, int(i < last))
            else:
                self._loops.rectify(self._sums[i], self._inputs[i + 1], n, int(i < last))
        outputs = [torch.from_numpy(self._inputs[-1]).reshape(-1, n)]
        for i, name in enumerate(self._layers.linear):
            outputs.append(weights[name] @ (outputs[-1].relu() if i else outputs[-1]))
        return outputs

    def gradient(
        self, weights: Mapping[str, Tensor], outputs: list[Tensor], slope: Tensor, into: dict[str, Tensor]
    ) -> None:
        """Gradients of all weights from the slope of the loss at the last output (classes x n)."""
        for name, incoming, slopes in self._backward(weights, outputs, slope):
            if isinstance(incoming, Tensor):
                torch.mm(slopes, incoming.T, out=into[name])
            else:
                self._loops.convolve_gradient(incoming, slopes, into[name].numpy(), self._n)

    def rows(
        self, weights: Mapping[str, Tensor], outputs: list[Tensor], slope: Tensor, into: dict[str, Tensor]
    ) -> None:
        """The same, of each image on its own (n x the weight's shape)."""
        for name, incoming, slopes in self._backward(weights, outputs, slope):
            if isinstance(incoming, Tensor):
                torch.mul(slopes.T[:, :, None], incoming.T.contiguous()[:, None, :], out=into[name])
            else:
                found = np.empty((*into[name].shape[1:3], 9, self._n), np.float32)
                self._loops.convolve_rows(incoming, slopes, found, self._n)
                into[name].flatten(3).copy_(torch.from_numpy(found).permute(3, 0, 1, 2))

    def _backward(
        self, weights: Mapping[str, Tensor], outputs: list[Tensor], slope: Tensor
    ) -> Iterator[tuple[str, Any, Any]]:
        """From the last layer to the first: its weight, what goes in, and the slope of the loss at what comes out."""
        n = self._n
        for i, name in reversed(list(enumerate(self._layers.linear))):
            yield name, outputs[i].relu() if i else outputs[i], slope
            slope = weights[name].T @ slope
            if i:
                slope = slope * (outputs[i] > 0)
        above: Any = slope.reshape(self._shape).numpy()
        for i, layer in reversed(list(enumerate(self._layers.convolutions))):
            if layer.pooled:
                self._loops.pool_gradient(above, self._places[i], self._slopes[i], n)
            else:
                self._loops.rectify_gradient(above, self._sums[i], self._slopes[i], n)
            yield layer.weight, self._inputs[i], self._slopes[i]
            if i:
                turned = weights[layer.weight].transpose(0, 1).flip(2, 3).contiguous().numpy()
                self._loops.convolve(self._slopes[i], turned, self._input_slopes[i], n)
                above = self._input_slopes[i]
