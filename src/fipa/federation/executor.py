"""Where clients compute: in this process, or in several worker processes. The numbers are the same to the last bit.

The unit of work is a group of clients that are trained side by side. Groups are cut in the same way whatever the number
of workers, every process uses the same number of threads, and answers are put back in order.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fipa.federation.problem import Problem
from fipa.federation.site import Order, Reply, Site

ProblemFactory = Callable[[int], Problem]  # from a seed; must be picklable when there are several workers


class Executor:
    """Runs the clients of a round in `workers` processes.

    Parameters
    ----------
    factory
        Makes the problem of a seed, the same one in every process.
    workers
        1 computes in this process.
    threads
        Of torch, per process. More threads, or fewer, may change the last bits.
    """

    def __init__(self, factory: ProblemFactory, workers: int = 1, threads: int = 1) -> None:
        self._factory = factory
        self._pool: ProcessPoolExecutor | None = None
        self._workers = workers
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        if workers > 1:
            self._pool = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(factory, threads),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._threads_before)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def site(self, seed: int, centralised: bool) -> Site:
        """The clients as this process sees them."""
        return _site(self._factory, seed, centralised)

    @property
    def pids(self) -> list[int]:
        """This process and its workers."""
        workers = multiprocessing.active_children() if self._pool is not None else []
        return [os.getpid(), *(worker.pid for worker in workers if worker.pid is not None)]

    def prepare(
        self, seed: int, centralised: bool, groups: Sequence[tuple[int, ...]], theta: Tensor, bends: bool = False
    ) -> None:
        """Start workers and build their sites before a clock runs."""
        for _ in range(1 if self._pool is None else 2 * self._workers):  # often enough that each worker gets some
            self._map("prepare", seed, centralised, groups, theta, bends)

    def work(self, seed: int, centralised: bool, groups: Sequence[tuple[int, ...]], order: Order) -> list[Reply]:
        """Training and curvature, group by group; answers in the order of the groups."""
        return [reply for part in self._map("work", seed, centralised, groups, order) for reply in part]

    def losses(
        self, seed: int, centralised: bool, groups: Sequence[tuple[int, ...]], theta: Tensor, round_number: int = 0
    ) -> list[float]:
        """Clients' losses at a model on a round's data, in this process: too cheap to send away."""
        site = self.site(seed, centralised)
        return [loss for group in groups for loss in site.losses(group, theta, round_number)]

    def gradients(
        self, seed: int, centralised: bool, groups: Sequence[tuple[int, ...]], theta: Tensor, round_number: int = 0
    ) -> Tensor:
        """Clients' gradients at a model (M x p) on a round's data."""
        return torch.cat(self._map("gradients", seed, centralised, groups, theta, round_number))

    def bends(
        self,
        seed: int,
        centralised: bool,
        groups: Sequence[tuple[int, ...]],
        theta: Tensor,
        direction: Tensor,
        round_number: int = 0,
    ) -> Tensor:
        """How clients' residuals bend along a step from a model (M x p)."""
        return torch.cat(self._map("bends", seed, centralised, groups, theta, direction, round_number))

    def _map(self, name: str, seed: int, centralised: bool, groups: Sequence[tuple[int, ...]], *what: Any) -> list[Any]:
        if self._pool is None:
            site = self.site(seed, centralised)
            return [getattr(site, name)(group, *what) for group in groups]
        payload = pickle.dumps(what)
        futures = [self._pool.submit(_in_worker, name, seed, centralised, group, payload) for group in groups]
        return [pickle.loads(future.result()) for future in futures]


_sites: dict[tuple[ProblemFactory, int, bool], Site] = {}
_factory: ProblemFactory | None = None


def _site(factory: ProblemFactory, seed: int, centralised: bool) -> Site:
    """The last site used, or a new one: a problem may be large, so only one is kept."""
    key = (factory, seed, centralised)
    if key not in _sites:
        _sites.clear()
        _sites[key] = Site(factory(seed), seed, centralised=centralised)
    return _sites[key]


def _start_worker(factory: ProblemFactory, threads: int) -> None:
    global _factory
    _factory = factory
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """A killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_worker(name: str, seed: int, centralised: bool, group: tuple[int, ...], payload: bytes) -> bytes:
    """Tensors travel as plain bytes: torch's shared memory would need a file descriptor for each."""
    assert _factory is not None
    site = _site(_factory, seed, centralised)
    return pickle.dumps(getattr(site, name)(group, *pickle.loads(payload)))
