"""Function fitting: a round, and the time to a given error, against the plain scheme of `authors`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.func import grad, vmap

from bench.authors import PlainFederation
from bench.common import Record, seconds
from fipa.aggregation.fipa import FIPA
from fipa.clients.descent import Adam
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.objective import Objective, StackedObjective
from fipa.clients.rule import LocalRule
from fipa.curvature.sketch import SketchPlan
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor, ProblemFactory
from fipa.federation.stage import Stage
from fipa.problems.fitting import sine

EIGHT = (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.85, 0.9, 1.0)
ROUNDS = 5


def fitting() -> Iterator[Record]:
    """Seconds per round at tau = 20 and rank 20, and wall time to MSE 1e-4."""
    threads = torch.get_num_threads()
    try:
        yield _round("8 clients, 901 parameters", partial(sine, waves=8, edges=EIGHT), floor=15, group=4)
        yield _round("2 clients, 2209 parameters", partial(sine, hidden=(32, 32, 32)), floor=20, group=1)
        yield from _time_to_error(seed=1)
        yield _side_by_side()
    finally:
        torch.set_num_threads(threads)


def _round(name: str, factory: ProblemFactory, floor: float, group: int) -> Record:
    plain = PlainFederation(factory, 0, steps=20, rank=20, step=0.5)
    theirs = median(plain.round)
    plain.close()
    arm = replace(_arm(Adam(steps=20), FIPA(step=0.5), None), group=group)
    ours = {}
    for workers in (1, 2):
        with Executor(factory, workers) as executor:  # one thread each
            ours[workers] = median(Steps(arm, executor).round)
    detail = {
        "seconds": ours[2],
        "one_process_seconds": ours[1],
        "authors_seconds": theirs,
        "local_steps": 20,
        "rank": 20,
    }
    return Record(f"fitting: a round against the authors' scheme, {name}", theirs / ours[2], floor, "x faster", detail)


def _time_to_error(seed: int, error: float = 1e-4, most: int = 400) -> Iterator[Record]:
    factory = partial(sine, waves=2)
    plain = PlainFederation(factory, seed, steps=20, rank=20, step=0.5)
    theirs, their_rounds = _until(plain.round, error, most)
    plain.close()
    with Executor(factory) as executor:
        same, same_rounds = _until(Steps(_arm(Adam(steps=20), FIPA(step=0.5), None), executor, seed).round, error, most)
        ours, rounds = _until(Steps(_arm(GaussNewton(), FIPA(), StepControl()), executor, seed).round, error, most)
    for method, taken, count, floor in (
        ("Gauss-Newton clients and step control", ours, rounds, 5),
        ("the authors' settings", same, same_rounds, None),
    ):
        name = f"fitting: wall time to test MSE 1e-4 on sin(2 pi x), seed {seed}, {method}"
        detail = {"seconds": taken, "rounds": count, "authors_seconds": theirs, "authors_rounds": their_rounds}
        yield Record(name, theirs / taken, floor, "x faster", detail)


def _side_by_side() -> Record:
    """A gradient of eight clients: traced together, against one after the other and against plain vmap."""
    torch.set_num_threads(1)
    problem = sine(0, waves=8, edges=EIGHT)
    alone = [Objective(problem.model, problem.layout, client) for client in problem.clients]
    together = StackedObjective(alone)
    singles = [StackedObjective([one]) for one in alone]
    thetas = problem.initial.expand(len(alone), -1).contiguous()
    one_by_one, _ = seconds(lambda: [one.gradients(thetas[:1]) for one in singles], 50)
    traced, _ = seconds(lambda: together.gradients(thetas), 50)
    vmapped, _ = seconds(lambda: vmap(grad(alone[0].loss))(thetas, together.terms), 50)
    detail = {"seconds": traced, "one_by_one_seconds": one_by_one, "vmap_seconds": vmapped}
    return Record("fitting: gradients of 8 clients side by side", one_by_one / traced, None, "x faster", detail)


def _arm(local: LocalRule, rule: FIPA, control: StepControl | None) -> Arm:
    plan = SketchPlan(rank=20, solver="krylov", route="rows", iterations=1)
    return Arm("ours", (Stage(rule, local, 10**6, plan, control=control),))


class Steps:
    """A federation of ours, round by round."""

    def __init__(self, arm: Arm, executor: Executor, seed: int = 0) -> None:
        self._federation = Federation(arm, seed, executor)
        self._state: State = self._federation.start()

    def round(self) -> float:
        self._state, record = self._federation.round(self._state)
        return record.metric if record.metric is not None else math.nan


def median(step: Callable[[], float]) -> float:
    """Of a few rounds, after one to warm up."""
    step()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times)[ROUNDS // 2]


def _until(step: Callable[[], float], error: float, most: int) -> tuple[float, int]:
    start = time.perf_counter()
    for done in range(1, most + 1):
        if step() <= error:
            return time.perf_counter() - start, done
    return time.perf_counter() - start, most  # at least: the error was not reached
