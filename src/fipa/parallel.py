"""Work on the many rows of a matrix, shared out to the cores that torch leaves alone.

That is for a server with one thread while its worker processes wait for it. Where torch itself has all cores, as in an
app of Flower, its operations use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fipa.machine import cores

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
    threads = min(max(1, cores() // torch.get_num_threads()), len(shares))
    if threads == 1:
        return [work(share) for share in shares]
    # a new thread asks torch how many it may use itself, or its first products would take all cores
    with ThreadPoolExecutor(threads, "fipa-rows", torch.get_num_threads) as pool:
        return list(pool.map(work, shares))


def _parts(first: int, last: int, size: int, count: int) -> Iterator[slice]:
    for place in range(first, last):
        yield slice(place * size, min((place + 1) * size, count))
