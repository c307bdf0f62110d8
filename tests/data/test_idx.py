"""MNIST and Fashion-MNIST, from files of a few images."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fipa.data.idx import FASHION_MNIST, FILES, MNIST, read_idx
from fipa.errors import FipaError


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(folder: Path, packed: bool) -> np.ndarray:
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    contents = (images[:3], np.array([9, 0, 4]), images[3:], np.array([1, 2]))
    for name, content in zip(FILES, contents, strict=True):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(content)))
        else:
            (folder / name).write_bytes(idx(content))
    return images


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("source", "folder"),
    [(MNIST, "mnist"), (MNIST, "MNIST/raw"), (FASHION_MNIST, "fashion-mnist"), (FASHION_MNIST, "FashionMNIST/raw")],
)
def test_read(tmp_path, source, folder, packed):
    images = torch.from_numpy(write(tmp_path / folder, packed))
    found = source.load(tmp_path)
    assert found.train.pixels.equal(images[:3, None])
    assert found.test.pixels.equal(images[3:, None])
    assert found.train.labels.tolist() == [9, 0, 4]
    assert found.test.labels.tolist() == [1, 2]
    assert found.classes[9] == ("9" if source is MNIST else "ankle boot")
    assert found.mean == ((0.1307,) if source is MNIST else (0.2860,))
    assert found.name == source.title


def test_debian_folder_is_the_last_resort(tmp_path):
    assert FASHION_MNIST.folders[-1].startswith("/usr/share/")
    assert (tmp_path / FASHION_MNIST.folders[-1]) == Path(FASHION_MNIST.folders[-1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as an IDX file"),
        (b"<html>", "does not begin as an IDX file"),
        (idx(np.zeros((2, 3)))[:-1], "has 17 bytes, not 12 [+] 2 x 3: get it again"),
        (idx(np.zeros((2, 3))) + b"x", "has 19 bytes"),
        (struct.pack(">BBBB", 0, 0, 8, 3), "has 4 bytes"),
    ],
)
def test_broken_file(tmp_path, content, words):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(FipaError, match=f"{file} {words}"):
        read_idx(file)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(idx(np.zeros(100)))[:-12], b"\x1f\x8b\x08" + b"\0" * 40],
    ids=["none", "cut off", "a header only"],
)
def test_broken_gzip(tmp_path, content):
    file = tmp_path / "file.gz"
    file.write_bytes(content)
    with pytest.raises(FipaError, match=r"file.gz cannot be unpacked: .*Get it again"):
        read_idx(file)


def test_as_many_labels_as_images(tmp_path):
    write(tmp_path / "mnist", packed=False)
    (tmp_path / "mnist" / FILES[1]).write_bytes(idx(np.array([1, 2])))
    with pytest.raises(FipaError, match="3 images need as many"):
        MNIST.load(tmp_path)
