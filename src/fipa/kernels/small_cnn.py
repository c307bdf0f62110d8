"""Loss and gradient of small CNNs, by the loops of `fipa.kernels.loops`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
MOST = 64  # channels up to which gradients of single images are faster by the loops


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


def layers_of(model: nn.Module, layout: Layout, channels: int = LANES) -> Layers | None:
    """The layers of a network that the kernels can run, or None for any other, or one with as many channels."""
    if type(model) is not nn.Sequential or any(watched(module) for module in model.modules()):
        return None  # a forward of its own, or hooks
    convolutions: list[Convolution] = []
    linear: list[str] = []
    flat, modules = False, list(model._modules.items())
    while modules:
        name, module = modules.pop(0)
        if type(module) is nn.Conv2d and not flat and _plain(module, channels):
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


def classifier(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model's logits as a function of images, by the loops if they can run it."""
    params = dict(model.named_parameters())
    layout = Layout.of(params)
    small = SmallCNN.of(model, layout)
    if small is None or not _finite(flat := layout.flatten(params)):
        return model
    return lambda x: torch.cat([small.logits(flat, block) for block in x.split(BLOCK)])


def _finite(tensor: Tensor) -> bool:
    """The sum tells it quickly; only where it overflows is every element looked at."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def watched(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward of its own, which loops would not call."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _plain(conv: nn.Conv2d, channels: int) -> bool:
    return (
        (conv.kernel_size, conv.stride, conv.dilation, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and conv.padding in ((1, 1), "same")
        and conv.padding_mode == "zeros"
        and conv.bias is None
        and conv.weight.dtype == torch.float32
        and conv.weight.device.type == "cpu"
        and conv.out_channels < channels
    )


def _halves(pool: nn.Module) -> bool:
    settings = [getattr(pool, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
    return settings in ([2, 2, 0, 1, False], [(2, 2), (2, 2), (0, 0), (1, 1), False])


@dataclass(frozen=True, eq=False)
class View:
    """Some of the images x (all x channels x height x width), each shifted and mirrored in its own way."""

    x: Tensor
    index: Tensor  # (n)
    moves: Tensor  # (n x 3), see `Augment.moves`

    @classmethod
    def of(cls, x: Tensor, index: Tensor | None = None, moves: Tensor | None = None) -> View:
        """The images at `index`, all by default, as they are or moved."""
        index = torch.arange(len(x)) if index is None else index
        moves = torch.zeros(len(index), 3, dtype=torch.long) if moves is None else moves
        return cls(x.contiguous(memory_format=torch.channels_last), index, moves)

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Numpy's views, as the loops take them: channels innermost."""
        return self.x.permute(0, 2, 3, 1).numpy(), self.index.numpy(), self.moves.numpy()

    def split(self, size: int) -> list[View]:
        """The same images, at most `size` at a time."""
        return [View(self.x, *piece) for piece in zip(self.index.split(size), self.moves.split(size), strict=True)]


@dataclass(frozen=True)
class Weights:
    """Views of the pieces of a flat vector: of convolutions, and of linear layers."""

    convolutions: tuple[Any, ...]  # numpy's views, which the loops take
    linear: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Factors:
    """Gradients of n images on their own, k of each: of linear layers they are outer products, and kept so."""

    convolutions: Tensor  # (n k x their parameters)
    linear: tuple[tuple[Tensor, Tensor], ...]  # slopes (n x k x out), and what goes in (n x in)

    @classmethod
    def joined(cls, parts: Sequence[Factors]) -> Factors:
        """Of all images."""
        linear = zip(*(part.linear for part in parts), strict=True)
        return cls(
            torch.cat([part.convolutions for part in parts]),
            tuple((torch.cat([s for s, _ in layer]), torch.cat([h for _, h in layer])) for layer in linear),
        )


class SmallCNN:
    """Loss and gradient of one network for batches of images."""

    def __init__(self, layers: Layers, layout: Layout) -> None:
        self._layers = layers
        self._layout = layout
        self._sizes = list(layout.sizes)
        self._workspaces: dict[tuple[int, ...], _Workspace] = {}

    @staticmethod
    def of(model: nn.Module, layout: Layout, channels: int = LANES) -> SmallCNN | None:
        """For networks that the kernels can run, with fewer channels than that, if numba is there."""
        layers = layers_of(model, layout, channels) if COMPILED else None
        return SmallCNN(layers, layout) if layers is not None else None

    def logits(self, flat: Tensor, x: Tensor) -> Tensor:
        """Logits (n x classes) of images x (n x channels x height x width)."""
        view = View.of(x)
        return self._workspace(view).forward(self._weights(flat), view)[-1].T.clone()

    def loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy; NaN wherever torch's would be, though the loops do not pass NaN on."""
        if not _finite(flat) or not _finite(x):
            return flat.new_tensor(math.nan)
        return cross_entropy(torch.cat([self.logits(flat, block) for block in x.split(BLOCK)]), y)

    def gradient(self, flat: Tensor, view: View, y: Tensor) -> Tensor:
        """Gradient of the mean cross entropy, flat."""
        weights, total, n = self._weights(flat), torch.empty_like(flat), len(y)
        blocks = [(view, y)]
        if n >= 2 * BLOCK:
            size = math.ceil(n / (n // BLOCK))  # all of about one size: a short block takes longer per image
            blocks = list(zip(view.split(size), y.split(size), strict=True))
        for i, (some, labels) in enumerate(blocks):
            work = self._workspace(some)
            outputs = work.forward(weights, some)
            slope = outputs[-1].softmax(dim=0)
            slope.scatter_add_(0, labels[None], slope.new_full((1, 1), -1.0).expand(1, len(labels))).div_(n)
            gradient = torch.empty_like(flat) if i else total
            work.gradient(weights, outputs, slope, self._weights(gradient))
            if i:
                total += gradient
        return total

    def factors(self, flat: Tensor, x: Tensor, extra: Any, factor: Callable[[Tensor, Any], Tensor]) -> Factors:
        """Gradients of each image on its own, k of them one after the other.

        `factor(logits, extra)` gives their slopes at the logits (n x classes x k). As in `loss`, NaN is not lost.
        """
        weights, view = self._weights(flat), View.of(x)
        work = self._workspace(view)
        outputs = work.forward(weights, view)
        slopes = factor(outputs[-1].T.contiguous(), extra).permute(2, 1, 0).contiguous()
        rows = flat.new_empty(len(slopes), len(x), sum(w.size for w in weights.convolutions))
        told = [work.rows(weights, outputs, slope, some) for slope, some in zip(slopes, rows, strict=True)]
        if not _finite(flat) or not _finite(x):
            rows.fill_(math.nan)
        slopes_by_layer = (torch.stack(found).permute(2, 0, 1).contiguous() for found in zip(*told, strict=True))
        incoming = (
            one.T.clone(memory_format=torch.contiguous_format) for one in _incoming(outputs)
        )  # of the workspace
        return Factors(rows.transpose(0, 1).flatten(0, 1), tuple(zip(slopes_by_layer, incoming, strict=True)))

    def numbers(self, rows: int) -> int:
        """What `factors` has for an image with so many rows."""
        shapes = dict(zip(self._layout.names, self._layout.shapes, strict=True))
        convolutions = sum(math.prod(shapes[layer.weight]) for layer in self._layers.convolutions)
        linear = [shapes[name] for name in self._layers.linear]
        return rows * (convolutions + sum(out for out, _ in linear)) + sum(width for _, width in linear)

    def _weights(self, flat: Tensor) -> Weights:
        pieces = [piece.view(shape) for piece, shape in zip(flat.split(self._sizes), self._layout.shapes, strict=True)]
        last = len(self._layers.convolutions)
        return Weights(tuple(piece.numpy() for piece in pieces[:last]), tuple(pieces[last:]))

    def _workspace(self, view: View) -> _Workspace:
        shape = (len(view.index), *view.x.shape[1:])
        if shape not in self._workspaces:
            if len(self._workspaces) >= 4:
                self._workspaces.pop(next(iter(self._workspaces)))
            self._workspaces[shape] = _Workspace(self._layers, self._layout, shape)
        return self._workspaces[shape]


class _Workspace:
    """Memory for a batch of one shape, and the passes through it; what a layer has no use for is empty."""

    def __init__(self, layers: Layers, layout: Layout, shape: tuple[int, ...]) -> None:
        from fipa.kernels import loops

        self._loops = cast(Any, loops)
        self._pooled = tuple(layer.pooled for layer in layers.convolutions)
        n, channels, height, width = shape
        self._n = n
        widths = dict(zip(layout.names, layout.shapes, strict=True))

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Any:
            return torch.zeros(size, dtype=dtype).numpy()  # aligned, unlike numpy's: products round by addresses

        inputs, sums, places, pairs = [empty(channels, height + 2, (width + 2) * n)], [], [], []
        slopes, input_slopes = [], []
        for i, layer in enumerate(layers.convolutions):
            input_slopes.append(empty(channels, height, width * n) if i else empty(0, 0, 0))
            channels = widths[layer.weight][0]
            pairs.append(empty(2, 2, width * n))
            sums.append(empty(0, 0, 0) if layer.pooled else empty(channels, height, width * n))
            slopes.append(empty(channels, height + 2, (width + 2) * n))
            if layer.pooled:
                height, width = height // 2, width // 2
            which = (channels, height, width * n) if layer.pooled else (0, 0, 0)
            places.append(empty(*which, dtype=torch.int32))
            border = i + 1 < len(layers.convolutions)
            inputs.append(empty(channels, height + 2 * border, (width + 2 * border) * n))
        self._inputs, self._sums, self._places, self._pairs = tuple(inputs), tuple(sums), tuple(places), tuple(pairs)
        self._slopes, self._input_slopes = tuple(slopes), tuple(input_slopes)
        self._features = torch.from_numpy(inputs[-1]).reshape(-1, n)
        self._shape = (channels, height, width * n)

    def forward(self, weights: Weights, view: View) -> list[Tensor]:
        """The outputs of the linear layers (features x n), after the flat input to the first of them."""
        self._loops.forward(
            *view.arrays, weights.convolutions, self._pooled, self._inputs, self._sums, self._places, self._pairs,
            self._n,
        )  # fmt: skip
        outputs = [self._features]
        for i, weight in enumerate(weights.linear):
            outputs.append(weight @ (outputs[-1].relu() if i else outputs[-1]))
        return outputs

    def gradient(self, weights: Weights, outputs: list[Tensor], slope: Tensor, into: Weights) -> None:
        """Gradients of all weights from the slope of the loss at the last output (classes x n)."""
        above, *slopes = _slopes(weights, outputs, slope)
        for incoming, slope, gradient in zip(_incoming(outputs), slopes, into.linear, strict=True):
            torch.mm(slope, incoming.T, out=gradient)
        self._loops.gradients(
            above.reshape(self._shape).numpy(), weights.convolutions, self._pooled, self._inputs, self._sums,
            self._places, self._slopes, self._input_slopes, self._pairs, into.convolutions, self._n,
        )  # fmt: skip

    def rows(self, weights: Weights, outputs: list[Tensor], slope: Tensor, into: Tensor) -> list[Tensor]:
        """The same of each image on its own: of convolutions into (n x p), of linear layers the slopes (out x n)."""
        above, *slopes = _slopes(weights, outputs, slope)
        self._loops.backward(
            above.reshape(self._shape).numpy(), weights.convolutions, self._pooled, self._sums, self._places,
            self._slopes, self._input_slopes, 0, self._n,
        )  # fmt: skip
        start = 0
        for weight, incoming, along in zip(weights.convolutions, self._inputs[:-1], self._slopes, strict=True):
            found = np.empty((*weight.shape[:2], 9, self._n), np.float32)
            self._loops.convolve_rows(incoming, along, found, self._n)
            into[:, start : start + weight.size] = torch.from_numpy(found).reshape(-1, self._n).T
            start += weight.size
        return slopes


def _incoming(outputs: list[Tensor]) -> list[Tensor]:
    """What goes into each linear layer."""
    first, *others = outputs[:-1]
    return [first, *(output.relu() for output in others)]


def _slopes(weights: Weights, outputs: list[Tensor], slope: Tensor) -> list[Tensor]:
    """Of the loss at each of the outputs, from its slope at the last."""
    found = [slope]
    for i, weight in reversed(list(enumerate(weights.linear))):
        slope = weight.T @ found[0]
        found.insert(0, slope * (outputs[i] > 0) if i else slope)
    return found
