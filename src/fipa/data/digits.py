"""Handwritten digits of 8 x 8 pixels, which come with the package.

They are the 1,797 images of the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
(UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), as scikit-learn's `load_digits` has them.
`digits.npz` holds them in an order that was drawn once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fipa.data.images import Images, ImageSet
from fipa.data.source import Source


def read_digits(folder: Path) -> ImageSet:
    """Every fifth image is for the test."""
    with np.load(folder / "digits.npz") as content:
        levels = torch.from_numpy(content["pixels"]).int()  # 0 to 16
        labels = torch.from_numpy(content["labels"]).long()
    pixels = ((levels * 255 + 8) // 16).to(torch.uint8)[:, None]
    test = torch.arange(len(labels)) % 5 == 0
    return ImageSet(
        "Digits",
        Images(pixels[~test], labels[~test]),
        Images(pixels[test], labels[test]),
        tuple("0123456789"),
        (0.3045,),
        (0.3753,),
    )


DIGITS = Source(
    "digits",
    "Digits",
    classes=10,
    images=(1_437, 360),
    shape=(1, 8, 8),
    read=read_digits,
    folders=(str(Path(__file__).parent),),
    files=("digits.npz",),
)
