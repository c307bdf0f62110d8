"""The networks of the paper's experiments."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(sizes: list[int], *, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Tanh network with a linear output; weights N(0, 1 / fan-in), biases zero.

    Examples
    --------
    >>> sum(p.numel() for p in mlp([1, 20, 20, 20, 1], generator=torch.Generator()).parameters())
    901
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(fan_out, fan_in, generator=generator, dtype=dtype) / math.sqrt(fan_in))
            linear.bias.zero_()
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn(
    channels: list[int],
    hidden: int,
    *,
    classes: int = 10,
    image: tuple[int, int] = (3, 32),
    generator: torch.Generator,
) -> nn.Sequential:
    """Convolutions 3x3 and ReLU, max-pooled 2x2 after the first two, then two linear layers; no biases.

    The paper's CNN-8k is `cnn([4, 8], 16)`, CNN-23k `cnn([6, 12], 32)`, CNN-207k `cnn([12, 24, 48], 61)`.
    `image` is (channels, side).
    """
    width, side = image
    layers: list[nn.Module] = []
    for i, out in enumerate(channels):
        layers.append(nn.Conv2d(width, out, 3, padding=1, bias=False))
        width = out
        if i < 2:
            layers.append(nn.MaxPool2d(2))  # before ReLU: the same numbers with a quarter of ReLU's work
            side //= 2
        layers.append(nn.ReLU())
    layers += [nn.Flatten(), nn.Linear(width * side * side, hidden, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(hidden, classes, bias=False))
    _initialise(model, gain=1.0, generator=generator)
    return model


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, width)
        self.relu2 = nn.ReLU()
        self.stride = stride
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, bias=False), nn.GroupNorm(2, width))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        # the pixels that a 1x1 convolution with a stride would take: the backward pass of that one writes beyond its
        # memory for few channels stored last (oneDNN 3.12, AVX2)
        return self.relu2(y + self.shortcut(x[..., :: self.stride, :: self.stride]))


class ResNet(nn.Module):
    """Residual network for small images: 3x3 stem, no max-pool, GroupNorm(2) throughout, global average pool."""

    def __init__(
        self, widths: list[int], blocks: int, *, classes: int, channels: int = 3, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, widths[0])
        self.relu = nn.ReLU()
        stages: list[nn.Module] = []
        width_in = widths[0]
        for i, width in enumerate(widths):
            for j in range(blocks):
                stages.append(ResidualBlock(width_in, width, stride=2 if i and not j else 1))
                width_in = width
        self.blocks = nn.Sequential(*stages)
        # what goes into these modules are the features of stem and stages, before ReLU
        self.levels = ("relu", *(f"blocks.{blocks * (i + 1) - 1}.relu2" for i in range(len(widths))))
        self.head = nn.Linear(width_in, classes)
        _initialise(self, gain=2.0, generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        features = self.blocks(self.relu(self.norm(self.stem(x)))).mean(dim=(2, 3))
        return self.head(features)


def resnet20(*, classes: int = 10, generator: torch.Generator) -> ResNet:
    """Three stages of three blocks, 16 to 64 channels."""
    return ResNet([16, 32, 64], 3, classes=classes, generator=generator)


def resnet18(*, classes: int = 10, generator: torch.Generator) -> ResNet:
    """Four stages of two blocks, 64 to 512 channels."""
    return ResNet([64, 128, 256, 512], 2, classes=classes, generator=generator)


def _initialise(model: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Normal weights of variance gain / fan-in (1: LeCun, 2: Kaiming), biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            with torch.no_grad():
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * math.sqrt(gain / fan_in))
                if module.bias is not None:
                    module.bias.zero_()
