"""Images: sets on disk, how they are split between clients, and augmentation."""

from fipa.data.augment import Augment
from fipa.data.images import Images, ImageSet
from fipa.data.partition import BalancedDirichlet, Partition
from fipa.data.registry import load

__all__ = ["Augment", "BalancedDirichlet", "ImageSet", "Images", "Partition", "load"]
