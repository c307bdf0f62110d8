"""Server memory and seconds by number of clients, at the size of ResNet-20: `python -m bench.scaling`.

Made-up replies arrive one by one, as Flower's records: the server reads and checks each, and takes its step. Each point
has a fresh process with one thread. Writes docs/results/scaling.csv and .png. Points that the csv has already are not
measured again: delete it to start anew. A point that would need too much memory is not measured: the csv says so, and
gives the size of what the server would have to keep instead. So it is with what takes long, unless there is `--all`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from rich.console import Console

import fipa
from bench.common import PeakMemory
from bench.scaling_figure import draw, read
from fipa.aggregation.krylov import WIDTH
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.registry import kind_of, settings_of
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan
from fipa.federation.messages import Reply
from fipa.flower.answer import Expected, Limits, decode, encode
from fipa.flower.codec import nbytes
from fipa.flower.request import Request
from fipa.layout import Layout
from fipa.randomness import seed_for
from fipa.spill import MEMORY_LIMIT

P, DAMPING, EXAMPLES, SEED = 272_474, 0.5, 100, 1
TEST_SEED = seed_for(SEED, "test matrix", 1)
CLIENTS = {"additive": (10, 100, 1000), "paper": (10, 100, 300, 1000)}
SERIES = (("additive", 8), ("additive", 40), ("paper", 20), ("paper", 4))  # width, or rank
RANK = 4  # of the clients' curvature under the additive rule: it changes the numbers, not the work
MOST_BYTES = 6 * 10**9  # that the server may keep
MOST_TFLOP = 4.0  # without --all
PATIENCE = 3600.0  # seconds on the clock for a point
RESULTS = Path("docs/results/scaling.csv")

Key = tuple[str, int, int]  # rule, size, clients


@dataclass(frozen=True)
class Point:
    """What the server took, in seconds of a core. What made the replies is not in `seconds`, but in `wall_seconds`."""

    rule: str
    size: int
    clients: int
    measured: str
    seconds: float | None
    decode_seconds: float | None
    peak_mib: float
    reply_mib: float
    wall_seconds: float | None = None


class Replies:
    """Made-up clients. Their eigenvectors are rows of one orthonormal matrix, shifted, and so orthonormal too."""

    def __init__(self, rule: str, size: int, p: int = P) -> None:
        generator = torch.Generator().manual_seed(0)
        rank = size if rule == "paper" else RANK
        self.layout = Layout(("w",), ((p,),))
        self.plan: CurvaturePlan = SketchPlan(rank=size) if rule == "paper" else AdditivePlan(width=size)
        self._rows = torch.linalg.qr(torch.randn(p, rank, generator=generator)).Q.T.contiguous()
        self._values = 50 * torch.arange(1, rank + 1).float() ** -1.5
        self._delta = torch.randn(p, generator=generator) / p**0.5
        self._omega = None if rule == "paper" else fipa.random_test_matrix(p, size, TEST_SEED)

    def make(self, client: int) -> tuple[Request, RecordDict]:
        """What was asked of a client, and its reply."""
        order = {"plan": (kind_of(self.plan), settings_of(self.plan))}
        request = Request("work", 1, client, SEED, self.layout.names, order=order)
        vectors = self._rows.roll(131 * client, 1).T
        delta = self._delta.roll(-137 * client)
        summary: fipa.Sketch | fipa.AdditiveStatistics = fipa.Sketch(vectors, self._values, self.layout)
        if self._omega is not None:
            scaled = vectors * self._values
            products, response = (scaled @ (vectors.T @ v) for v in (self._omega, delta))
            summary = fipa.AdditiveStatistics(products, response, delta, EXAMPLES, TEST_SEED, self.layout)
        return request, encode(request, Reply(fipa.ClientUpdate(delta, EXAMPLES, summary)))


def kept_bytes(rule: str, size: int, clients: int, p: int = P) -> int:
    """Numbers in float32 that the server must hold in memory until it takes its step; those beyond are in files."""
    return min(MEMORY_LIMIT, 4 * p * clients * (size + 1)) if rule == "paper" else 4 * p * (size + 2)


def tflop(rule: str, size: int, clients: int, p: int = P) -> float:
    """Of the upper half of the Gram matrix, or of some ten products where sketches are in files; or of the sums."""
    columns = clients * size
    if rule == "paper":
        return 1e-12 * p * (columns**2 if 4 * p * columns <= MEMORY_LIMIT else 10 * 4 * WIDTH * columns)
    return 1e-12 * p * 2 * clients * (size + 2)


def measure(rule: str, size: int, clients: int, p: int = P) -> Point:
    """One round of the server, in this process."""
    torch.set_num_threads(1)
    replies, theta = Replies(rule, size, p), torch.zeros(p)
    making = decoding = 0.0
    size_of_one = 0

    def read(client: int) -> fipa.ClientUpdate:
        nonlocal making, decoding, size_of_one
        start = time.process_time()
        request, content = replies.make(client)
        made = time.process_time()
        answer = decode(content, request, Expected(replies.layout, theta, {}, Limits()))
        assert isinstance(answer, Reply)
        making, decoding = making + made - start, decoding + time.process_time() - made
        size_of_one = nbytes(*content.array_records.values())
        return answer.update

    def pooled() -> fipa.ClientUpdate:
        total = fipa.pool(_statistics(read(client)) for client in range(clients))
        return fipa.ClientUpdate(total.delta, total.num_examples, total)

    with PeakMemory() as memory:
        start, begun = time.process_time(), time.perf_counter()
        if rule == "paper":
            fipa.aggregate(theta, (read(client) for client in range(clients)), fipa.FIPA(damping=DAMPING))
        else:
            fipa.aggregate(theta, [pooled()], fipa.AdditiveFIPA(damping=DAMPING))
        passed, wall = time.process_time() - start, time.perf_counter() - begun
    mib = [round(value / 2**20, 1) for value in (memory.bytes, size_of_one)]
    seconds = [round(value, 2) for value in (passed - making, decoding, wall)]
    return Point(rule, size, clients, "yes", seconds[0], seconds[1], mib[0], mib[1], seconds[2])


def _statistics(update: fipa.ClientUpdate) -> fipa.AdditiveStatistics:
    assert isinstance(update.sketch, fipa.AdditiveStatistics)
    return update.sketch


def points(known: Collection[Key], everything: bool) -> Iterator[Point]:
    """Those that are not known yet, the cheap ones first."""
    wanted = [(clients, rule, size) for rule, size in SERIES for clients in CLIENTS[rule]]
    for clients, rule, size in sorted(wanted, key=lambda point: (point[0], SERIES.index(point[1:]))):
        if (rule, size, clients) in known:
            continue
        kept, reply = kept_bytes(rule, size, clients), kept_bytes(rule, size, 1)
        left_out = Point(rule, size, clients, "no", None, None, round(kept / 2**20, 1), round(reply / 2**20, 1))
        if kept > MOST_BYTES or (tflop(rule, size, clients) > MOST_TFLOP and not everything):
            yield left_out
        else:
            yield _in_fresh_process(rule, size, clients) or left_out


def _in_fresh_process(rule: str, size: int, clients: int) -> Point | None:
    """None if it took too long."""
    command = [sys.executable, "-m", "bench.scaling", "--point", rule, str(size), str(clients)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        out = subprocess.run(command, env=environment, timeout=PATIENCE, check=True, stdout=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return None
    return Point(**json.loads(out.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--point", nargs=3, metavar=("RULE", "SIZE", "CLIENTS"), help="measure here, print as JSON")
    parser.add_argument("--all", action="store_true", help="also what takes long")
    args = parser.parse_args()
    if args.point:
        rule, size, clients = args.point
        print(json.dumps(asdict(measure(rule, int(size), int(clients)))))
        return
    console = Console()
    rows = {_key(row): row for row in (read(RESULTS) if RESULTS.exists() else []) if row["measured"] == "yes"}
    for point in points(list(rows), args.all):
        console.print(point)
        rows[point.rule, point.size, point.clients] = asdict(point)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, Point.__dataclass_fields__, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows))
    console.print(f"written: {RESULTS}, {draw(RESULTS)}")


def _key(row: dict[str, Any]) -> Key:
    return row["rule"], int(row["size"]), int(row["clients"])


if __name__ == "__main__":
    main()
