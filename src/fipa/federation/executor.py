"""Where clients compute: in this process, or in several worker processes. The numbers are the same to the last bit.

The unit of work is a group of clients that are trained side by side. Groups are cut in the same way whatever the number
of workers, every process uses the same number of threads, and answers are put back in order.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fipa.federation.focus import focus
from fipa.federation.parameters import load_theta
from fipa.federation.parcels import Parcel
from fipa.federation.problem import Problem
from fipa.federation.site import Site
from fipa.machine import folder_in_memory, keep_memory
from fipa.threads import threads as threads_of_torch

Rows = Callable[[], tuple[list[Any], float]]  # waits for clients; also tells how many seconds they took
ProblemFactory = Callable[[int], Problem]  # from a seed; must be picklable when there are several workers


@dataclass(frozen=True)
class Scope:
    """What the clients of an arm work on.

    Parameters
    ----------
    seed
        The seed of the problem.
    centralised
        One client holds all data.
    start
        File with the parameters to start from (see `fipa.federation.parameters`); the problem's own without.
    params
        Names or patterns of the parameters that are trained, sketched and sent; the rest stay as they are.
    trace
        Whether gradients of clients that are trained alone are traced.
    """

    seed: int
    centralised: bool = False
    start: str | None = None
    params: tuple[str, ...] | None = None
    trace: bool = False


class Executor:
    """Runs the clients of a round in `workers` processes.

    Parameters
    ----------
    factory
        Makes the problem of a seed, the same one in every process.
    workers
        1 computes in this process.
    threads
        How many torch has in each process. More threads, or fewer, may change the last bits.
    """

    def __init__(self, factory: ProblemFactory, workers: int = 1, threads: int = 1) -> None:
        self._factory = factory
        self._pool: ProcessPoolExecutor | None = None
        self._workers = workers
        self._threads = threads
        self._entered = ExitStack()
        self._folders: list[Path] = []  # of what is too much for a pipe
        self._sent = itertools.count()

    def __enter__(self) -> Self:
        self._entered.enter_context(threads_of_torch(self._threads))
        if self._workers > 1:
            self._folders = [Path(self._entered.enter_context(folder)) for folder in _folders()]
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._factory, self._threads, self._folders),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._entered.close()

    def site(self, scope: Scope) -> Site:
        """The clients as this process sees them."""
        return _site(self._factory, scope)

    @property
    def pids(self) -> list[int]:
        """This process and its workers."""
        workers = multiprocessing.active_children() if self._pool is not None else []
        return [os.getpid(), *(worker.pid for worker in workers if worker.pid is not None)]

    def prepare(self, scope: Scope, groups: Sequence[tuple[int, ...]], theta: Tensor, bends: bool = False) -> None:
        """Start workers and build their sites before a clock runs."""
        for _ in range(1 if self._pool is None else 2 * self._workers):  # often enough that each worker gets some
            self.start("prepare", scope, groups, theta, bends)()

    def start(
        self,
        method: str,
        scope: Scope,
        groups: Sequence[tuple[int, ...]],
        *what: Any,
        here: bool = False,
        keep: Callable[[Any], Any] = lambda row: row,
    ) -> Rows:
        """Call a method of the clients' site for each group; a row comes back for each client, in their order.

        Workers begin at once, this process when it is asked for the rows; `here` is for work too small to send away.
        Rows are kept as `keep` returns them, one by one as they come.
        """
        if here or self._pool is None:
            return lambda: _timed(self.site(scope), method, groups, what, keep)
        begun = time.perf_counter()
        parcel = Parcel.of(what, *self._places())
        ended = [begun]
        futures = deque(self._pool.submit(_in_worker, method, scope, group, parcel, self._places()) for group in groups)
        for future in futures:
            future.add_done_callback(lambda _: ended.append(time.perf_counter()))

        def rows() -> tuple[list[Any], float]:
            found: list[Any] = []
            try:
                while futures:  # each holds what came back as long as it is there
                    found += [keep(row) for row in _read(futures.popleft().result())]
            finally:
                for future in futures:  # after an error: nobody wants the others any more
                    if not future.cancel():
                        future.add_done_callback(_discarded)
                parcel.discard()
            return found, max(ended) - begun

        return rows

    def _places(self) -> tuple[Path, ...]:
        """Where a parcel may lie, the best first."""
        name = str(next(self._sent))
        return tuple(folder / name for folder in self._folders)


def _folders() -> Iterator[TemporaryDirectory[str]]:
    """For parcels: in memory if the system allows it, and on a disk."""
    if (quick := folder_in_memory()) is not None:
        with suppress(OSError):
            yield TemporaryDirectory(prefix="fipa-", dir=quick, ignore_cleanup_errors=True)
    yield TemporaryDirectory(prefix="fipa-", ignore_cleanup_errors=True)


def _read(answer: Parcel) -> Any:
    """What is in it; its file is gone."""
    try:
        return answer.opened()
    finally:
        answer.discard()


def _discarded(future: Future[Parcel]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().discard()


def _timed(
    site: Site, method: str, groups: Sequence[tuple[int, ...]], what: Sequence[Any], keep: Callable[[Any], Any]
) -> tuple[list[Any], float]:
    begun = time.perf_counter()
    rows = [keep(row) for group in groups for row in getattr(site, method)(group, *what)]
    return rows, time.perf_counter() - begun


_sites: dict[tuple[ProblemFactory, Scope], Site] = {}
_factory: ProblemFactory | None = None


def _site(factory: ProblemFactory, scope: Scope) -> Site:
    """The last site used, or a new one: a problem may be large, so only one is kept."""
    key = (factory, scope)
    if key not in _sites:
        _sites.clear()
        problem = factory(scope.seed)
        initial = problem.initial if scope.start is None else load_theta(scope.start)
        if scope.params is not None:
            problem.load(initial)
            problem = focus(problem, scope.params)
            initial = problem.initial
        _sites[key] = Site(problem, scope.seed, centralised=scope.centralised, initial=initial, trace=scope.trace)
    return _sites[key]


def _start_worker(factory: ProblemFactory, threads: int, folders: Sequence[Path]) -> None:
    global _factory
    _factory = factory
    threading.Thread(target=_end_with_parent, args=(folders,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    torch.set_num_threads(threads)
    keep_memory()


def _end_with_parent(folders: Sequence[Path]) -> None:
    """A killed parent can neither end its workers nor remove its files."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _in_worker(name: str, scope: Scope, group: tuple[int, ...], parcel: Parcel, places: Sequence[Path]) -> Parcel:
    assert _factory is not None
    site = _site(_factory, scope)
    return Parcel.of(getattr(site, name)(group, *_opened(parcel)), *places)


@lru_cache(1)
def _opened(parcel: Parcel) -> Any:
    """The latest is kept: a worker has several groups of clients, which must not change what they are given."""
    return parcel.opened(mapped=True)
