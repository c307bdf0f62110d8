"""Ten of many clients: what a round takes, and how much memory, as the federation grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from bench.common import PeakMemory, Record
from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.fipa import CompletedFIPA
from fipa.aggregation.rule import Rule
from fipa.clients.descent import SGD
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan
from fipa.data.images import Images, ImageSet
from fipa.data.partition import IID
from fipa.federation.arm import Arm
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.participation import Participation
from fipa.federation.problem import Problem
from fipa.federation.stage import Stage
from fipa.problems.vision import split

FEW, MANY, CHOSEN, SAMPLES, SIDE = 100, 10_000, 10, 20, 8
ROUNDS, WARM = 65, 5
RULES: dict[str, tuple[Rule, CurvaturePlan | None]] = {
    "FedAvg": (FedAvg(), None),
    "FIPA": (CompletedFIPA(damping=0.5), SketchPlan(rank=5, max_examples=10, sampled_labels=1)),
}


def many() -> Iterator[Record]:
    """Each size in a process of its own, so that neither has the other's memory; their rounds take turns."""
    for name in RULES:
        with get_context("spawn").Pool(1) as few, get_context("spawn").Pool(1) as some:
            setting_up = [pool.apply(begin, (name, size)) for pool, size in ((few, FEW), (some, MANY))][1]
            taken = [(few.apply(resume), some.apply(resume)) for _ in range(ROUNDS)][WARM:]
            sizes = {FEW: few.apply(resume), MANY: some.apply(resume)}
        seconds, few_seconds = median(b for _, b in taken), median(a for a, _ in taken)
        detail: dict[str, Any] = {"seconds": seconds, "few_seconds": few_seconds, "setting_up_seconds": setting_up}
        what, ratio = f"{CHOSEN} of {MANY:,} clients against {CHOSEN} of {FEW}", median(b / a for a, b in taken)
        yield Record(f"many: a round with {what}, {name}", ratio, 1.1, "x the CPU time", detail, True)
        data = (MANY - FEW) * SAMPLES * (SIDE**2 + 8)  # pixels and labels
        each = (sizes[MANY] - sizes[FEW] - data) / (MANY - FEW) / 1024
        detail = {"process_bytes": sizes, "data_bytes": data}
        yield Record(f"many: memory of a client that is not asked, {name}", each, None, "KiB", detail)


def problem(seed: int, clients: int) -> Problem:
    """Random pictures in the shape of the digits."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int) -> Images:
        pixels = torch.randint(256, (count, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        return Images(pixels, torch.randint(10, (count,), generator=generator))

    data = ImageSet("noise", random(clients * SAMPLES), random(10), tuple("0123456789"), mean=(0.5,), std=(0.289,))
    return split(data, seed, model="cnn8k", clients=clients, partition=IID())


def measured(name: str, clients: int) -> Iterator[float]:
    """Seconds of CPU to set up, those of each round, and bytes at the peak."""
    torch.set_num_threads(1)
    rule, plan = RULES[name]
    stage = Stage(rule, SGD(lr=0.1, epochs=5, batch=10), ROUNDS, plan, evaluate_every=ROUNDS)
    arm = Arm(name, (stage,), Participation("uniform", CHOSEN), average=0)
    with PeakMemory() as memory, Executor(partial(problem, clients=clients)) as executor:
        begun = time.process_time()
        federation = Federation(arm, 0, executor)
        state = federation.start()
        yield time.process_time() - begun
        for _ in range(ROUNDS):
            begun = time.process_time()
            state, _ = federation.round(state)
            yield time.process_time() - begun
    yield memory.bytes


_here: list[Iterator[float]] = []  # what this process measures


def begin(name: str, clients: int) -> float:
    """The first thing that is measured in this process."""
    _here.append(measured(name, clients))
    return resume()


def resume() -> float:
    """The next one."""
    return next(_here[0])
