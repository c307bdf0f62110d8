"""A node's copies of the shared basis and of models, in files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fipa.federation.basis import Basis
from fipa.federation.exact import mark_of
from fipa.flower import copies as module
from fipa.flower.copies import FOLDER, OLD, Copies, folder

P = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache" / "bases"


def columns(seed: int, k: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return Basis.empty(P).widened(list(torch.randn(k, P, generator=generator)), generator).columns


EMPTY = mark_of(torch.zeros(P, 0))


def kept(copies: Copies, *seeds: int) -> list[str]:
    """Save one copy after the other, each from the one before; their marks."""
    marks = [EMPTY]
    for seed in seeds:
        marks.append(mark_of(columns(seed)))
        copies.save(columns(seed), marks[-1])
    return marks[1:]


def test_a_copy_comes_back_in_another_process() -> None:
    (mark,) = kept(Copies("7-0"), 1)
    found = Copies("7-0").load(mark, P)
    assert found is not None
    assert torch.equal(found, columns(1))
    assert mark_of(found) == mark


def test_columns_of_odd_strides_come_back() -> None:
    odd = columns(1).T.contiguous().T
    Copies("7-0").save(odd, mark_of(odd))
    found = Copies("7-0").load(mark_of(odd), P)
    assert found is not None
    assert torch.equal(found, columns(1))


def test_without_columns_no_file_is_needed(cache: Path) -> None:
    found = Copies("7-0").load(EMPTY, P)
    assert found is not None
    assert found.shape == (P, 0)
    assert not cache.exists()


def test_what_is_not_there_is_none() -> None:
    kept(Copies("7-0"), 1)
    assert Copies("7-0").load(mark_of(columns(2)), P) is None
    assert Copies("7-1").load(mark_of(columns(1)), P) is None  # another client
    assert Copies("8-0").load(mark_of(columns(1)), P) is None  # another run
    assert Copies("7-0").load(mark_of(columns(1)), P + 1) is None  # another model


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[:-5])
    elif kind == "no bytes":
        path.write_bytes(b"")
    elif kind == "one bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif kind == "noise":
        path.write_bytes(b"\xff" * len(content))
    elif kind == "other columns":
        save_file({"columns": columns(9)}, path)
    else:
        save_file({"rows": columns(1)}, path)


@pytest.mark.parametrize("kind", ["cut", "no bytes", "one bit", "noise", "other columns", "other names"])
def test_a_damaged_file_is_none_and_heals(kind: str, cache: Path) -> None:
    copies = Copies("7-0")
    (mark,) = kept(copies, 1)
    (path,) = cache.iterdir()
    damage(path, kind)
    assert copies.load(mark, P) is None
    kept(copies, 1)
    found = copies.load(mark, P)
    assert found is not None
    assert torch.equal(found, columns(1))


def test_only_the_last_two_are_kept(cache: Path) -> None:
    copies = Copies("7-0")
    first, second, third, fourth = kept(copies, 1, 2, 3, 4)
    assert [copies.load(mark, P) is None for mark in (first, second, third, fourth)] == [True, True, False, False]
    assert len(list(cache.iterdir())) == 2
    copies.save(columns(3), third)  # nothing is new: a server that asks twice in a round
    assert len(list(cache.iterdir())) == 2
    (fifth,) = kept(copies, 5)  # the others are in the order of their last use
    assert [copies.load(mark, P) is None for mark in (third, fourth, fifth)] == [False, True, False]
    assert copies.load(third, P) is not None
    kept(copies, 6)
    assert [copies.load(mark, P) is None for mark in (third, fifth)] == [False, True]


def test_models_stand_apart_and_keep_their_digits(cache: Path) -> None:
    models, theta = Copies("7-0", "models", most=3), torch.arange(P, dtype=torch.float64) / 3
    kept(Copies("7-0"), 1)
    for k in range(4):
        models.save(theta + k, mark_of(theta + k))
    found = models.load(mark_of(theta + 3), P)
    assert found is not None
    assert found.dtype == torch.float64
    assert torch.equal(found, theta + 3)
    assert models.load(mark_of(theta), P) is None
    assert len(list((cache.parent / "models").iterdir())) == 3
    assert len(list(cache.iterdir())) == 1


def test_other_clients_and_runs_keep_theirs(cache: Path) -> None:
    """Also those whose names begin alike."""
    others = [Copies(owner) for owner in ("7-1", "7-00", "7-10", "77-0", "17-0")]
    marks = [kept(copies, 1, 2) for copies in others]
    mine = Copies("7-0")
    kept(mine, 1, 2, 3)
    mine.clear()
    assert [path for path in cache.iterdir() if path.name.startswith("7-0-")] == []
    for copies, found in zip(others, marks, strict=True):
        assert all(copies.load(mark, P) is not None for mark in found)


def test_copies_of_runs_that_ended_long_ago_are_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what processes left behind that were killed."""
    monkeypatch.setattr(module, "EVERY", 0.0)
    kept(Copies("1-0"), 1)
    kept(Copies("2-0"), 1)
    (cache / "1-0-abc.safetensors.123").write_bytes(b"half of")
    (cache / "notes.txt").write_text("not ours")
    for path in cache.iterdir():
        if not path.name.startswith("2-0"):
            os.utime(path, (time.time() - 2 * OLD,) * 2)
    kept(Copies("3-0"), 1)
    assert {path.name[:3] for path in cache.iterdir()} == {"2-0", "3-0", "not"}


def test_a_process_looks_for_old_ones_now_and_then(cache: Path) -> None:
    kept(Copies("1-0"), 1)
    (old,) = cache.iterdir()
    os.utime(old, (time.time() - 2 * OLD,) * 2)
    kept(Copies("2-0"), 1)
    assert old.exists()


def test_another_client_may_delete_an_old_file_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)
    kept(Copies("1-0"), 1)
    (old,) = cache.iterdir()
    os.utime(old, (time.time() - 2 * OLD,) * 2)
    stat = Path.stat

    def deleted_by_another(path: Path, **options: bool) -> os.stat_result:
        if path == old:
            old.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", deleted_by_another)
    (mark,) = kept(Copies("2-0"), 1)
    monkeypatch.undo()
    assert (cache / f"2-0-{mark}.safetensors").exists()


def test_where_copies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder() == tmp_path / "cache"
    monkeypatch.setattr(Path, "home", staticmethod(lambda: tmp_path / "me"))
    for unset in (lambda: monkeypatch.delenv(FOLDER), lambda: monkeypatch.setenv(FOLDER, "")):
        unset()
        assert folder() == tmp_path / "me" / ".cache" / "fipa"
