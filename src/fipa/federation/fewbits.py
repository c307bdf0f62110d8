"""Columns of a shared basis in few bits per entry, for their way to the clients.

How many bits they are in shows in their length. Who packs them looks for the steps, and the last bits of that may
differ between processors; what is packed is whole numbers, the same for all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEVELS = 7  # the largest code: 4 bits with a sign
CLIPS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)  # shares of the largest entry that may become the largest code
BLOCK = 32  # entries that share a step where each is -3, -1, 1 or 3 of it, in 2 bits
STEPS = (0.3, 0.36, 0.43, 0.5, 0.6, 0.72)  # that are tried, as shares of the usual entry of a block
OCTAVES, NOTHING = 8, 255  # by how much such steps may differ, in powers of 2; and the code of no step at all


def pack(columns: Tensor, bits: int) -> Tensor:
    """Columns (p x n) in 4 or 2 bits per entry (uint8); in 4 where there is nothing to save."""
    return _four(columns) if bits == 2 and len(lengths(len(columns))) > 1 else _two(_codes(columns))


def _codes(columns: Tensor) -> Tensor:
    """Each column in multiples of a step of its own (int8): large entries are cut off where that is nearer."""
    found = torch.zeros(columns.shape[::-1], dtype=torch.int8)
    for column, code in zip(columns.unbind(1), found, strict=True):  # one by one they stay in the cache
        column, least = column.contiguous(), math.inf
        largest = float(column.abs().max())
        for clip in CLIPS:
            step = clip * largest / LEVELS
            tried = (column / step).round_().clamp_(-LEVELS, LEVELS)
            miss = float((tried * step).sub_(column).norm())
            if miss < least:
                least = miss
                code.copy_(tried)
    return found.T.contiguous()


def _two(codes: Tensor) -> Tensor:
    """Two codes in a byte: those of rows 2 i and 2 i + 1."""
    even = torch.nn.functional.pad(codes, (0, 0, 0, len(codes) % 2)) + 8
    return (even[::2] + 16 * even[1::2].to(torch.uint8)).to(torch.uint8)


def _four(columns: Tensor) -> Tensor:
    """Columns in 2 bits per entry, four entries in a byte, and then a byte for the step of each block of entries.

    Steps are (4 + m) 2^n of a unit, with m up to 3 and n up to `OCTAVES`. Layers of a network have gradients of
    different sizes: with one step for all, more is lost.
    """
    found = []
    there = torch.nn.functional.pad(columns.new_ones(len(columns)), (0, -len(columns) % BLOCK)).reshape(-1, BLOCK)
    for column in columns.unbind(1):
        blocks = torch.nn.functional.pad(column, (0, -len(column) % BLOCK)).reshape(-1, BLOCK)
        usual = torch.linalg.vector_norm(blocks, dim=1) / there.sum(1).sqrt()
        unit = float(usual.max()) * STEPS[-1] / (7 * 2**OCTAVES)
        best, levels, steps = torch.full_like(usual, math.inf), torch.zeros_like(blocks), torch.zeros_like(usual)
        for share in STEPS:
            octave = (share * usual / (4 * unit)).clamp(min=1).log2().floor().clamp(max=OCTAVES)
            places = (share * usual / unit / 2**octave).round().clamp(4, 7) - 4
            step = unit * (4 + places) * 2**octave
            tried = (blocks / (2 * step[:, None])).floor_().clamp_(-2, 1)  # of -3, -1, 1, 3
            miss = torch.linalg.vector_norm(((2 * tried + 1) * step[:, None] - blocks) * there, dim=1)
            better = miss < best
            best = torch.where(better, miss, best)
            levels = torch.where(better[:, None], tried + 2, levels)
            steps = torch.where(better, 4 * octave + places, steps)
        steps = torch.where(usual > 0, steps, NOTHING)
        four = levels.reshape(-1)[: 4 * -(-len(column) // 4)].to(torch.uint8).reshape(-1, 4)
        found.append(
            torch.cat([four[:, 0] + 4 * four[:, 1] + 16 * four[:, 2] + 64 * four[:, 3], steps.to(torch.uint8)])
        )
    return torch.stack(found, dim=1)


def entries(packed: Tensor, parameters: int) -> Tensor:
    """What was packed, as whole numbers (p x n): multiples of a step (int8), or of the steps of blocks (int16)."""
    if len(packed) == lengths(parameters)[0]:
        both = torch.stack([packed % 16, packed // 16], dim=1).reshape(-1, packed.shape[1])
        return both[:parameters].to(torch.int8) - 8
    packed, steps = packed[: -(-parameters // 4)], packed[-(-parameters // 4) :].to(torch.int16)
    levels = torch.stack([packed // 4**place % 4 for place in range(4)], dim=1).reshape(-1, packed.shape[1])
    sizes = torch.where(steps == NOTHING, 0, (4 + steps % 4) << (steps // 4).clamp(max=OCTAVES))
    wide = sizes.repeat_interleave(BLOCK, dim=0)[:parameters]
    return (2 * levels[:parameters].to(torch.int16) - 3) * wide


def lengths(parameters: int) -> tuple[int, ...]:
    """Bytes that a column takes in 4 bits per entry, and in 2 with its steps; of very few parameters, in 4 only."""
    two, four = -(-parameters // 2), -(-parameters // 4) + -(-parameters // BLOCK)
    return (two, four) if four < two else (two,)
