"""(d) The server: solve time and memory at p = 272k, and the additive rule's memory by number of clients."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

import fipa
from bench.common import PeakMemory, Record, gemm_speed, once
from fipa.aggregation.krylov import TOLERANCE
from fipa.layout import Layout

P, CLIENTS, RANK = 272_474, 5, 200
LAYOUT = Layout(("w",), ((P,),))
DAMPING = 0.5


def paper_qr(sketches: list[fipa.Sketch], deltas: list[Tensor], damping: float) -> Tensor:
    """The paper's server: thin QR of the stacked eigenvectors, then the reduced system."""
    V = torch.cat([s.eigenvectors for s in sketches], dim=1)
    sigma = torch.cat([s.eigenvalues for s in sketches]) / len(sketches)
    Q, R = torch.linalg.qr(V)
    K = (R * sigma) @ R.T
    b = sum(
        (s.eigenvectors @ (s.eigenvalues * (s.eigenvectors.T @ d)) for s, d in zip(sketches, deltas, strict=True)),
        torch.zeros(P),
    ) / len(sketches)
    z: Tensor = torch.linalg.solve(K + damping * torch.eye(len(K)), Q.T @ b)
    return Q @ z


def solves() -> Iterator[Record]:
    """5 clients of rank 200 with eigenvalues that decay from 50."""
    generator = torch.Generator().manual_seed(0)
    values = 50 * torch.arange(1, RANK + 1).float() ** -1.5
    sketches = [
        fipa.Sketch(torch.linalg.qr(torch.randn(P, RANK, generator=generator)).Q, values, LAYOUT).canonical()
        for _ in range(CLIENTS)
    ]
    deltas = [torch.randn(P, generator=generator) for _ in range(CLIENTS)]
    updates = [fipa.ClientUpdate(d, 100, s) for d, s in zip(deltas, sketches, strict=True)]
    theta = torch.zeros(P)
    size = sum(s.nbytes for s in sketches)

    rule = fipa.FIPA(damping=DAMPING)
    with PeakMemory() as memory:  # of the first call: a later one would reuse what this one left to the allocator
        fipa.aggregate(theta, updates, rule)
    ours, result = once(lambda: fipa.aggregate(theta, updates, rule))
    paper_qr(sketches, deltas, DAMPING)
    theirs, reference = once(lambda: paper_qr(sketches, deltas, DAMPING))
    error = float((result.theta - reference).norm() / reference.norm())
    flops = P * RANK * RANK * CLIENTS * (CLIENTS + 1)  # upper blocks of the Gram matrix
    detail = {
        "seconds": ours,
        "qr_seconds": theirs,
        "relative_difference": error,
        "gemm_share": flops / ours / gemm_speed(),
    }
    yield Record(
        "server: solve against the paper's QR form", theirs / ours if error < 1e-4 else 0.0, 2.0, "x faster", detail
    )
    peak = 1 + memory.bytes / size
    detail = {"sketch_bytes": size, "extra_bytes": memory.bytes}
    yield Record("server: peak memory against the sketches", peak, 1.3, "x the memory", detail, at_most=True)
    fipa.aggregate(theta, updates, fipa.FIPA())
    ours, result = once(lambda: fipa.aggregate(theta, updates, fipa.FIPA()))
    theirs, paper = once(lambda: paper_qr(sketches, deltas, 0.0))
    reference = undamped(sketches, deltas)
    errors = [float((d.double() - reference).norm() / reference.norm()) for d in (result.theta, paper)]
    yield Record(
        "server: pseudo-inverse (no damping) against the paper's QR form",
        theirs / ours if errors[0] <= errors[1] else 0.0,
        1.5,
        "x faster",
        {
            "seconds": ours,
            "qr_seconds": theirs,
            "error": errors[0],
            "qr_error": errors[1],
            "gemm_share": flops / ours / gemm_speed(torch.float64),
        },
    )


def undamped(sketches: list[fipa.Sketch], deltas: list[Tensor]) -> Tensor:
    """The pseudo-inverse in float64 throughout, by the QR that `fipa.FIPA` takes of sketches in that precision."""
    pairs = zip(deltas, sketches, strict=True)
    doubled = (fipa.ClientUpdate(d.double(), 100, s.to(torch.float64)) for d, s in pairs)
    return fipa.aggregate(torch.zeros(P, dtype=torch.float64), doubled, fipa.FIPA()).theta


REPLIES, SKETCH = (250, 500, 1000), 20


def aggregate_replies(clients: int) -> dict[str, float]:
    """Sketches of rank 20 that arrive one by one, half of their directions in common; in a process of its own.

    Seconds are of the CPU, without the making of sketches. Those in files are read from the system's cache, as far as
    they fit it: `wall_seconds` has the disk in it, and the making.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    base = torch.linalg.qr(torch.randn(P, SKETCH, generator=generator)).Q
    common, own = (half.contiguous() for half in base.chunk(2, dim=1))
    values, delta = 50 * torch.arange(1, SKETCH + 1).float() ** -1.5, torch.randn(P, generator=generator) / P**0.5
    making = 0.0

    def arriving() -> Iterator[fipa.ClientUpdate]:
        nonlocal making
        for client in range(clients):
            start = time.process_time()
            vectors = torch.cat([common, own.roll(131 * client, 0)], dim=1)
            update = fipa.ClientUpdate(delta.roll(137 * client), 100, fipa.Sketch(vectors, values, LAYOUT), client)
            making += time.process_time() - start
            yield update

    with PeakMemory() as memory:
        start, begun = time.process_time(), time.perf_counter()
        result = fipa.aggregate(torch.zeros(P), arriving(), fipa.FIPA(damping=DAMPING))
        seconds, wall = time.process_time() - start - making, time.perf_counter() - begun
    bound = result.diagnostics.error_bound
    return {"bytes": memory.bytes, "seconds": seconds, "wall_seconds": wall, "error_bound": bound}


def many_replies() -> Iterator[Record]:
    """More sketches than memory: 1000 of ResNet-20 are 22 GB."""
    found = {}
    for clients in REPLIES:
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            found[clients] = fresh.submit(aggregate_replies, clients).result()
    few, most = found[REPLIES[-2]], found[REPLIES[-1]]  # of the first most are in memory
    detail = {name: {clients: one[name] for clients, one in found.items()} for name in most}
    detail["bytes"] = {clients: int(size) for clients, size in detail["bytes"].items()}
    exact = max(one["error_bound"] for one in found.values()) <= TOLERANCE
    yield Record(
        f"replies: peak memory of {REPLIES[-1]} sketches of rank {SKETCH}, ResNet-20",
        most["bytes"] / 2**30 if exact else math.inf,
        8.0,
        "GiB",
        detail,
        at_most=True,
    )
    growth = most["seconds"] / few["seconds"] / (REPLIES[-1] / REPLIES[-2])
    yield Record(
        f"replies: time per reply of {REPLIES[-1]} against {REPLIES[-2]}", growth, 1.5, "x the time", {}, at_most=True
    )


WIDTH = 50


def statistics() -> fipa.AdditiveStatistics:
    """Those of one client, of rank 4."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(P, 4, generator=generator) / P**0.5
    omega = fipa.random_test_matrix(P, WIDTH, seed=1)
    delta = torch.randn(P, generator=generator)
    return fipa.AdditiveStatistics(factor @ (factor.T @ omega), factor @ (factor.T @ delta), delta, 100, 1, LAYOUT)


def aggregate_stream(clients: int) -> tuple[int, float]:
    """Peak memory and seconds of pooling and solving, clients arriving one by one; runs in a process of its own."""
    one = statistics()

    def run() -> None:
        # every client arrives as tensors of its own, as from a network
        arriving = (
            fipa.AdditiveStatistics(one.products.clone(), one.response.clone(), one.delta.clone(), 100, 1, LAYOUT)
            for _ in range(clients)
        )
        total = fipa.pool(arriving)
        update = fipa.ClientUpdate(total.delta, total.num_examples, total)
        fipa.aggregate(torch.zeros(P), [update], fipa.AdditiveFIPA(damping=DAMPING))

    with PeakMemory() as memory:
        taken, _ = once(run)
    return memory.bytes, taken


def additive_memory() -> Iterator[Record]:
    """The additive rule fed by a generator of clients."""
    peaks, times = {}, {}
    for clients in (10, 100, 1000):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            peaks[clients], times[clients] = fresh.submit(aggregate_stream, clients).result()
    one = statistics()
    update = fipa.ClientUpdate(one.delta, 100, one)
    solving, _ = once(lambda: fipa.aggregate(torch.zeros(P), [update], fipa.AdditiveFIPA(damping=DAMPING)))
    detail = {
        "peak_bytes": peaks,
        "seconds": times,
        "statistics_bytes": one.products.nbytes,
        "solve_gemm_share": 15.0 * P * WIDTH**2 / solving / gemm_speed(),
    }
    yield Record(
        "additive: peak memory of 1000 clients against 10",
        peaks[1000] / peaks[10],
        1.1,
        "x the memory",
        detail,
        at_most=True,
    )
