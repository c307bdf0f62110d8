"""Image classification (paper Tables 1 and 2): clients with different classes train one network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fipa.clients.client import Client
from fipa.data import Augment, BalancedDirichlet, Images, ImageSet, Partition, histogram, load
from fipa.data.images import Normalise
from fipa.errors import FipaError, instead_of
from fipa.federation.problem import Problem, Shares
from fipa.kernels.small_cnn import classifier
from fipa.models import ResNet, cnn
from fipa.problems.dealing import dealt
from fipa.randomness import generator_for

BLOCK = 500  # images that are classified at once


@dataclass(frozen=True)
class ConvNet:
    """Convolutions, pooled after the first two, and two linear layers: see `fipa.models.cnn`.

    Parameters
    ----------
    channels
        Channels of each convolution.
    hidden
        Width of the first linear layer.
    """

    channels: tuple[int, ...]
    hidden: int


@dataclass(frozen=True)
class ResidualNet:
    """A residual network: see `fipa.models.ResNet`.

    Parameters
    ----------
    widths
        Channels of each stage.
    blocks
        Residual blocks in each stage.
    """

    widths: tuple[int, ...]
    blocks: int


MODELS: dict[str, ConvNet | ResidualNet] = {
    "cnn8k": ConvNet((4, 8), 16),
    "cnn23k": ConvNet((6, 12), 32),
    "cnn207k": ConvNet((12, 24, 48), 61),
    "resnet20": ResidualNet((16, 32, 64), 3),
    "resnet18": ResidualNet((64, 128, 256, 512), 2),
}


class Accuracy:
    """Percentage of images whose class a model finds."""

    def __init__(self, images: Images, transform: Callable[[Tensor], Tensor]) -> None:
        self._images = images
        self._transform = transform

    @cached_property
    def _x(self) -> Tensor:
        """What the model sees, made once."""
        blocks = [self._transform(block) for block in self._images.pixels.split(BLOCK)]
        return torch.cat(blocks)

    def __call__(self, model: nn.Module) -> float:
        """Accuracy of a model in evaluation mode."""
        pairs, logits = zip(self._x.split(BLOCK), self._images.labels.split(BLOCK), strict=True), classifier(model)
        right = sum(int((logits(x).argmax(dim=1) == y).sum()) for x, y in pairs)
        return 100 * right / len(self._images)

    def through(self, transform: Callable[[Tensor], Tensor]) -> Accuracy:
        """The same with another view of the images, such as the features that a frozen network makes of them."""
        return Accuracy(self._images, transform)


def images(
    seed: int,
    *,
    dataset: str = "digits",
    model: str | ConvNet | ResidualNet = "cnn8k",
    clients: int = 10,
    samples: int | None = None,
    partition: Partition = BalancedDirichlet(),  # noqa: B008
    augment: Augment | None = None,
    params: str | tuple[str, ...] | None = None,
    test_samples: int | None = None,
) -> Problem:
    """Images of a set, split between clients; accuracy on the set's test images.

    Parameters
    ----------
    clients
        Number of clients.
    dataset
        A name from `fipa data list`, under the folder that `--data` or `FIPA_DATA` names.
    model
        A name such as `"cnn8k"`, or `{ channels = [4, 8], hidden = 16 }`, or `{ widths = [16, 32, 64], blocks = 3 }`.
    samples
        Per client, drawn at random before the split; None takes all training images.
    partition
        How they are split.
    augment
        What local training does to its batches.
    params
        Which parameters are trained, by name or pattern; all by default.
    test_samples
        Use only this many of the test images, from the first on.
    """
    return split(
        load(dataset), seed, model=model, clients=clients, samples=samples, partition=partition, augment=augment,
        params=params, test_samples=test_samples,
    )  # fmt: skip


def split(
    data: ImageSet,
    seed: int,
    *,
    model: str | ConvNet | ResidualNet | Callable[[ImageSet, torch.Generator], nn.Module],
    clients: int,
    samples: int | None = None,
    partition: Partition = BalancedDirichlet(),  # noqa: B008
    augment: Augment | None = None,
    params: str | Sequence[str] | None = None,
    test_samples: int | None = None,
) -> Problem:
    """A problem from any `fipa.data.ImageSet`; `model` may also be a function that makes your own."""
    train = data.train
    parts = dealt(data.name, train.labels, seed, clients, samples, partition, test_samples)
    normalise = Normalise(data.mean, data.std)
    test = Images(data.test.pixels[:test_samples], data.test.labels[:test_samples])
    counts = histogram(train.labels, parts, len(data.classes))
    return Problem(
        _model(model, data, generator_for(seed, "model")),
        [
            Client((train.pixels[part], train.labels[part]), "cross_entropy", transform=normalise, augment=augment)
            for part in parts
        ],
        Accuracy(test, normalise),
        name="test accuracy, %",
        goal="max",
        scale="linear",
        params=params,
        picture=Shares(counts, data.classes),
    )


def _model(
    wanted: str | ConvNet | ResidualNet | Callable[[ImageSet, torch.Generator], nn.Module],
    data: ImageSet,
    generator: torch.Generator,
) -> nn.Module:
    if isinstance(wanted, str):
        if wanted not in MODELS:
            raise FipaError(f"there is no model {wanted!r}: {instead_of(wanted, MODELS)}, or give its layers")
        wanted = MODELS[wanted]
    channels, height, width = data.shape
    if isinstance(wanted, ConvNet):
        if height != width or height % 4:
            raise FipaError(f"{data.name}: a cnn needs square images with a side of a multiple of 4, not {data.shape}")
        return cnn(
            list(wanted.channels), wanted.hidden, classes=len(data.classes), image=(channels, height),
            generator=generator,
        )  # fmt: skip
    if isinstance(wanted, ResidualNet):
        return ResNet(
            list(wanted.widths), wanted.blocks, classes=len(data.classes), channels=channels, generator=generator
        )
    return wanted(data, generator)
