"""PDEs: derivatives, a round against the plain scheme of `authors` and against FedAvg, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import hessian, jvp, vmap

from bench.authors import PlainFederation
from bench.common import Record, seconds
from bench.fitting import Steps, median
from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.fipa import FIPA
from fipa.clients.descent import Adam
from fipa.clients.gauss_newton import GaussNewton
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.terms import Residual
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.executor import Executor
from fipa.federation.memory import peak_mib, reset_peak
from fipa.federation.problem import Problem
from fipa.federation.stage import Stage
from fipa.models import mlp
from fipa.pde import Field, Points
from fipa.problems.elliptic import elliptic, poisson
from fipa.problems.fitting import misfit

RANK, LOCAL_STEPS = 20, 100
SETTINGS = {2: (2000, 200, 100.0, 50, 2048), 5: (4000, 1000, 2000.0, 400, 4096)}  # points, penalty, rank; MiB allowed


def pdes() -> Iterator[Record]:
    """At the settings of the paper: 2209 parameters, 400 points a client, 100 local steps, rank 20."""
    threads = torch.get_num_threads()
    try:
        yield from _rounds()
        torch.set_num_threads(1)
        yield from _derivatives()
        for dimension in SETTINGS:
            yield _memory(dimension)
    finally:
        torch.set_num_threads(threads)


def _rounds() -> Iterator[Record]:
    plain = PlainFederation(_plain_allen_cahn, 0, steps=LOCAL_STEPS, rank=RANK, step=0.3)
    theirs = median(plain.round)
    plain.close()
    plan = SketchPlan(rank=RANK, solver="krylov", route="rows", iterations=1)
    local = Adam(steps=LOCAL_STEPS)
    sketching = Arm("FIPA", (Stage(FIPA(step=0.3), local, 10**6, plan),), group=1, trace=True)
    averaging = Arm("FedAvg", (Stage(FedAvg(), local, 10**6),), group=1, trace=True)
    newton = Arm("GN", (Stage(FIPA(), GaussNewton(), 10**6, plan, control=StepControl()),), group=1)
    with Executor(elliptic, 2) as executor:
        ours, control, short = (median(Steps(arm, executor).round) for arm in (sketching, averaging, newton))
    detail = {"seconds": ours, "authors_seconds": theirs, "local_steps": LOCAL_STEPS, "rank": RANK}
    yield Record("pde: a round against the authors' scheme, Allen-Cahn", theirs / ours, 30, "x faster", detail)
    yield Record(
        "pde: a FIPA round against a FedAvg round of the same local steps",
        ours / control,
        5,
        "x the time",
        {"seconds": ours, "fedavg_seconds": control},
        at_most=True,
    )
    yield Record(
        "pde: a controlled round with Gauss-Newton clients against the authors' scheme",
        theirs / short,
        None,
        "x faster",
        {"seconds": short},
    )


def _plain_allen_cahn(seed: int) -> Problem:
    """The same problem with derivatives from a Hessian for each point."""
    problem = elliptic(seed)

    def interior(model: Callable[..., Tensor], x: Tensor, f: Tensor) -> Tensor:
        u = model(x)[:, 0]
        bent = vmap(hessian(lambda one: model(one[None])[0, 0]))(x)
        return -bent.diagonal(dim1=1, dim2=2).sum(dim=1) + u**3 - u - f

    clients = []
    for inside, edge in (one.data for one in problem.clients):
        clients.append((Residual(interior, *inside.inputs), Residual(misfit, *edge.inputs, weight=edge.weight)))
    return Problem(problem.model, clients, problem.metric)


def _derivatives() -> Iterator[Record]:
    """The gradient of a residual's loss, by jets, nested JVPs and Hessians."""
    for axes, count in ((1, 400), (5, 4000)):
        model = mlp([axes, 32, 32, 32, 1], generator=torch.Generator().manual_seed(0))
        params = list(model.parameters())
        x = torch.rand(count, axes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

        def gradient(laplacian: Callable[[Any, Tensor], Tensor]) -> float:
            def step() -> Any:
                return torch.autograd.grad(laplacian(model, x).square().mean(), params, allow_unused=True)  # noqa: B023

            return seconds(step, 5)[0]

        jets = gradient(lambda u, x: Field(u, x, laplacian=True).laplacian)
        nested = gradient(_nested)
        dense = gradient(_dense)
        detail = {"seconds": jets, "nested_jvp_seconds": nested, "hessian_seconds": dense}
        name = f"pde: gradient through a Laplacian by jets against nested JVPs, d = {axes}"
        yield Record(name, nested / jets, None, "x faster", detail)


def _nested(u: Callable[..., Tensor], x: Tensor) -> Tensor:
    def along(axis: Tensor) -> Tensor:
        v = axis.expand_as(x)
        return jvp(lambda y: jvp(u, (y,), (v,))[1], (x,), (v,))[1]

    return vmap(along)(torch.eye(x.shape[1], dtype=x.dtype)).sum(dim=0)[:, 0]


def _dense(u: Callable[..., Tensor], x: Tensor) -> Tensor:
    return vmap(hessian(lambda one: u(one[None])[0, 0]))(x).diagonal(dim1=1, dim2=2).sum(dim=1)


def _memory(dimension: int) -> Record:
    """Peak of the whole process over two accelerated rounds at the settings of the shipped experiment."""
    interior, boundary, penalty, rank, limit = SETTINGS[dimension]
    factory = partial(poisson, dimension=dimension, penalty=penalty, points=Points(interior, boundary))
    plan = SketchPlan(rank=rank, solver="krylov", iterations=2)
    local, control = GaussNewton(), StepControl(acceleration=0.75)
    arm = Arm("FIPA", (Stage(FIPA(floor=1e-6), local, 2, plan, control=control),), group=1)
    with Executor(factory) as executor:
        steps = Steps(arm, executor)
        reset_peak(executor.pids)
        steps.round()
        steps.round()
        peak = peak_mib(executor.pids) or float("nan")
    name = f"pde: peak memory of Poisson in {dimension} dimensions"
    return Record(name, peak / 1024, limit / 1024, "GiB", {"rank": rank, "interior": interior}, at_most=True)
