"""What goes from one process of this machine to another: much of it lies in a file that the other one maps.

Torch pickles a tensor by way of a zip archive, with a checksum and several copies. Here the numbers of a tensor are
written once, and who opens the parcel reads them where they are. Its tensors may be written to: the file stays as it
is.
"""

from __future__ import annotations

import io
import mmap
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LARGE = 2**20  # bytes that are worth a file
_PLACES = 64  # files have their tensors at multiples of that many bytes: where memory is aligned
_PLAIN = (
    torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Parcel:
    """Something packed.

    Attributes
    ----------
    head
        All but the numbers of tensors.
    parts, file, sizes
        These numbers, or the name of the file that has them and their bytes one after the other.
    """

    head: bytes
    parts: tuple[bytes, ...] = ()
    file: Path | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: Any, file: Path) -> Parcel:
        """Pack something; the file is made if that is much."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(what)
        raw = [buffer.raw() for buffer in buffers]
        sizes = tuple(part.nbytes for part in raw)
        if sum(sizes) < LARGE:
            return cls(stream.getvalue(), tuple(map(bytes, raw)))
        with file.open("wb") as into:
            for part in raw:
                into.write(part)
                into.write(bytes(-part.nbytes % _PLACES))
        return cls(stream.getvalue(), file=file, sizes=sizes)

    def opened(self) -> Any:
        """What was packed."""
        if self.file is None:
            return pickle.loads(self.head, buffers=map(bytearray, self.parts))
        with self.file.open("rb") as file:
            everything = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        parts, place = [], 0
        for size in self.sizes:
            parts.append(everything[place : place + size])
            place += size + -size % _PLACES
        return pickle.loads(self.head, buffers=parts)

    def discard(self) -> None:
        """Remove the file, which whoever has it open keeps; some systems do that only when nobody has."""
        if self.file is not None:
            try:
                self.file.unlink(missing_ok=True)
            except PermissionError:
                return  # it goes with its folder


class _Pickler(pickle.Pickler):
    """Tensors without gaps in memory as numpy's arrays, whose numbers are not copied; others as torch has them."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.dtype not in _PLAIN or value.requires_grad:
            return NotImplemented
        if value.layout != torch.strided or not (value.is_contiguous() or _turned(value)):
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def _turned(tensor: Tensor) -> bool:
    """Whether it is a matrix with its columns one after the other in memory."""
    return tensor.dim() == 2 and tensor.T.is_contiguous()
