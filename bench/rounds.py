"""Rounds of image classification: rounds per second against Flower and pfl, and what a FIPA round costs.

FIPA_BENCH_SIZE=quick takes fewer turns; smoke only shows that everything runs.
FIPA_BENCH_MODELS=cnn8k,cnn23k measures these networks only, and FIPA_BENCH_RULES="FIPA shared basis" this rule only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.common import Record, real_images
from fipa.aggregation.additive import AdditiveFIPA
from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.fipa import CompletedFIPA
from fipa.aggregation.rule import Rule
from fipa.aggregation.shared import SharedFIPA
from fipa.clients.descent import SGD
from fipa.clients.gradient import FullGradient
from fipa.clients.rule import LocalRule
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.basis import BasisPlan
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan
from fipa.data import load
from fipa.data.images import Images, ImageSet
from fipa.federation.arm import Arm
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor, Rows
from fipa.federation.participation import Participation
from fipa.federation.problem import Problem
from fipa.federation.stage import Stage
from fipa.kernels import small_cnn
from fipa.machine import keep_memory
from fipa.problems.vision import split

CLIENTS, BATCH, LR, DECAY = 5, 50, 0.1, 1e-3
POPULATION = 100  # that FIPA's rounds choose these clients from, as in the paper


@dataclass(frozen=True)
class Work:
    """Of a client in a round, and how many rounds are timed after one to warm up."""

    model: str
    samples: int = 500
    epochs: int = 5
    turns: int = 7

    def __str__(self) -> str:
        return f"{CLIENTS} clients x {self.samples} images x {self.epochs} epoch{'s' if self.epochs > 1 else ''}"


def work_of(model: str) -> Work:
    """By the size of the benchmark; ResNet-20 has a fifth of the images, or its rounds would take an hour and more."""
    if SIZE == "smoke":
        return Work(model, samples=100, epochs=1, turns=1)
    work = Work(model, turns=7 if SIZE == "full" else 3)
    if model == "resnet20":
        work = replace(work, turns=3, samples=100)
    return work


SIZE = os.environ.get("FIPA_BENCH_SIZE", "full")
MODELS = {"cnn8k": "CNN-8k", "cnn23k": "CNN-23k", "cnn207k": "CNN-207k", "resnet20": "ResNet-20"}
PEERS_FLOORS = {"cnn23k": (3.0, 2.0), "resnet20": (1.3, 1.3)}  # times Flower's and pfl's speed
SHARED, HALF = "FIPA shared basis", "FIPA, half of the images sketched,"
FLOORS = {HALF: 1.5, SHARED: 1.0}  # times FedAvg's five epochs
MISSING = "not installed: pip install 'fipa[peers]'"


def problem(seed: int, work: Work, clients: int = CLIENTS) -> Problem:
    """Images of CIFAR-10, without augmentation; where they are missing random pictures of that shape."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int) -> Images:
        pixels = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return Images(pixels, torch.randint(10, (count,), generator=generator))

    if real_images():
        whole = load("cifar10")
        some = torch.randperm(len(whole.train), generator=generator)[: clients * work.samples]
        data = replace(whole, train=Images(whole.train.pixels[some], whole.train.labels[some]))
    else:
        data = ImageSet(
            "noise", random(clients * work.samples), random(10), tuple("0123456789"), mean=(0.5,) * 3, std=(0.289,) * 3
        )
    return split(data, seed, model=work.model, clients=clients)


def _data() -> str:
    return "CIFAR-10" if real_images() else "random pictures"


def without_kernels(seed: int, work: Work) -> Problem:
    """The same where numba is missing: torch's convolutions. For processes that do nothing else."""
    small_cnn.COMPILED = False
    return problem(seed, work)


class Gate:
    """Where a system waits before each of its rounds, so that systems take turns; it also keeps the time."""

    def __init__(self, pipe: Connection, initial: Tensor) -> None:
        self._pipe = pipe
        self._initial = initial
        self._start: float | None = None

    def __call__(self, theta: Tensor, last: bool = False) -> None:
        """The round before, if there was one, ended with these parameters."""
        if self._start is not None:
            seconds = time.perf_counter() - self._start
            self._pipe.send((seconds, float((theta - self._initial).norm())))
        if not last:
            self._pipe.recv()
            self._start = time.perf_counter()


Runs = Callable[[Gate, int, Work], None]  # a system: so many rounds, calling the gate before each and at the end


def engine(
    gate: Gate, rounds: int, work: Work, factory: Callable[..., Problem] = problem, workers: int = 2, threads: int = 1
) -> None:
    """FedAvg by our engine."""
    with Executor(partial(factory, work=work), workers, threads) as executor:
        federation = Federation(arm(FedAvg(), epochs=work.epochs), 0, executor)
        state = federation.start()
        for _ in range(rounds):
            gate(state.theta)
            state, _ = federation.round(state)
        gate(state.theta, last=True)


def flower(gate: Gate, rounds: int, work: Work, usual: bool = False) -> None:
    from bench import peers  # with Flower and pfl, which may be missing

    peers.flower(gate, rounds, work, usual)


def pfl(gate: Gate, rounds: int, work: Work, threads: int) -> None:
    from bench import peers

    peers.pfl(gate, rounds, work, threads)


def arm(rule: Rule, plan: CurvaturePlan | None = None, epochs: int = 5, local: LocalRule | None = None) -> Arm:
    """Rounds without evaluation, of clients that train by SGD unless told otherwise."""
    local = local or SGD(lr=LR, epochs=epochs, batch=BATCH, weight_decay=DECAY)
    return Arm("bench", (Stage(rule, local, 10**6, plan, evaluate_every=10**6),), group=1)


def _child(pipe: Connection, run: Runs, rounds: int, work: Work, log: Path) -> None:
    with log.open("w") as file:  # some are talkative
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    run(Gate(pipe, problem(0, work).initial), rounds, work)


class System:
    """One of the systems, in a process of its own."""

    def __init__(self, name: str, run: Runs, work: Work) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = Path("build") / f"rounds-{name}.log"
        self._log.parent.mkdir(exist_ok=True)
        self._process = context.Process(target=_child, args=(theirs, run, work.turns + 1, work, self._log))
        self._process.start()
        theirs.close()  # so that the end of the process is seen here

    def round(self) -> tuple[float, float]:
        """Seconds, and how far the parameters are from their start."""
        try:
            self._pipe.send("go")
            seconds, moved = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a system died, see {self._log}") from error
        return seconds, moved

    def close(self) -> None:
        self._pipe.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()


@dataclass(frozen=True)
class Timing:
    """Of one system."""

    seconds: float
    fastest: float
    slowest: float

    def detail(self, prefix: str = "") -> dict[str, float]:
        keys = {"seconds": self.seconds, "fastest": self.fastest, "slowest": self.slowest}
        return {prefix + key: value for key, value in keys.items()}


def take_turns(systems: Mapping[str, Runs], work: Work) -> dict[str, Timing]:
    """Round by round A B C A B C, the first round of each not counted. All must have moved about as far."""
    running = {name: System(name, run, work) for name, run in systems.items()}
    try:
        results = [{name: system.round() for name, system in running.items()} for _ in range(work.turns + 1)]
    finally:
        for system in running.values():
            system.close()
    moved = {name: distance for name, (_, distance) in results[-1].items()}
    typical = median(moved.values())
    slack = 2.5 if SIZE == "smoke" else 1.4  # after a few batches of noise chance decides
    if not all(typical / slack < distance < typical * slack for distance in moved.values()):
        raise RuntimeError(f"the systems do not do the same work: they moved the parameters by {moved}")
    times = {name: [result[name][0] for result in results[1:]] for name in systems}
    return {name: Timing(median(t), min(t), max(t)) for name, t in times.items()}


def against_peers() -> Iterator[Record]:
    """FedAvg's rounds per second."""
    for model in [model for model in PEERS_FLOORS if model in _models()]:
        yield from _throughput(work_of(model))


def rounds() -> Iterator[Record]:
    """What FIPA's rounds cost, in those of FedAvg."""
    for model in _models():
        with ProcessPoolExecutor(1, get_context("spawn"), keep_memory) as pool:  # a process of ours, as of `fipa run`
            yield from pool.submit(_costs, work_of(model)).result()


def _models() -> list[str]:
    return os.environ.get("FIPA_BENCH_MODELS", ",".join(MODELS)).split(",")


def _throughput(work: Work) -> Iterator[Record]:
    systems: dict[str, Runs] = {"ours": engine}
    systems |= {f"one{threads}": partial(engine, workers=1, threads=threads) for threads in (1, 2)}
    ready = problem(0, work)
    if small_cnn.SmallCNN.of(ready.model, ready.layout):
        systems["torch"] = partial(engine, factory=without_kernels)
    if find_spec("flwr") and find_spec("ray"):
        systems |= {"flower": flower, "flower_usual": partial(flower, usual=True)}
    if find_spec("pfl"):
        systems |= {f"pfl{threads}": partial(pfl, threads=threads) for threads in (1, 2)}
    times = take_turns(systems, work)
    ours, size = times["ours"], f"FedAvg, {MODELS[work.model]}, {work}"
    flower_floor, pfl_floor = PEERS_FLOORS[work.model]
    yield Record(
        f"peers: {size}, two workers", 1 / ours.seconds, None, "rounds per second",
        {**ours.detail(), "one_process_seconds": times["one1"].seconds, "data": _data(), "load": os.getloadavg()[0]},
    )  # fmt: skip
    if "torch" in times:
        yield Record(
            f"peers: {size}, our kernels against torch's convolutions", times["torch"].seconds / ours.seconds, None,
            "x faster", times["torch"].detail("torch_"),
        )  # fmt: skip
    name = f"peers: {size}, against Flower's simulation"
    yield _against(f"{name}, our tensors", "flwr", times.get("flower"), ours, flower_floor, {})
    yield _against(f"{name}, torch's usual layout", "flwr", times.get("flower_usual"), ours, flower_floor, {})
    one, threads = _fastest(times, "one")
    theirs, their_threads = _fastest(times, "pfl")
    detail = {"threads": threads, "their_threads": their_threads}
    yield _against(f"peers: {size}, one process against pfl's, our tensors", "pfl", theirs, one, pfl_floor, detail)


def _fastest(times: Mapping[str, Timing], system: str) -> tuple[Timing | None, int]:
    """Of one process with one thread or with two, and with how many that was."""
    found = [(times[f"{system}{threads}"], threads) for threads in (1, 2) if f"{system}{threads}" in times]
    return min(found, key=lambda pair: pair[0].seconds, default=(None, 0))


def _against(
    name: str, package: str, theirs: Timing | None, ours: Timing | None, floor: float, detail: dict[str, Any]
) -> Record:
    if theirs is None or ours is None:
        return Record(name, math.nan, None, MISSING, {})
    detail = {"seconds": ours.seconds, **theirs.detail("their_"), **detail, package: version(package)}
    return Record(name, theirs.seconds / ours.seconds, None if SIZE == "smoke" else floor, "x faster", detail)


class Clocked(Executor):
    """Clients in this process, and the seconds that they took."""

    spent = 0.0

    def start(self, *args: Any, **keywords: Any) -> Rows:
        wait = super().start(*args, **keywords)

        def rows() -> tuple[list[Any], float]:
            found, seconds = wait()
            self.spent += seconds
            return found, seconds

        return rows


def _costs(work: Work) -> list[Record]:
    """What FIPA's rounds take, in two workers with the server's part, and what their clients take."""
    sketch, sums = SketchPlan(rank=100, sampled_labels=1), AdditivePlan(width=100, sampled_labels=1)
    half = replace(sketch, max_examples=work.samples // 2)
    arms = {
        "FedAvg": arm(FedAvg(), None, work.epochs),
        "FIPA": arm(CompletedFIPA(damping=0.5, step=0.25), sketch, work.epochs),
        HALF: arm(CompletedFIPA(damping=0.5, step=0.25), half, work.epochs),
        "additive FIPA": arm(AdditiveFIPA(damping=0.5, step=0.25), sums, work.epochs),
        SHARED: arm(SharedFIPA(radius=0.1), BasisPlan(sampled_labels=1), local=FullGradient()),
    }
    chosen = [name for name in os.environ.get("FIPA_BENCH_RULES", "").split(",") if name]
    arms = {name: one for name, one in arms.items() if name in ("FedAvg", *(chosen or arms))}
    arms = {name: replace(one, participation=Participation("uniform", CLIENTS)) for name, one in arms.items()}
    factory = partial(problem, work=work, clients=POPULATION)
    with Executor(factory, workers=2) as executor:
        seconds = _measured(executor, arms, work.turns, time.perf_counter)
    with Clocked(factory) as clocked:
        clients = _measured(clocked, arms, work.turns, lambda: clocked.spent)
    parameters, records = factory(0).layout.numel, list[Record]()
    for name in [name for name in arms if name != "FedAvg"]:
        for what, spent in (("", seconds), ("client seconds of ", clients)):
            floor = FLOORS.get(name) if SIZE != "smoke" and work.epochs > 1 else None
            ours, theirs = spent[name], spent["FedAvg"]
            detail = {"seconds": ours, "fedavg_seconds": theirs, "parameters": f"{parameters:,}", "data": _data()}
            title = f"rounds: {what}{name} against FedAvg, {MODELS[work.model]}, {work}"
            records.append(Record(title, ours / theirs, floor, "x the time", detail, at_most=True))
    return records


def _measured(executor: Executor, arms: Mapping[str, Arm], turns: int, clock: Callable[[], float]) -> dict[str, float]:
    """Medians of what a clock says of each arm's rounds, which take turns; the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    federations = {name: Federation(one, 0, executor) for name, one in arms.items()}
    states = {name: federation.start() for name, federation in federations.items()}
    states |= {name: _known(state) for name, state in states.items() if name == SHARED}
    for _ in range(turns + 1):
        federations["FedAvg"].round(states["FedAvg"])  # all arms ask the same clients: their images are at hand for all
        for name, federation in federations.items():
            start = clock()
            states[name], _ = federation.round(states[name])
            times[name].append(clock() - start)
    return {name: median(t[1:]) for name, t in times.items()}


def _known(state: State) -> State:
    """With as many columns in the basis as it holds for most of its life: as after a warm-up with 150 clients."""
    generator = torch.Generator().manual_seed(1)
    seen = {client: (1, torch.randn(state.theta.shape, generator=generator)) for client in range(150)}
    return replace(state, seen=seen)
