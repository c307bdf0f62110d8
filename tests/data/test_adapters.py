"""Data sets of torch and Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fipa.data import from_huggingface, from_torch
from fipa.errors import FipaError

PIXELS = torch.randint(0, 256, (4, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = [2, 0, 1, 2]


class Pictures(Dataset):
    classes = ("ant", "bee", "cow")

    def __init__(self, convert: Any, labels: Any = LABELS, pixels: torch.Tensor = PIXELS) -> None:
        self.convert, self.labels, self.pixels = convert, labels, pixels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.convert(self.pixels[index]), self.labels[index]


def hwc(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(hwc(image)))


CONVERSIONS = {
    "tensor": lambda image: image,
    "float tensor": lambda image: image.float() / 255,
    "array": hwc,
    "array, channels first": lambda image: image.numpy(),
    "float array": lambda image: hwc(image).astype(np.float64) / 255,
    "PIL": pil,
    "PIL with alpha": lambda image: pil(image).convert("RGBA"),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_torch(convert):
    found = from_torch(Pictures(convert), Pictures(convert, LABELS[:2]), name="animals")
    assert found.train.pixels.equal(PIXELS)
    assert found.test.pixels.equal(PIXELS[:2])
    assert found.train.labels.tolist() == LABELS
    assert (found.name, found.classes) == ("animals", ("ant", "bee", "cow"))
    scaled = PIXELS.double() / 255
    assert found.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert found.std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


GREY = {
    "tensor": lambda image: image[0],
    "tensor of one channel": lambda image: image[:1],
    "array": lambda image: image[0].numpy(),
    "array of one channel": lambda image: image[0].numpy()[:, :, None],
    "PIL": lambda image: Image.fromarray(image[0].numpy()),
}


@pytest.mark.parametrize("convert", GREY.values(), ids=GREY)
def test_grey(convert):
    found = from_torch(Pictures(convert), Pictures(convert))
    assert found.train.pixels.equal(PIXELS[:, :1])
    assert len(found.mean) == 1


def test_grey_among_coloured():
    images = [(pil(PIXELS[0]).convert("L"), 0), (pil(PIXELS[1]), 1)]
    found = from_torch(images, images[1:])
    grey = torch.from_numpy(np.asarray(images[0][0]).copy())
    assert found.train.pixels[0].equal(grey.expand(3, -1, -1))
    assert found.train.pixels[1].equal(PIXELS[1])


def test_tensor_dataset_without_names():
    data = TensorDataset(PIXELS, torch.tensor(LABELS))
    found = from_torch(data, data, mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    assert found.train.labels.tolist() == LABELS
    assert found.classes == ("class 0", "class 1", "class 2")
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (1, 1, 1))
    assert from_torch(data, data, classes=["x", "y", "z"]).classes == ("x", "y", "z")


def test_a_channel_of_one_value_can_be_divided_by():
    data = [(torch.full((1, 2, 2), 51, dtype=torch.uint8), 0)]
    found = from_torch(data, data)
    assert found.mean == pytest.approx((0.2,))
    assert found.std == (1.0,)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(image(1, 4, 4), 0)])


def image(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "images, train: there are no images"),
        ([(image(3, 4, 4), 0), (image(3, 4, 5), 0)], r"train, example 1: \(4, 5\) pixels.*\(4, 4\); resize"),
        ([(image(4, 4, 4), 0), (image(3, 4, 4), 0)], "example 1: 3 channels, where others have 4"),
        ([(image(3, 4, 4, dtype=torch.float32) - 1, 0)], r"example 0: .*float32 in \[-1.0, -1.0\]; leave normalising"),
        ([(image(3, 4, 4, dtype=torch.float32) + torch.nan, 0)], "example 0: pixels must be"),
        ([(image(3, 4, 4, dtype=torch.int64), 0)], "example 0: pixels must be bytes.*int64"),
        ([(image(7, 4, 3), 0)], r"must be \(channels, height, width\), got \(7, 4, 3\)"),
        ([(image(5).numpy(), 0)], r"must be \(height, width, channels\), got \(5,\)"),
        ([("cat.jpg", 0)], "example 0: an image must be a tensor, an array or a PIL image, got str"),
        ([(image(1, 4, 4), torch.tensor([0, 1]))], "example 0: a label must be one integer"),
        ([(image(1, 4, 4), "cat")], "example 0: a label must be one integer, got 'cat'"),
        ([(image(1, 4, 4), 0.5)], "example 0: a label must be one integer, got 0.5"),
        ([(image(3, 4, 4), -1)], "a label is none of the"),
        ([image(1, 4, 4)], r"example 0: expected \(image, label\), got Tensor"),
    ],
)
def test_what_torch_may_not_hand_over(data, words):
    with pytest.raises(FipaError, match=words):
        from_torch(data, [(image(3, 4, 4), 0)])


def test_sets_that_do_not_fit():
    with pytest.raises(FipaError, match=r"training images are \(1, 4, 4\), test images \(1, 5, 4\)"):
        from_torch([(image(1, 4, 4), 0)], [(image(1, 5, 4), 0)])
    one = [(image(1, 4, 4), 0)]
    with pytest.raises(FipaError, match="a number for each of 1 channels"):
        from_torch(one, one, mean=(0, 0, 0), std=(1,))
    with pytest.raises(FipaError, match="images, test: a data set must have a length"):
        from_torch(one, Stream())
    with pytest.raises(FipaError, match="none of the 2 classes"):
        from_torch([(image(1, 4, 4), 2)], one, classes=["a", "b"])


# --- Hugging Face ---


@dataclass(frozen=True)
class Label:
    names: list[str]


class Split(list):
    """Rows, and what their columns are."""

    def __init__(self, rows: list[dict[str, Any]], **features: object) -> None:
        super().__init__(rows)
        self.features = features


def like_theirs(convert: Any = pil, label: object = None) -> dict[str, Split]:
    rows = [{"img": convert(image), "label": number} for image, number in zip(PIXELS, LABELS, strict=True)]
    label = label or Label(["ant", "bee", "cow"])
    return {"train": Split(rows, img=None, label=label), "test": Split(rows[:2], img=None, label=label)}


def real() -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cow"])})
    columns = {"img": [pil(image) for image in PIXELS], "label": LABELS}
    train = datasets.Dataset.from_dict(columns, features)
    return datasets.DatasetDict({"train": train, "test": train.select(range(2))})


@pytest.mark.parametrize("make", [like_theirs, real])
def test_huggingface(make):
    found = from_huggingface(make(), name="animals")
    assert found.train.pixels.equal(PIXELS)
    assert found.test.pixels.equal(PIXELS[:2])
    assert found.train.labels.tolist() == LABELS
    assert (found.name, found.classes) == ("animals", ("ant", "bee", "cow"))


@pytest.mark.parametrize("style", ["numpy", "torch"])
def test_huggingface_in_other_formats(style):
    found = from_huggingface(real().with_format(style))
    assert found.train.pixels.equal(PIXELS)
    assert found.train.labels.tolist() == LABELS


@pytest.mark.parametrize("make", [like_theirs, real])
def test_huggingface_names_what_there_is(make):
    with pytest.raises(FipaError, match="no column 'image': did you mean 'img'"):
        from_huggingface(make(), image="image")
    with pytest.raises(FipaError, match="no column 'fine_label': did you mean 'label'"):
        from_huggingface(make(), label="fine_label")
    with pytest.raises(FipaError, match="no split 'valid': choose one of train, test"):
        from_huggingface(make(), test="valid")


def test_huggingface_other_names_and_plain_numbers():
    there = like_theirs(label=object())
    found = from_huggingface({"a": there["train"], "b": there["test"]}, train="a", test="b")
    assert (len(found.train), len(found.test)) == (4, 2)
    assert found.classes == ("class 0", "class 1", "class 2")
