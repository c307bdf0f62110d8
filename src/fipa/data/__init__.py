"""Images: sets on disk, how they are split between clients, and augmentation."""

from fipa.data.adapters import from_huggingface, from_torch
from fipa.data.augment import Augment
from fipa.data.images import Images, ImageSet
from fipa.data.partition import (
    IID,
    BalancedDirichlet,
    Dirichlet,
    Indices,
    Partition,
    QuantitySkew,
    Shards,
    histogram,
)
from fipa.data.registry import load

__all__ = [
    "IID",
    "Augment",
    "BalancedDirichlet",
    "Dirichlet",
    "ImageSet",
    "Images",
    "Indices",
    "Partition",
    "QuantitySkew",
    "Shards",
    "from_huggingface",
    "from_torch",
    "histogram",
    "load",
]
