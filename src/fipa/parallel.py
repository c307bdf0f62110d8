"""Work on the many rows of a matrix, shared out to the cores: for a server, while its workers wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fipa.machine import cores

Result = TypeVar("Result")
PART = 1024  # rows at a time, few enough for a cache
SHARE = 16  # parts that are worth a thread


def by_rows(count: int, work: Callable[[Iterator[slice]], Result]) -> list[Result]:
    """What `work` makes of `count` rows: a result for each share of them, in order; it is given parts of its share.

    Shares are the same on any number of cores, so that sums of their results are, too.
    """
    parts = -(-count // PART)
    shares = [_parts(first, min(first + SHARE, parts), count) for first in range(0, max(parts, 1), SHARE)]
    threads = min(cores(), len(shares))
    if threads == 1:
        return [work(share) for share in shares]
    with ThreadPoolExecutor(threads, "fipa-rows") as pool:
        return list(pool.map(work, shares))


def _parts(first: int, last: int, count: int) -> Iterator[slice]:
    for place in range(first, last):
        yield slice(place * PART, min((place + 1) * PART, count))
