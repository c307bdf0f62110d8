"""Model and data."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fipa.data import BalancedDirichlet, Images, ImageSet, load
from fipa.models import cnn


@cache
def images(dataset: str, data: str) -> ImageSet:
    """The whole set; each client looks at its part only."""
    return load(dataset, data or None)


def scaled(part: Images) -> tuple[Tensor, Tensor]:
    """Pixels between -1 and 1, and labels."""
    return part.pixels.float() / 127.5 - 1, part.labels


def model(config: dict[str, Any]) -> nn.Module:
    """A CNN with 8 thousand parameters for CIFAR-10, less for digits."""
    everything = images(str(config["dataset"]), str(config["data"]))
    channels, side, _ = everything.shape
    generator = torch.Generator().manual_seed(0)
    return cnn([4, 8], 16, classes=len(everything.classes), image=(channels, side), generator=generator)


def client_data(partition: int, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What one client holds."""
    train = images(str(config["dataset"]), str(config["data"])).train
    split = BalancedDirichlet(float(config["alpha"]))
    part = split.split(train.labels, int(config["clients"]), torch.Generator().manual_seed(0))[partition]
    return scaled(Images(train.pixels[part], train.labels[part]))


def fit(net: nn.Module, x: Tensor, y: Tensor, lr: float, epochs: int, seed: int) -> float:
    """Plain SGD."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(32):
            optimizer.zero_grad()
            loss = cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    return float(loss.detach())
