"""Sets by name: where they are looked for, and the real ones where FIPA_DATA has them."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace

import pytest
import torch

from fipa.data import registry
from fipa.data.idx import FILES
from fipa.data.registry import SETS, data_root, get, load
from fipa.errors import FipaError


def test_names():
    assert set(SETS) == {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet"}
    with pytest.raises(
        FipaError, match=r"no image set 'cifar': did you mean 'cifar10' or 'cifar100'\? Choose one of digits, mnist"
    ):
        load("cifar")


def test_root(monkeypatch, tmp_path):
    monkeypatch.setenv("FIPA_DATA", "there")
    assert str(data_root()) == "there"
    assert data_root(tmp_path) == tmp_path
    monkeypatch.delenv("FIPA_DATA")
    assert str(data_root()) == "data"
    assert data_root("~/sets").is_absolute()


@pytest.mark.parametrize("name", [name for name, source in SETS.items() if source.remote])
def test_a_missing_set_says_what_to_do(name, monkeypatch, tmp_path):
    source = replace(SETS[name], folders=SETS[name].folders[:2])  # Debian's folder may be there
    monkeypatch.setitem(SETS, name, source)
    with pytest.raises(FipaError) as error:
        load(name, tmp_path)
    text = str(error.value)
    assert str(tmp_path / source.folders[0]) in text
    assert f"`fipa data get {name}`" in text
    assert "--data or FIPA_DATA" in text


def test_read_once(tmp_path):
    assert load("digits", tmp_path) is load("digits", str(tmp_path))
    assert registry._load.cache_info().maxsize == 1


@pytest.mark.parametrize("name", [name for name, source in SETS.items() if source.remote])
def test_addresses_and_digests(name):
    for remote in SETS[name].remote:
        assert remote.url.startswith(("https://", "http://"))
        assert len(remote.md5) == 32
        assert int(remote.md5, 16)


# --- getting them ---


def archive(server, files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return server.remote("set.tar.gz", packed.getvalue())


def test_get_an_archive(server, monkeypatch, tmp_path):
    rows = {"train.bin": bytes([1, 5]) + bytes(3072), "test.bin": bytes([1, 6]) + bytes(3072)}
    files = {f"cifar-100-binary/{name}": row for name, row in rows.items()}
    monkeypatch.setitem(SETS, "cifar100", replace(SETS["cifar100"], remote=(archive(server, files),)))
    seen = []
    for _ in range(2):
        assert get("cifar100", tmp_path / "new", lambda *p: seen.append(p)) == tmp_path / "new" / "cifar-100-binary"
    assert len(server.asked) == 1
    assert seen
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["cifar-100-binary"]
    assert load("cifar100", tmp_path / "new").test.labels.tolist() == [6]


def test_an_archive_of_something_else(server, monkeypatch, tmp_path):
    monkeypatch.setitem(SETS, "cifar100", replace(SETS["cifar100"], remote=(archive(server, {"other": b""}),)))
    with pytest.raises(FipaError, match=r"cifar100: what was downloaded lacks some of train.bin"):
        get("cifar100", tmp_path)


def test_get_single_files_goes_on_after_a_failure(server, monkeypatch, tmp_path):
    remotes = tuple(server.remote(f"{file}.gz", file.encode()) for file in FILES)
    monkeypatch.setitem(SETS, "mnist", replace(SETS["mnist"], remote=remotes))
    lost = server.files.pop(f"/{FILES[2]}.gz")
    with pytest.raises(FipaError, match="404"):
        get("mnist", tmp_path)
    server.files[f"/{FILES[2]}.gz"] = lost
    assert get("mnist", tmp_path) == tmp_path / "mnist"
    assert len(server.asked) == 5  # three, the last of which failed, and then the two that were missing
    assert sorted(p.name for p in (tmp_path / "mnist").iterdir()) == sorted(f"{file}.gz" for file in FILES)


# --- the real ones ---

FIRST_LABELS = {"cifar10": [6, 9, 9, 4, 1], "cifar100": [19, 29, 0, 11, 1], "mnist": [5, 0, 4, 1, 9]}


@pytest.mark.skipif("FIPA_DATA" not in os.environ, reason="FIPA_DATA names no folder with real sets")
@pytest.mark.parametrize("name", [name for name, source in SETS.items() if source.remote])
def test_real_set(name):
    source = SETS[name]
    if source.find(data_root()) is None:
        pytest.skip(f"{name} is not under FIPA_DATA")
    found = load(name)
    train, test = source.images
    assert (found.shape, len(found.classes), len(found.test)) == (source.shape, source.classes, test)
    histograms = [torch.bincount(part.labels, minlength=source.classes) for part in (found.train, found.test)]
    if name == "mnist":
        assert len(found.train) == train
        assert histograms[1].tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    else:
        assert histograms[0].unique().numel() == histograms[1].unique().numel() == 1
        assert len(found.train) == train or name == "tiny-imagenet"  # of which one may keep a part
    assert found.train.labels[:5].tolist() == FIRST_LABELS.get(name, found.train.labels[:5].tolist())
    some = found.train.pixels[:: max(1, len(found.train) // 2000)].double() / 255
    assert some.mean((0, 2, 3)).tolist() == pytest.approx(found.mean, abs=0.02)
    assert some.std((0, 2, 3)).tolist() == pytest.approx(found.std, abs=0.02)
