"""Tensors in files: what a round's clients sent beyond the memory that a server may take for it.

A spilled tensor is a tensor like any other, whose numbers the system reads from a file when they are used. The file has
no name any more, and is gone with the last reference to it, also if the process is killed. It is made where Python puts
temporary files: set TMPDIR to a folder on a disk where that is memory.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from fipa.errors import FipaError

MEMORY_LIMIT = 4 * 2**30  # bytes; a constant: the way to solve, and with it the last bits, are the same anywhere
SMALLEST = 2**16  # bytes of a tensor that is worth a file
_DROP = 4  # MADV_DONTNEED


class OfTensors(Protocol):
    """Something that is made of tensors."""

    def map(self, change: Callable[[Tensor], Tensor], /) -> Self:
        """The same of changed tensors."""


Whole = TypeVar("Whole", bound=OfTensors)
T = TypeVar("T")


def spilled(tensor: Tensor) -> Tensor:
    """The same numbers in a file; a small tensor, or one that is in a file or not on the CPU, as it is."""
    if tensor.nbytes < SMALLEST or in_file(tensor) or tensor.device.type != "cpu":
        return tensor
    _give_back()
    handle, path = tempfile.mkstemp(prefix="fipa-")
    try:
        with os.fdopen(handle, "wb") as file:
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
        return torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    finally:
        _unlink(path, later=True)


def _unlink(path: str, later: bool = False) -> None:
    """Where a system does not part with a file in use, at the end."""
    try:
        os.unlink(path)
    except PermissionError:
        if later:
            atexit.register(_unlink, path)


def in_file(tensor: Tensor) -> bool:
    """Whether the numbers are in a file."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def release(*tensors: Tensor) -> None:
    """Give back the memory that numbers in files take at present; they are read again when they are used again."""
    for tensor in tensors:
        if in_file(tensor):
            storage = tensor.untyped_storage()
            with suppress(
                OSError, AttributeError, TypeError
            ):  # another C library: then the system does it, when it must
                ctypes.CDLL(None).madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), _DROP)


def _give_back() -> None:
    """What the last one left to the C library, whose holes small things would soon make too small for the next one."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Shelf:
    """Keeps what comes in memory, up to a number of bytes, and what comes after that in files."""

    def __init__(self, memory_limit: int = MEMORY_LIMIT) -> None:
        if memory_limit < 0:
            raise FipaError(f"memory_limit={memory_limit}: bytes must not be negative")
        self._left = memory_limit

    def keep(self, whole: Whole) -> Whole:
        """The same, with its tensors in memory or in files; a tensor that it has twice is kept once."""
        kept: dict[int, Tensor] = {}

        def put(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                kept[id(tensor)] = self._put(tensor)
            return kept[id(tensor)]

        return whole.map(put)

    def _put(self, tensor: Tensor) -> Tensor:
        if in_file(tensor):
            return tensor
        if tensor.nbytes > self._left:
            return spilled(tensor)
        self._left -= tensor.nbytes
        return tensor


class Passing(tuple[T, ...]):
    """Things made of tensors, of which memory need hold one at a time: who goes through them leaves none behind.

    A tuple, since `torch.stack` and the like take nothing else: a rule that wants all of them at once can have them.
    """

    def __iter__(self) -> Iterator[T]:
        for thing in super().__iter__():
            yield thing
            release(*_tensors(thing))

    def __reversed__(self) -> Iterator[T]:
        """The same from the last to the first: every other time, it finds what the system still has of the files."""
        for thing in self[::-1]:
            yield thing
            release(*_tensors(thing))


def _tensors(thing: Any) -> Sequence[Tensor]:
    if isinstance(thing, Tensor):
        return (thing,)
    found: Mapping[str, Tensor] = {} if thing is None else thing.tensors()
    return tuple(found.values())
