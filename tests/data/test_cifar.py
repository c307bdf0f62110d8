"""Both CIFARs, from files of a few images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fipa.data import cifar
from fipa.data.cifar import CIFAR10, CIFAR100
from fipa.errors import FipaError


def write(file: Path, *labels: list[int], seed: int = 0) -> np.ndarray:
    """Rows of the labels and random pixels, which are returned."""
    file.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    np.concatenate([np.array(labels, dtype=np.uint8), pixels], axis=1).tofile(file)
    return pixels


@pytest.fixture
def ten(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    pixels = [write(folder / f"data_batch_{i}.bin", [i], [9], [0], seed=i) for i in range(1, 6)]
    return tmp_path, np.concatenate(pixels), write(folder / "test_batch.bin", [3], [8], seed=9)


@pytest.mark.parametrize("block", [1, 2, 5000])
def test_cifar10(ten, monkeypatch, block):
    monkeypatch.setattr(cifar, "BLOCK", block)
    root, train, test = ten
    found = CIFAR10.load(root)
    assert found.train.pixels.flatten(1).equal(torch.from_numpy(train))
    assert found.test.pixels.flatten(1).equal(torch.from_numpy(test))
    assert found.train.labels.tolist() == [1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9, 0, 5, 9, 0]
    assert found.test.labels.tolist() == [3, 8]
    assert found.shape == (3, 32, 32)
    assert found.classes[3] == "cat"


def test_planes_of_red_green_and_blue(ten):
    root, *_ = ten
    file = root / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(bytes([7]) + bytes([10] * 1024) + bytes([20] * 1024) + bytes(range(32)) * 32)
    (image,) = CIFAR10.load(root).test.pixels
    assert image[:, 5, 6].tolist() == [10, 20, 6]
    assert (image[2] == torch.arange(32)).all()


def test_cifar100_takes_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    pixels = write(folder / "train.bin", [4, 99], [0, 50])
    write(folder / "test.bin", [19, 7])
    found = CIFAR100.load(tmp_path)
    assert found.train.labels.tolist() == [99, 50]
    assert found.test.labels.tolist() == [7]
    assert found.train.pixels.flatten(1).equal(torch.from_numpy(pixels))
    assert found.classes == tuple(f"class {i}" for i in range(100))
    assert found.mean == (0.5071, 0.4867, 0.4408)

    names = [f"fish_{i}" for i in range(100)]
    (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n\n")
    assert CIFAR100.load(tmp_path).classes == tuple(names)
    (folder / "fine_label_names.txt").write_text("\n".join(names[1:]))
    with pytest.raises(FipaError, match=r"fine_label_names.txt has 99 names for 100 classes"):
        CIFAR100.load(tmp_path)


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_file_of_the_wrong_length(ten, size):
    (ten[0] / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(bytes(size))
    with pytest.raises(FipaError, match=rf"data_batch_3.bin has {size} bytes, no multiple of 3073: get it again"):
        CIFAR10.load(ten[0])


def test_label_out_of_range(ten):
    write(ten[0] / "cifar-10-batches-bin" / "test_batch.bin", [10])
    with pytest.raises(FipaError, match="CIFAR-10: a label is none of the 10 classes"):
        CIFAR10.load(ten[0])


def test_half_a_set_is_missing(ten):
    (ten[0] / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    assert CIFAR10.find(ten[0]) is None
