"""Image classification with a network and a set of images of your own: `fipa run examples/own_images.py`.

Any torch Dataset of (image, label) will do; here they are random blobs, four classes of them.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fipa import Problem
from fipa.data import Dirichlet, ImageSet, from_torch
from fipa.problems.vision import split


def blobs(count: int, seed: int) -> TensorDataset:
    """A bright square in one of the four corners of a noisy image."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    images = 0.3 * torch.rand(count, 1, 12, 12, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 6 * (label // 2), 6 * (label % 2)
        image[:, row : row + 6, column : column + 6] += 0.05
    return TensorDataset(images, labels)


def network(images: ImageSet, generator: torch.Generator) -> nn.Module:
    """Yours. The generator is there for initial weights that depend on the seed."""
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    channels, height, width = images.shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * height * width, 16), nn.Tanh(), nn.Linear(16, len(images.classes))
    )


def problem(seed: int) -> Problem:
    """Eight clients with few classes each."""
    images = from_torch(blobs(800, seed=0), blobs(400, seed=1), name="blobs")
    return split(images, seed, model=network, clients=8, partition=Dirichlet(alpha=0.1, smallest=20))
