"""The head of a frozen network (paper Table 2): clients train one linear layer on its features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fipa.clients.client import Client
from fipa.data import BalancedDirichlet, ImageSet, Partition, histogram, load
from fipa.errors import FipaError, instead_of
from fipa.federation.problem import Problem, Shares
from fipa.problems.backbones import BACKBONES
from fipa.problems.dealing import dealt
from fipa.problems.features import features
from fipa.problems.files import module_from


class HeadAccuracy:
    """Percentage of images whose class a head finds, given their features."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self._x, self._labels = x, labels

    def __call__(self, model: nn.Module) -> float:
        """Accuracy of a head."""
        return 100 * float((model(self._x).argmax(dim=1) == self._labels).double().mean())


def head(
    seed: int,
    *,
    dataset: str = "digits",
    backbone: str = "efficientnet-lite0",
    clients: int = 10,
    samples: int | None = None,
    partition: Partition = BalancedDirichlet(),  # noqa: B008
    test_samples: int | None = None,
) -> Problem:
    """A linear head on the features that a frozen network makes of a set's images; accuracy on its test images.

    Parameters
    ----------
    clients
        Number of clients.
    dataset
        A name from `fipa data list`, under the folder that `--data` or `FIPA_DATA` names.
    backbone
        `"efficientnet-lite0"`, or a Python file with a function `backbone()` that returns a module: see
        `fipa.problems.features.features`.
    samples, partition, test_samples
        As for `images`.
    """
    return head_on(
        load(dataset), _backbone(backbone), seed, clients=clients, samples=samples, partition=partition,
        test_samples=test_samples,
    )  # fmt: skip


def head_on(
    data: ImageSet,
    backbone: nn.Module,
    seed: int,
    *,
    clients: int,
    samples: int | None = None,
    partition: Partition = BalancedDirichlet(),  # noqa: B008
    test_samples: int | None = None,
) -> Problem:
    r"""The same from any `fipa.data.ImageSet` and any module that makes features of images.

    The head begins at zero. Features are standardised, each to mean 0 and variance 1 over all clients. For that clients
    need tell no more than sums: $n_m$, $\sum f$ and $\sum f^2$, 2 d + 1 numbers, once.
    """
    parts = dealt(data.name, data.train.labels, seed, clients, samples, partition, test_samples)
    made = features(data, backbone)
    x, y = made.train, made.train_labels
    mean, scale = _statistics([x[part] for part in parts])
    test, labels = made.test[:test_samples], made.test_labels[:test_samples]
    return Problem(
        _zero_head(x.shape[1], len(data.classes)),
        [Client(((x[part] - mean) / scale, y[part]), "cross_entropy") for part in parts],
        HeadAccuracy((test - mean) / scale, labels),
        name="test accuracy, %",
        goal="max",
        scale="linear",
        picture=Shares(histogram(y, parts, len(data.classes)), data.classes),
    )


def _statistics(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and spread of each feature, from sums of every client; one that never varies has a spread of 1."""
    count = sum(len(part) for part in parts)
    total = sum((part.double().sum(dim=0) for part in parts), start=parts[0].new_zeros((), dtype=torch.float64))
    squares = sum((part.double().square().sum(dim=0) for part in parts), start=torch.zeros((), dtype=torch.float64))
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0)
    spread = torch.where(variance > 1e-12 * mean.square().clamp(min=1e-12), variance.sqrt(), 1.0)
    return mean.float(), spread.float()


def _zero_head(inputs: int, classes: int) -> nn.Linear:
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _backbone(wanted: str) -> nn.Module:
    if wanted in BACKBONES:
        return BACKBONES[wanted]()
    if not wanted.endswith(".py"):
        raise FipaError(f"there is no backbone {wanted!r}: {instead_of(wanted, BACKBONES)}, or name a Python file")
    make = getattr(module_from(wanted), "backbone", None)
    made = make() if callable(make) else None
    if not isinstance(made, nn.Module):
        raise FipaError(f"{wanted} must define a function backbone() that returns a torch module")
    return made
