"""What one hostile client of ten does to a shared basis: `python docs/results/hostile.py` writes hostile.csv.

Digits, ten clients, ten rounds after the warm-up of `fipa run digits`. Client 0 lies in every round, in one of the ways
below, with the guards as they come, without the server's look at the matrices, without a limit to the length of a
gradient, and without control of the step. Matrices have all of their digits here: in 8 bits a negative one cannot be
told.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tables import HERE, write
from torch import Tensor

import fipa
from fipa.coding import Coded
from fipa.curvature import basis as matrices
from fipa.curvature.basis import pack
from fipa.federation import shared
from fipa.federation.site import Site

SEEDS, LIAR = range(3), 0
COLUMNS = ("clients per round", "lie", "guards", "seed", "start", "last", "lowest", "refused")
Lie = Callable[[Tensor], Tensor]


def noise(answer: Tensor) -> Tensor:
    """A symmetric matrix of the same size that is no curvature."""
    size = int(math.sqrt(2 * answer.numel()))  # of one half
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    half = pack(drawn + drawn.T)
    return half * (answer.norm() / half.norm())


MATRICES: dict[str, Lie] = {
    "curvature x 100": lambda answer: 100 * answer,
    "curvature x 10,000": lambda answer: 10_000 * answer,
    "curvature x 0.01": lambda answer: 0.01 * answer,
    "negative curvature": lambda answer: -answer,
    "indefinite curvature": noise,
}
GRADIENTS: dict[str, Lie] = {
    "gradient of the wrong sign": lambda delta: -delta,
    "gradient x 100": lambda delta: 100 * delta,
    "gradient at random": lambda delta: torch.randn(len(delta), generator=torch.Generator().manual_seed(0)),
}
LIES = ("none", *MATRICES, *GRADIENTS, "another client's gradient")
GUARDS = ("all", "matrices unchecked", "gradients of any length", "step uncontrolled")


def told(lie: Lie, answer: Tensor) -> Tensor:
    """The bytes of a lie."""
    return lie(answer.view(torch.float32)).contiguous().view(torch.uint8)


@contextmanager
def lying(lie: str) -> Iterator[None]:
    """Client 0 lies wherever it is asked."""
    work, curvatures = Site.work, Site.curvatures
    others: list[Tensor] = []

    def lying_work(site: Site, clients: Any, order: Any) -> Any:
        replies = work(site, clients, order)
        if not isinstance(order.local, fipa.FullGradient):
            return replies  # the warm-up is honest
        told = []
        for client, reply in zip(clients, replies, strict=True):
            delta: Any = reply.update.delta
            if client != LIAR:
                others[:] = [delta]
            elif lie in GRADIENTS:
                delta = GRADIENTS[lie](delta)
            elif lie == "another client's gradient" and others:
                delta = others[0]
            if delta is not reply.update.delta:
                reply = replace(reply, update=replace(reply.update, delta=delta), coded=(Coded.of(delta),))
            told.append(reply)
        return told

    def lying_curvatures(site: Site, clients: Any, *about: Any) -> Any:
        answers = curvatures(site, clients, *about)
        if lie not in MATRICES:
            return answers
        return [told(MATRICES[lie], a) if client == LIAR else a for client, a in zip(clients, answers, strict=True)]

    Site.work, Site.curvatures = lying_work, lying_curvatures  # type: ignore[method-assign]
    try:
        yield
    finally:
        Site.work, Site.curvatures = work, curvatures  # type: ignore[method-assign]


@contextmanager
def guarded(guards: str) -> Iterator[dict[str, Any]]:
    """The settings of an arm with these guards."""
    steepest, longest, negative = shared.STEEPEST, shared.LONGEST, matrices._negative
    if guards == "gradients of any length":
        shared.LONGEST = math.inf  # type: ignore[assignment]
    if guards == "matrices unchecked":
        shared.STEEPEST, matrices._negative = math.inf, lambda _: None  # type: ignore[assignment]
    try:
        yield {"trust_region": False} if guards == "step uncontrolled" else {}
    finally:
        shared.STEEPEST, shared.LONGEST, matrices._negative = steepest, longest, negative


def measured(some: int, lie: str, guards: str) -> list[dict[str, Any]]:
    """A row for each seed."""
    with tempfile.TemporaryDirectory() as out, lying(lie), guarded(guards) as settings:
        arm = {"rule": {"name": "shared-fipa", "bits": 32}, "local": {"name": "gradient"}, **settings}
        if some < 10:
            arm["participation"] = {"kind": "uniform", "count": some}
        results = fipa.run(
            "digits", arms={"arm": arm}, seeds=SEEDS, rounds=10 if some == 10 else 30, out=Path(out) / "run",
            set={"problem.clients": 10, "control": "arm"}, workers=1, quiet=True,
        )  # fmt: skip
        rows = []
        for seed, run in results.content["arms"]["arm"].items():
            metric = [value for value in run["metric"] if value is not None]
            refused = sum("refused" in event["text"] for event in run["events"])
            rows.append(
                {"clients per round": some, "lie": lie, "guards": guards, "seed": int(seed),
                 "start": run["initial_metric"], "last": metric[-1] if run["status"] == "finished" else "diverged",
                 "lowest": min(metric, default="diverged"), "refused": refused}
            )  # fmt: skip
    return rows


def main() -> None:
    """Measure all, print a table, and write the CSV as it grows."""
    rows: list[dict[str, Any]] = []
    print("| clients per round | lie | " + " | ".join(GUARDS) + " |\n" + "|---" * (2 + len(GUARDS)) + "|")
    for some in (10, 4):
        for lie in LIES:
            cells = []
            for guards in GUARDS:
                found = measured(some, lie, guards)
                rows += found
                last = [row["last"] for row in found if row["last"] != "diverged"]
                lost = len(found) - len(last)
                spread = f"{statistics.mean(last):.1f} ± {statistics.stdev(last):.1f}" if len(last) > 1 else "-"
                cells.append(spread + (f", {lost} diverged" if lost else ""))
            print(f"| {some} | {lie} | " + " | ".join(cells) + " |", flush=True)
            write(HERE / "hostile.csv", COLUMNS, rows)


if __name__ == "__main__":
    main()
