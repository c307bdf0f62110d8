"""What goes from one process of this machine to another: much of it lies in a file.

Torch pickles a tensor by way of a zip archive, with a checksum and several copies. Here the numbers of a tensor are
written once, and read or mapped once.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fipa.machine import room_in_memory

LARGE = 2**20  # bytes that are worth a file
ROOM = 2 * 2**30  # bytes that must be left in memory for a file to lie there
_PLACES = 64  # parts of a file begin at multiples of that many bytes, as memory of tensors does
_PLAIN = (
    torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Parcel:
    """Something packed: first all but the numbers of its tensors, then those of each.

    Attributes
    ----------
    parts
        These, if they are few bytes.
    file, sizes
        The name of the file that has them otherwise, and their bytes.
    """

    parts: tuple[bytes, ...] = ()
    file: Path | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: Any, *files: Path) -> Parcel:
        """Pack something; if that is much, into one of these files: the last is on a disk, others are in memory."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(what)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        sizes = tuple(part.nbytes for part in parts)
        if sum(sizes) < LARGE:
            return cls(tuple(map(bytes, parts)))
        *quick, last = files
        for file in quick:
            if room_in_memory(file.parent) > sum(sizes) + ROOM:
                with suppress(OSError):  # others may have been faster
                    return cls._written(parts, sizes, file)
        return cls._written(parts, sizes, last)

    @classmethod
    def _written(cls, parts: Sequence[memoryview], sizes: tuple[int, ...], file: Path) -> Parcel:
        try:
            with file.open("wb") as into:
                for part in parts:
                    into.write(part)
                    into.write(bytes(-part.nbytes % _PLACES))
        except OSError:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            raise
        return cls(file=file, sizes=sizes)

    def opened(self, *, mapped: bool = False) -> Any:
        """What was packed, to be changed at will.

        If it is `mapped`, nothing is read before it is used, but the whole file lives as long as any of its tensors.
        """
        head, *others = self._mapped() if mapped and self.file is not None else self._read()
        return pickle.loads(head, buffers=others)

    def discard(self) -> None:
        """Remove the file. Who has it mapped keeps it, but some systems do not part with such a file."""
        if self.file is not None:
            try:
                self.file.unlink(missing_ok=True)
            except PermissionError:
                return  # it goes with its folder

    def _read(self) -> Sequence[Any]:
        """Each part in memory of its own, at an address that 64 divides: products round by addresses."""
        sizes = self.sizes if self.file is not None else tuple(map(len, self.parts))
        found: list[Any] = [torch.empty(size, dtype=torch.uint8).numpy() for size in sizes]
        if self.file is None:
            for memory, part in zip(found, self.parts, strict=True):
                memoryview(memory)[:] = part
            return found
        with self.file.open("rb") as file:
            for memory, place in zip(found, self._places(), strict=True):
                file.seek(place)
                file.readinto(memory)
        return found

    def _mapped(self) -> Sequence[Any]:
        assert self.file is not None
        with self.file.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return [whole[place : place + size] for place, size in zip(self._places(), self.sizes, strict=True)]

    def _places(self) -> Iterator[int]:
        place = 0
        for size in self.sizes:
            yield place
            place += size + -size % _PLACES


class _Pickler(pickle.Pickler):
    """Tensors without gaps in memory as numpy's arrays, whose numbers are not copied; others as torch has them."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.dtype not in _PLAIN:
            return NotImplemented
        if value.requires_grad or value.is_neg() or value.layout != torch.strided or not _dense(value):
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def _dense(tensor: Tensor) -> bool:
    """Whether its rows, or the columns of a matrix, lie one after the other, with the strides that follow from that."""
    if tensor.is_contiguous():  # which overlooks strides of axes of length one
        return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return tensor.dim() == 2 and tensor.T.is_contiguous()
