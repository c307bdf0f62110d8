"""Tensors in files: the same numbers, no names left behind, and memory that is given back."""

from __future__ import annotations

import io
import pickle
import tempfile
from pathlib import Path

import pytest
import torch

import fipa
from fipa.errors import FipaError
from fipa.linalg import aligned
from fipa.spill import SMALLEST, Passing, Shelf, in_file, release, spilled

LAYOUT = fipa.Layout(("w",), ((30_000,),))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def update(client: int = 0) -> fipa.ClientUpdate:
    rng = torch.Generator().manual_seed(client)
    vectors = torch.linalg.qr(torch.randn(30_000, 3, generator=rng)).Q
    sketch = fipa.Sketch(vectors.contiguous(), torch.tensor([3.0, 2.0, 1.0]), LAYOUT)
    return fipa.ClientUpdate(torch.randn(30_000, generator=rng), 10, sketch, client)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("strided", [False, True])
def test_same_numbers_in_the_form_that_rules_work_on(dtype: torch.dtype, strided: bool, folder: Path) -> None:
    tensor = (100 * torch.randn(700, 500)).to(dtype)
    tensor = tensor.T if strided else tensor
    there = spilled(tensor)
    assert in_file(there)
    assert not in_file(tensor)
    assert (there.dtype, there.shape) == (dtype, tensor.shape)
    assert torch.equal(there, tensor)
    assert aligned(there) is there
    assert list(folder.iterdir()) == []  # the file has no name: no kill can leave it behind


def test_small_tensors_and_those_in_files_stay(folder: Path) -> None:
    small, large = torch.zeros(SMALLEST // 4 - 1), torch.zeros(SMALLEST // 4)
    assert spilled(small) is small
    there = spilled(large)
    assert in_file(there)
    assert spilled(there) is there


def test_a_disk_that_is_full_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "from_file", full)
    with pytest.raises(OSError, match="no space"):
        spilled(torch.zeros(SMALLEST))
    assert list(folder.iterdir()) == []


def test_released_numbers_are_read_again() -> None:
    tensor = torch.randn(50_000)
    there = spilled(tensor)
    release(there, tensor)
    assert torch.equal(there, tensor)
    there[7] = 5.0  # it may be written to like any other
    release(there)
    assert float(there[7]) == 5.0


def test_they_travel_and_are_saved_like_any_other() -> None:
    tensor = torch.randn(50_000)
    there, file = spilled(tensor), io.BytesIO()
    torch.save({"late": there}, file)
    file.seek(0)
    for copy in (pickle.loads(pickle.dumps(there)), torch.load(file)["late"], there.clone()):
        assert torch.equal(copy, tensor)
        assert not in_file(copy)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is in memory")
def test_memory_is_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 64 * 2**20
    there = [spilled(torch.ones(size // 4)) for _ in range(3)]
    before = resident()
    for tensor in there:
        tensor.sum()
    assert resident() - before > 2.5 * size
    release(*there)
    assert resident() - before < 0.5 * size
    peaks = []
    for tensor in Passing(there):
        tensor.sum()
        peaks.append(resident() - before)
    assert max(peaks) < 1.5 * size


def test_a_shelf_fills_memory_first(folder: Path) -> None:
    shelf, one = Shelf(2 * (4 * 30_000 * 4 + 12)), update()
    kept = [shelf.keep(update(k)) for k in range(4)]
    assert [in_file(u.delta) for u in kept] == [False, False, True, True]
    assert [in_file(u.sketch.eigenvectors) for u in kept] == [False, False, True, True]
    assert not any(in_file(u.sketch.eigenvalues) for u in kept)
    for k, u in enumerate(kept):
        assert torch.equal(u.delta, update(k).delta)
        assert torch.equal(u.sketch.eigenvectors, update(k).sketch.eigenvectors)
        assert (u.client_id, u.num_examples, u.sketch.layout) == (k, one.num_examples, LAYOUT)


def test_a_tensor_that_an_update_has_twice_is_kept_once() -> None:
    delta = torch.randn(30_000)
    statistics = fipa.AdditiveStatistics(torch.randn(30_000, 2), torch.randn(30_000), delta, 10, 1, LAYOUT)
    kept = Shelf(0).keep(fipa.ClientUpdate(delta, 10, statistics))
    assert in_file(kept.delta)
    assert kept.sketch.delta is kept.delta


def test_bad_limit() -> None:
    with pytest.raises(FipaError, match="memory_limit=-1"):
        Shelf(-1)


def test_passing_through_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("fipa.spill.release", lambda *tensors: left.extend(id(t) for t in tensors))
    sketches = [update(k).sketch for k in range(3)]
    passing = Passing(sketches)
    for way, expected in (passing, sketches), (reversed(passing), sketches[::-1]):
        left.clear()
        for i, sketch in enumerate(way):
            assert left == [id(t) for s in expected[:i] for t in s.tensors().values()]
            assert sketch is expected[i]
        assert len(left) == 6
    assert (len(passing), passing[1], list(passing[1:])) == (3, sketches[1], sketches[1:])


def test_all_can_be_had_at_once() -> None:
    tensors = [spilled(torch.full((30_000,), float(k))) for k in range(3)]
    assert torch.stack(Passing(tensors)).sum(dim=1).tolist() == [0.0, 30_000.0, 60_000.0]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is in memory")
def test_replies_that_come_one_by_one_leave_no_holes_in_memory() -> None:
    """Small things that are kept of each would else make the next large one find no place that is large enough."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    shelf, kept, sizes = Shelf(0), [], []
    half, layout = torch.randn(270_000, 10), fipa.Layout(("w",), ((270_000,),))
    values, delta = torch.ones(20), torch.randn(270_000)
    for client in range(40):
        vectors = torch.cat([half, half.roll(131 * client, 0)], dim=1)
        sketch = fipa.Sketch(vectors, values.clone(), layout)
        kept.append(shelf.keep(fipa.ClientUpdate(delta.roll(client), 10, sketch, client)))
        del vectors, sketch
        sizes.append(resident())
    assert sizes[-1] - sizes[9] < 40 * 2**20
