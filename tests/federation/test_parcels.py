"""What goes to another process arrives as it was, whichever way it takes."""

import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fipa.federation import parcels
from fipa.federation.parcels import Parcel

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (0,), (5,), (3, 4), (0, 3), (2, 3, 4, 5)]


@dataclass(frozen=True)
class Thing:
    name: str
    tensor: Tensor
    more: dict[str, Tensor]


@pytest.fixture(params=["file", "pipe"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(parcels, "LARGE", 1 if request.param == "file" else 2**20)
    return str(request.param)


def through(what: object, place: Path) -> object:
    """As another process has it."""
    parcel = pickle.loads(pickle.dumps(Parcel.of(what, place)))
    found = parcel.opened()
    parcel.discard()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tensor_arrives_as_it_was(way: str, tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    before = (10 * torch.randn(shape)).to(dtype)
    after = through([before, before], tmp_path / "parcel")
    assert isinstance(after, list)
    assert after[0].dtype == dtype
    assert after[0].shape == before.shape
    assert torch.equal(after[0], before)
    assert after[0] is after[1]
    assert not list(tmp_path.iterdir())


STRIDED = {
    "columns one after the other": torch.arange(12.0).reshape(3, 4).T,
    "every second": torch.arange(12.0)[::2],
    "a part of a row": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "channels innermost": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one number many times": torch.ones(1).expand(6),
    "one row, as a column": torch.randn(300, 1).T,
    "one column, as a row": torch.randn(1, 300).T,
}


@pytest.mark.parametrize("before", STRIDED.values(), ids=STRIDED)
def test_strides_stay(way: str, tmp_path: Path, before: Tensor) -> None:
    """Products round by them."""
    after = through(before, tmp_path / "parcel")
    assert isinstance(after, Tensor)
    assert torch.equal(after, before)
    assert after.stride() == before.stride()


@pytest.mark.parametrize("mapped", [True, False])
def test_what_arrives_is_its_own(way: str, tmp_path: Path, mapped: bool) -> None:
    before = torch.zeros(1000)
    parcel = Parcel.of(before, tmp_path / "parcel")
    one, other = parcel.opened(mapped=mapped), parcel.opened(mapped=mapped)
    one.add_(1)
    before.add_(2)
    assert float(one.sum()) == 1000
    assert float(other.sum()) == 0
    assert float(parcel.opened().sum()) == 0


def test_parts_of_things_and_gradients(way: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    thing = Thing("a", torch.randn(4, 5), {"half": torch.randn(7), "weight": weight})
    after = through(thing, tmp_path / "parcel")
    assert isinstance(after, Thing)
    assert after.name == "a"
    assert torch.equal(after.tensor, thing.tensor)
    assert torch.equal(after.more["half"], thing.more["half"])
    assert isinstance(after.more["weight"], torch.nn.Parameter)
    assert after.more["weight"].requires_grad


def test_only_what_a_view_shows_travels(tmp_path: Path) -> None:
    parcel = Parcel.of(torch.zeros(10**6)[:10], tmp_path / "parcel")
    assert sum(map(len, parcel.parts)) < 1000
    assert parcel.file is None


@pytest.mark.parametrize(
    "much", [torch.zeros(2**20, dtype=torch.bfloat16), torch.zeros(600, 600)[:, :599], b"a" * 2**21]
)
def test_much_that_is_no_plain_tensor_is_in_a_file_too(tmp_path: Path, much: Tensor | bytes) -> None:
    parcel = Parcel.of(much, tmp_path / "parcel")
    assert parcel.file is not None
    assert not parcel.parts
    found = parcel.opened()
    assert found == much if isinstance(much, bytes) else torch.equal(found, much)


@pytest.mark.parametrize("mapped", [True, False])
def test_tensors_are_aligned(way: str, tmp_path: Path, mapped: bool) -> None:
    """Products round by addresses."""
    parcel = Parcel.of([torch.arange(n) for n in (1, 3, 70, 5)], tmp_path / "parcel")
    for _ in range(3):
        found = parcel.opened(mapped=mapped)
        assert [tensor.tolist() for tensor in found] == [list(range(n)) for n in (1, 3, 70, 5)]
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found)


def test_a_negative_view(way: str, tmp_path: Path) -> None:
    before = torch._neg_view(torch.randn(5))
    after = through(before, tmp_path / "parcel")
    assert isinstance(after, Tensor)
    assert torch.equal(after, before)


def test_a_full_disk_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Full(bytes):
        def __new__(cls, *_: object) -> "Full":
            raise OSError("no space left on device")

    monkeypatch.setattr(parcels, "bytes", Full, raising=False)
    with pytest.raises(OSError, match="no space"):
        Parcel.of(torch.zeros(2**20), tmp_path / "parcel")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system that does not part with a file in use")
@pytest.mark.parametrize(("room", "folder"), [(2**40, "memory"), (0, "disk")])
def test_files_lie_in_memory_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int, folder: str
) -> None:
    monkeypatch.setattr(parcels, "room_in_memory", lambda place: room)
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    much = torch.arange(2.0**20)
    parcel = Parcel.of(much, tmp_path / "memory" / "parcel", tmp_path / "disk" / "parcel")
    assert parcel.file == tmp_path / folder / "parcel"
    assert torch.equal(parcel.opened(), much)


def test_memory_that_is_full_after_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parcels, "room_in_memory", lambda place: 2**40)
    parcel = Parcel.of(torch.ones(2**20), tmp_path / "gone" / "parcel", tmp_path / "parcel")
    assert parcel.file == tmp_path / "parcel"


def test_a_file_that_is_mapped_stays_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parcels, "LARGE", 1)
    parcel = Parcel.of(torch.ones(5000), tmp_path / "parcel")
    found = parcel.opened(mapped=True)
    parcel.discard()
    parcel.discard()
    assert not list(tmp_path.iterdir())
    assert float(found.sum()) == 5000


@given(st.lists(st.lists(st.floats(allow_nan=False), max_size=20), max_size=6), st.booleans())
def test_any_tensors(numbers: list[list[float]], much: bool) -> None:
    before = [torch.tensor(row, dtype=torch.float64) for row in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parcels, "LARGE", 1 if much else 2**20)
        with tempfile.TemporaryDirectory() as folder:
            after = through(before, Path(folder) / "parcel")
    assert isinstance(after, list)
    assert [row.tolist() for row in after] == numbers
