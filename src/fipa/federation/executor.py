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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fipa.federation.focus import focus
from fipa.federation.messages import Order, Reply
from fipa.federation.parameters import load_theta
from fipa.federation.problem import Problem
from fipa.federation.site import Site

Replies = Callable[[], tuple[list[Reply], float]]  # waits for clients; also tells how many seconds they took
ProblemFactory = Callable[[int], Problem]  # from a seed; must be picklable when there are several workers


@dataclass(frozen=True)
class Scope:
    """What the clients of an arm work on.

    Parameters
    ----------
    seed
        Of the problem.
    centralised
        One client holds all data.
    start
        File with the parameters to start from (see `fipa.federation.parameters`); the problem's own without.
    params
        Names or patterns of the parameters that are trained, sketched and sent; the rest stay as they are.
    """

    seed: int
    centralised: bool = False
    start: str | None = None
    params: tuple[str, ...] | None = None


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
            self._map("prepare", scope, groups, theta, bends)

    def start(self, scope: Scope, groups: Sequence[tuple[int, ...]], order: Order) -> Replies:
        """Training and curvature, group by group; replies come in the order of the groups.

        Workers begin at once, this process when it is asked for replies.
        """
        begun = time.perf_counter()
        wait = self._start("work", scope, groups, order)

        def replies() -> tuple[list[Reply], float]:
            asked = time.perf_counter()
            parts, ended = wait()
            return [reply for part in parts for reply in part], ended - (begun if self._pool else asked)

        return replies

    def losses(
        self, scope: Scope, groups: Sequence[tuple[int, ...]], theta: Tensor, round_number: int = 0
    ) -> list[float]:
        """Clients' losses at a model on a round's data, in this process: too cheap to send away."""
        site = self.site(scope)
        return [loss for group in groups for loss in site.losses(group, theta, round_number)]

    def gradients(
        self, scope: Scope, groups: Sequence[tuple[int, ...]], theta: Tensor, round_number: int = 0
    ) -> Tensor:
        """Clients' gradients at a model (M x p) on a round's data."""
        return torch.cat(self._map("gradients", scope, groups, theta, round_number))

    def bends(
        self,
        scope: Scope,
        groups: Sequence[tuple[int, ...]],
        theta: Tensor,
        direction: Tensor,
        round_number: int = 0,
    ) -> Tensor:
        """How clients' residuals bend along a step from a model (M x p)."""
        return torch.cat(self._map("bends", scope, groups, theta, direction, round_number))

    def _map(self, name: str, scope: Scope, groups: Sequence[tuple[int, ...]], *what: Any) -> list[Any]:
        return self._start(name, scope, groups, *what)()[0]

    def _start(
        self, name: str, scope: Scope, groups: Sequence[tuple[int, ...]], *what: Any
    ) -> Callable[[], tuple[list[Any], float]]:
        """A function that waits for the answers; with it comes the time at which the last one was there."""
        if self._pool is None:

            def compute() -> tuple[list[Any], float]:
                site = self.site(scope)
                return [getattr(site, name)(group, *what) for group in groups], time.perf_counter()

            return compute
        payload = pickle.dumps(what)
        ended = [time.perf_counter()]
        futures = [self._pool.submit(_in_worker, name, scope, group, payload) for group in groups]
        for future in futures:
            future.add_done_callback(lambda _: ended.append(time.perf_counter()))

        def wait() -> tuple[list[Any], float]:
            answers = [pickle.loads(future.result()) for future in futures]
            return answers, max(ended)

        return wait


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
        _sites[key] = Site(problem, scope.seed, centralised=scope.centralised, initial=initial)
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


def _in_worker(name: str, scope: Scope, group: tuple[int, ...], payload: bytes) -> bytes:
    """Tensors travel as plain bytes: torch's shared memory would need a file descriptor for each."""
    assert _factory is not None
    site = _site(_factory, scope)
    return pickle.dumps(getattr(site, name)(group, *pickle.loads(payload)))
