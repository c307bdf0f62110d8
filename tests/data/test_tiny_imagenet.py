"""Tiny ImageNet in its folders, of three classes with a few images each, and what is kept of the decoding."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fipa.data import tiny_imagenet as module
from fipa.data.tiny_imagenet import CACHE, TINY_IMAGENET
from fipa.errors import FipaError

COLOURS = {"n03": (250, 0, 0), "n01": (0, 250, 0), "n02": (0, 0, 250)}  # in the order of wnids.txt


def jpeg(file: Path, colour: tuple[int, ...] | int, size: tuple[int, int] = (64, 64)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(file, "JPEG")


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    for count, (name, colour) in enumerate(COLOURS.items(), 1):
        for i in range(count):
            jpeg(folder / "train" / name / "images" / f"{name}_{i}.JPEG", colour)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
    jpeg(folder / "train" / "n01" / "images" / "n01_9.JPEG", 100)
    jpeg(folder / "val" / "images" / "val_0.JPEG", COLOURS["n02"])
    jpeg(folder / "val" / "images" / "val_1.JPEG", COLOURS["n03"])
    (folder / "val" / "val_annotations.txt").write_text("val_1.JPEG\tn03\t0\t0\t63\t63\nval_0.JPEG\tn02\t0\t0\t9\t9\n")
    (folder / "wnids.txt").write_text("".join(f"{name}\n" for name in COLOURS))
    return tmp_path


@pytest.fixture
def folder(root):
    return root / "tiny-imagenet-200"


@pytest.fixture
def decoded(monkeypatch):
    """The files of each call."""
    calls: list[list[str]] = []
    decode = module._decode
    monkeypatch.setattr(module, "_decode", lambda files: calls.append([f.name for f in files]) or decode(files))
    return calls


def colours(pixels: torch.Tensor) -> list[tuple[int, ...]]:
    """Of the middle of each image, to the nearest 50."""
    return [tuple(50 * round(int(channel) / 50) for channel in image[:, 30, 30]) for image in pixels]


def test_read(root, folder, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    found = TINY_IMAGENET.load(root)
    assert found.classes == ("n03", "n01", "n02")
    assert found.train.labels.tolist() == [0, 1, 1, 1, 2, 2, 2]
    red, green, blue = COLOURS.values()
    assert colours(found.train.pixels) == [red, green, green, (100, 100, 100), blue, blue, blue]
    assert found.test.labels.tolist() == [0, 2]
    assert colours(found.test.pixels) == [red, blue]
    assert found.shape == (3, 64, 64)
    assert found.train.pixels.shape == (7, 3, 64, 64)


def test_names_of_classes(root, folder):
    (folder / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius auratus\nn03\tbullfrog\n")
    assert TINY_IMAGENET.load(root).classes == ("bullfrog", "goldfish", "n02")


def test_decoded_once(root, folder, decoded):
    first = TINY_IMAGENET.load(root)
    assert list(map(len, decoded)) == [7, 2]
    again = TINY_IMAGENET.load(root)
    assert len(decoded) == 2
    assert again.train.pixels.equal(first.train.pixels)
    assert again.test.pixels.equal(first.test.pixels)
    assert again.train.labels.equal(first.train.labels)
    before = first.train.pixels.clone()
    again.train.pixels[:] = 0  # changes nobody else's
    assert first.train.pixels.equal(before)
    assert TINY_IMAGENET.load(root).train.pixels.equal(before)


@pytest.mark.parametrize("change", ["more", "less", "other time", "other size", "other class"])
def test_decoded_again_when_files_change(root, folder, decoded, change):
    TINY_IMAGENET.load(root)
    file = folder / "train" / "n01" / "images" / "n01_0.JPEG"
    if change == "more":
        shutil.copy(file, file.with_name("n01_1x.JPEG"))
    elif change == "less":
        file.unlink()
    elif change == "other time":
        os.utime(file, (1e9, 1e9))
    elif change == "other size":
        status = file.stat()
        jpeg(file, (250, 0, 250))
        with file.open("ab") as stream:
            stream.write(b"more")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        (folder / "wnids.txt").write_text("n02\nn01\nn03\n")
    found = TINY_IMAGENET.load(root)
    assert len(decoded) == 3
    assert len(found.train) == {"more": 8, "less": 6}.get(change, 7)
    kept = sorted(p.name.split("-")[0] for p in (folder / CACHE).iterdir())
    assert kept == ["train", "val"]
    if change == "other size":
        assert colours(found.train.pixels)[1] == (250, 0, 250)
    if change == "other class":
        assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2]
        assert colours(found.train.pixels)[0] == COLOURS["n02"]


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_damaged_cache_is_made_anew(root, folder, decoded, content):
    first = TINY_IMAGENET.load(root).train.pixels.clone()
    (file,) = (folder / CACHE).glob("train-*.npy")
    file.unlink()
    if content is None:
        np.save(file, np.zeros((7, 3, 32, 32), np.uint8))
    else:
        file.write_bytes(content)
    assert TINY_IMAGENET.load(root).train.pixels.equal(first)
    assert len(decoded) == 3
    TINY_IMAGENET.load(root)
    assert len(decoded) == 3


def test_without_a_place_for_the_cache(root, folder, decoded):
    (folder / CACHE).write_text("in the way")
    assert len(TINY_IMAGENET.load(root).train) == 7
    assert len(TINY_IMAGENET.load(root).train) == 7
    assert len(decoded) == 4


def test_full_disk_leaves_nothing_behind(root, folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "save", full)
    assert len(TINY_IMAGENET.load(root).train) == 7
    assert list((folder / CACHE).iterdir()) == []


def test_without_pillow(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(FipaError, match=r"pip install 'fipa\[images\]'"):
        TINY_IMAGENET.load(root)


def broken(folder: Path, what: str) -> None:
    images = folder / "train" / "n02" / "images"
    annotations = folder / "val" / "val_annotations.txt"
    match what:
        case "no image":
            (images / "n02_1.JPEG").write_bytes(b"nonsense")
        case "half":
            (images / "n02_1.JPEG").write_bytes((images / "n02_1.JPEG").read_bytes()[:300])
        case "size":
            jpeg(images / "n02_1.JPEG", 0, (64, 32))
        case "class":
            shutil.rmtree(images)
        case "unknown":
            annotations.write_text("val_0.JPEG\tn77\t0\n")
        case "line":
            annotations.write_text("val_0.JPEG n02\n")
        case "gone":
            annotations.write_text("val_7.JPEG\tn02\t0\n")
        case "none":
            annotations.write_text("")
        case "twice":
            (folder / "wnids.txt").write_text("n01\nn02\nn01\n")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no image", r"n02_1.JPEG cannot be decoded"),
        ("half", r"n02_1.JPEG cannot be decoded"),
        ("size", r"n02_1.JPEG has 64 x 32 pixels, not 64 x 64"),
        ("class", r"train/n02/images.* is not there"),
        ("unknown", r"val_0.JPEG is of class n77, which is not in .*wnids.txt"),
        ("line", r"val_annotations.txt has the line 'val_0.JPEG n02', without a class"),
        ("gone", r"val_7.JPEG cannot be read: No such file"),
        ("none", r"val has no images"),
        ("twice", r"wnids.txt names a class twice"),
    ],
)
def test_broken_sets(root, folder, what, words):
    broken(folder, what)
    with pytest.raises(FipaError, match=words):
        TINY_IMAGENET.load(root)
