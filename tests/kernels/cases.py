"""Small CNNs and images that the loops are checked on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fipa import Layout, parameters_of
from fipa.kernels.small_cnn import SmallCNN


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(
    channels: list[int], pooled: list[bool], image: tuple[int, int, int], widths: tuple[int, ...] = (5, 3)
) -> nn.Sequential:
    """Convolutions, some of them pooled, and linear layers that end with `widths`, with weights of size 1 or so."""
    width, height, breadth = image
    layers: list[nn.Module] = []
    for out, halves in zip(channels, pooled, strict=True):
        layers.append(nn.Conv2d(width, out, 3, padding=1, bias=False))
        if halves:
            layers.append(nn.MaxPool2d(2))
            height, breadth = height // 2, breadth // 2
        layers.append(nn.ReLU())
        width = out
    layers.append(nn.Flatten())
    features = width * height * breadth
    for out in widths:
        layers += [nn.Linear(features, out, bias=False), nn.ReLU()]
        features = out
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng()) / parameter[0].numel() ** 0.5)
    return model


def images(n: int, shape: tuple[int, int, int], classes: int = 3) -> tuple[Tensor, Tensor]:
    """With the channels innermost in memory, as a set's images are."""
    x = torch.randn(n, *shape, generator=rng(1)).contiguous(memory_format=torch.channels_last)
    return x, torch.randint(classes, (n,), generator=rng(2))


def small(model: nn.Module, params: str | None = None) -> tuple[SmallCNN | None, Tensor]:
    chosen = parameters_of(model, params)
    layout = Layout.of(chosen)
    return SmallCNN.of(model, layout), layout.flatten(chosen)
