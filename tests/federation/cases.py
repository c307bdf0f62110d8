"""A federation small enough for its rounds to be written out in numpy: linear least squares in two parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fipa import Client, Problem, Residual
from fipa.clients.descent import SGD
from fipa.federation.arm import Arm
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.participation import Faults
from fipa.federation.stage import Stage
from fipa.problems.fitting import misfit
from fipa.randomness import generator_for

DOUBLE = torch.float64
SIZES = (2, 3, 5)
START = (0.5, -1.0)


def linear(start: Sequence[float] = START) -> nn.Module:
    model = nn.Linear(len(start), 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([start], dtype=DOUBLE))
    return model


def data(seed: int, client: int, n: int) -> tuple[Tensor, Tensor]:
    rng = generator_for(seed, "data", client=client)
    return torch.randn(n, 2, generator=rng, dtype=DOUBLE), torch.randn(n, generator=rng, dtype=DOUBLE)


def lines(seed: int, sizes: Sequence[int] = SIZES) -> Problem:
    """Three clients with 2, 3 and 5 points, each in a form of its own; the metric is the squared norm."""
    clients = [Residual(misfit, *data(seed, m, n)) for m, n in enumerate(sizes)]
    return Problem(linear(), clients, lambda model: model.weight.square().sum(), name="norm")


def alike(seed: int) -> Problem:
    """Four clients of one form, which are trained side by side, and count 1, 2, 3 and 4 times."""
    clients = [Client((Residual(misfit, *data(seed, m, 4)),), num_examples=m + 1) for m in range(4)]
    return Problem(linear(), clients, lambda model: model.weight.square().sum())


def by_seed(seed: int, others: Mapping[int, Callable[[int], Problem]], usual: Callable[[int], Problem]) -> Problem:
    """Problems of several kinds for one pool of workers: to start one takes seconds."""
    return others.get(seed, usual)(seed)


@dataclass
class Numbers:
    """One client in numpy: X, y, and what follows from them."""

    X: np.ndarray
    y: np.ndarray
    n: int

    def loss(self, theta: np.ndarray) -> float:
        return float(0.5 * np.mean((self.X @ theta - self.y) ** 2))

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        return self.X.T @ (self.X @ theta - self.y) / len(self.y)

    @property
    def curvature(self) -> np.ndarray:
        return self.X.T @ self.X / len(self.y)

    def sgd(self, theta: np.ndarray, lr: float, steps: int, correction: np.ndarray | float = 0.0) -> np.ndarray:
        """The update of so many full gradient steps."""
        moved = theta.copy()
        for _ in range(steps):
            moved = moved - lr * (self.gradient(moved) + correction)
        return moved - theta


def numbers(factory: Callable[[int], Problem] = lines, seed: int = 0) -> list[Numbers]:
    return [
        Numbers(client.data[0].inputs[0].numpy(), client.data[0].inputs[1].numpy(), client.num_examples)
        for client in factory(seed).clients
    ]


def mean_loss(clients: Sequence[Numbers], theta: np.ndarray) -> float:
    return sum(c.n * c.loss(theta) for c in clients) / sum(c.n for c in clients)


def fedavg(deltas: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    return sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)


def fipa_step(
    curvatures: Sequence[np.ndarray], deltas: Sequence[np.ndarray], weights: Sequence[float], damping: float
) -> np.ndarray:
    """(sum w H + damping)^-1 sum w H D."""
    shares = np.asarray(weights) / sum(weights)
    H = sum(w * C for w, C in zip(shares, curvatures, strict=True))
    b = sum(w * C @ D for w, C, D in zip(shares, curvatures, deltas, strict=True))
    return np.linalg.solve(H + damping * np.eye(len(b)), b)


@dataclass(frozen=True)
class Planned(Faults):
    """Delays by (round, client) in place of chance."""

    plan: Mapping[tuple[int, int], int | None] = field(default_factory=dict)

    def delay(self, seed: int, round_number: int, client: int) -> int | None:
        return self.plan.get((round_number, client), 0)


Rounds = list[tuple[State, dict[str, Any]]]


def run(
    arm: Arm | Stage,
    factory: Callable[[int], Problem] = lines,
    seed: int = 0,
    state: State | None = None,
    **settings: Any,
) -> Rounds:
    """All rounds of an arm, or of one that consists of a single stage; records as JSON has them.

    Clients of a stage are trained one by one: to trace several at once takes longer than all rounds of most tests.
    """
    if isinstance(arm, Stage):
        arm = Arm("arm", (arm,), **{"group": 1} | settings)
    with Executor(factory) as executor:
        federation = Federation(arm, seed, executor)
        return [(after, record.plain()) for after, record in federation.rounds(state or federation.start())]


def texts(record: Mapping[str, Any]) -> list[tuple[int | None, str]]:
    return [(event["client"], event["text"]) for event in record["events"]]


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """All but the time that it took; NaN as text, so that it equals itself."""
    return {key: repr(value) for key, value in record.items() if key not in ("seconds", "peak_memory_mib")}


def stage(rule: Any, local: Any = None, rounds: int = 1, plan: Any = None, **more: Any) -> Stage:
    return Stage(rule, local or SGD(lr=0.1, steps=2), rounds, plan, **more)
