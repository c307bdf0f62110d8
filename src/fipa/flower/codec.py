r"""Tensors as Flower arrays: raw little-endian numbers, whose size is known before they are looked at.

`bfloat16` halves the bytes of a matrix, `int8` quarters them: columns are stored as integers between -127 and 127, with
one scale for each 1024 entries of a column, their largest magnitude divided by 127. One scale for a whole column of a
million entries would not do: a single large one would round the others to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fipa.errors import FipaError, instead_of

Precision = Literal["float32", "bfloat16", "int8"]
ROWS = "fipa.rows"  # how numbers follow each other
SCALE = ".scale"  # after the name of an array: the scales of its columns, block by block
BLOCK = 1024  # entries of a column that share a scale
WORDS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "bfloat16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
}
OTHERS: dict[str, np.dtype[Any]] = {  # what a model may hold besides: never part of an answer
    "int64": np.dtype("<i8"), "int32": np.dtype("<i4"), "uint8": np.dtype("u1"), "bool": np.dtype("?"),
    "float16": np.dtype("<f2"),
}  # fmt: skip


class PayloadError(FipaError):
    """A message is not what was asked for."""


def check_precision(precision: str) -> None:
    """Refuse a precision that is not known."""
    if precision not in get_args(Precision):
        raise FipaError(f"there is no precision {precision!r}: {instead_of(precision, get_args(Precision))}")


def pack(tensors: Mapping[str, Tensor], precision: Precision = "float32") -> ArrayRecord:
    """Tensors by name; matrices in the given precision, everything else as it is."""
    arrays: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if precision == "int8" and tensor.dim() == 2:
            scale = torch.stack([block.abs().amax(dim=0) for block in tensor.split(BLOCK)]) / 127
            whole = _spread(scale, len(tensor)).clamp(min=torch.finfo(scale.dtype).tiny)
            arrays[name] = _raw((tensor / whole).round().to(torch.int8))
            arrays[name + SCALE] = _raw(scale)
        elif precision == "bfloat16" and tensor.dim() == 2:
            arrays[name] = _raw(tensor.to(torch.bfloat16))
        else:
            arrays[name] = _raw(tensor)
    return ArrayRecord(arrays)


def unpack(record: ArrayRecord, shapes: Mapping[str, tuple[int | None, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of exactly these names and shapes (None: any length), as `dtype`. Refuses everything else."""
    extra = [name for name in record if name.removesuffix(SCALE) not in shapes]
    if extra:
        raise PayloadError(f"has an array {extra[0]!r} that nobody asked for")
    tensors = {}
    for name, shape in shapes.items():
        if name not in record:
            raise PayloadError(f"has no array {name!r}")
        tensor = _tensor(name, record[name], shape)
        if tensor.dtype == torch.int8:
            if name + SCALE not in record:
                raise PayloadError(f"has integers in {name!r}, but no scales for them")
            if tensor.dim() != 2:
                raise PayloadError(f"has integers in {name!r}, which is no matrix")
            scale = _tensor(name + SCALE, record[name + SCALE], (math.ceil(len(tensor) / BLOCK), tensor.shape[1]))
            tensors[name] = tensor.to(dtype).mul_(_spread(scale.to(dtype), len(tensor)))
        else:
            tensors[name] = tensor.to(dtype)
    return tensors


def tensors_in(record: ArrayRecord) -> dict[str, Tensor]:
    """All tensors that `pack` put into a record of our own, as they were."""
    return {name: _tensor(name, array, tuple(array.shape), WORDS | OTHERS) for name, array in record.items()}


def rougher(wanted: Precision, roughest: str) -> Precision:
    """The precision that is wanted, or the roughest one that is allowed if that is finer."""
    order = get_args(Precision)
    return order[min(order.index(wanted), order.index(roughest))]


def exactly(record: ArrayRecord, kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """The tensors of exactly these names, shapes and kinds, as they were sent. Refuses everything else."""
    odd = sorted(set(record) ^ set(kinds))
    if odd:
        raise PayloadError(f"has {'an' if odd[0] in record else 'no'} array {odd[0]!r}")
    tensors = {name: _tensor(name, record[name], shape, WORDS | OTHERS) for name, (shape, _) in kinds.items()}
    for name, (_, kind) in kinds.items():
        if tensors[name].dtype != kind:
            raise PayloadError(f"has {name!r} in {tensors[name].dtype}, expected {kind}")
    return tensors


def nbytes(*records: ArrayRecord) -> int:
    """Bytes of all arrays as they travel."""
    return sum(len(array.data) for record in records for array in record.values())


def _spread(scale: Tensor, rows: int) -> Tensor:
    """A scale for every row of its block."""
    return scale.repeat_interleave(BLOCK, dim=0)[:rows]


def _raw(tensor: Tensor) -> Array:
    name = str(tensor.dtype).removeprefix("torch.")
    kinds = WORDS | OTHERS
    if name not in kinds:
        raise FipaError(f"tensors of {tensor.dtype} cannot be sent: convert the model to float32 or float64")
    words = tensor.detach().cpu().contiguous()
    words = words.view(torch.int16) if tensor.dtype == torch.bfloat16 else words
    data = words.numpy().astype(kinds[name], copy=False).tobytes()
    return Array(dtype=name, shape=tuple(tensor.shape), stype=ROWS, data=data)


def _tensor(
    name: str, array: Array, shape: tuple[int | None, ...], words: Mapping[str, np.dtype[Any]] = WORDS
) -> Tensor:
    if array.stype != ROWS or array.dtype not in words:
        raise PayloadError(f"has {name!r} in the format {array.stype!r} of {array.dtype!r}, expected {ROWS!r}")
    fits = len(array.shape) == len(shape) and all(
        have >= 0 and want in (None, have) for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        raise PayloadError(f"has {name!r} of shape {tuple(array.shape)}, expected {_shown(shape)}")
    word = words[array.dtype]
    if len(array.data) != math.prod(array.shape) * word.itemsize:
        raise PayloadError(f"has {len(array.data)} bytes for {name!r} of shape {tuple(array.shape)} and {array.dtype}")
    kind: torch.dtype = getattr(torch, array.dtype)
    numbers = torch.empty(array.shape, dtype=kind)  # memory of torch's own: what follows depends on its alignment
    filled = numbers.view(torch.int16) if kind is torch.bfloat16 else numbers
    filled.numpy().reshape(-1)[:] = np.frombuffer(array.data, word)
    return numbers


def _shown(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if side is None else str(side) for side in shape) + ")"
