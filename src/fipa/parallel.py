"""Work on large matrices, most of it by rows, shared out to the cores that torch leaves alone.

That is for a server with one thread while its worker processes wait for it. Where torch itself has all cores, as in an
app of Flower, its operations use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fipa.machine import cores

Item = TypeVar("Item")
Result = TypeVar("Result")
PART = 1024  # rows at a time, few enough for a cache
SHARE = 16  # parts that are worth a thread


def by_rows(count: int, work: Callable[[Iterator[slice]], Result], part: int | None = None) -> list[Result]:
    """What `work` makes of `count` rows: a result for each share of them, in order; it is given parts of its share.

    Shares are the same on any number of cores, so that sums of their results are, too.
    """
    size = part or PART
    parts = -(-count // size)
    shares = [_parts(first, min(first + SHARE, parts), size, count) for first in range(0, max(parts, 1), SHARE)]
    return at_once(work, shares)


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `work` makes of each item, in order."""
    threads = min(max(1, cores() // torch.get_num_threads()), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def alike(item: Item) -> Result:  # these modes belong to a thread
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return work(item)

    # a new thread asks torch how many it may use itself, or its first products would take all cores
    with ThreadPoolExecutor(threads, "fipa-rows", torch.get_num_threads) as pool:
        return list(pool.map(alike, items))


def inside(columns: Tensor, vectors: Tensor) -> Tensor:
    r"""$Q^\top v$ of columns (p x k) and a vector, or one such row for each row of several (s x p)."""

    def product(parts: Iterator[slice]) -> Tensor:  # from the left: several times faster in BLAS for a few vectors
        total = columns.new_zeros(*vectors.shape[:-1], columns.shape[1])
        for rows in parts:
            total += vectors[..., rows] @ columns[rows]
        return total

    found = by_rows(len(columns), product)
    return sum(found[1:], found[0])


def spanned(columns: Tensor, coordinates: Tensor) -> Tensor:
    r"""$Q z$ of columns (p x k) and the coordinates of a vector, or one such row for each row of several (s x k)."""
    found = columns.new_empty(*coordinates.shape[:-1], len(columns))

    def product(parts: Iterator[slice]) -> None:
        for rows in parts:
            found[..., rows] = coordinates @ columns[rows].T

    by_rows(len(columns), product)
    return found


def _parts(first: int, last: int, size: int, count: int) -> Iterator[slice]:
    for place in range(first, last):
        yield slice(place * size, min((place + 1) * size, count))
