"""What a client sends back: encoded by the client, read and checked by the server before it is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.registry import NONE
from fipa.curvature.summary import CurvatureSummary
from fipa.errors import SketchError
from fipa.flower.codec import PayloadError, gentler, nbytes, pack, unpack
from fipa.flower.request import KEY, VERSION, Request, check_version
from fipa.layout import Layout

UPDATE, CURVATURE, BUFFERS, METRICS = "update", "curvature", "buffers", "metrics"


@dataclass(frozen=True)
class Limits:
    """What the server takes from one client at most.

    Parameters
    ----------
    rank
        Eigenpairs of a sketch; None for as many as were asked for.
    nbytes
        Of all arrays together.
    norm
        Of the update; None for ten times that of the parameters, or 10 if they are shorter than 1.
    curvature
        Of the sum of the eigenvalues or of the diagonal, of the norms of additive statistics and covariances, and of
        the averaged buffers.
    examples
        That a client may say it has: they are its weight.
    """

    rank: int | None = None
    nbytes: int = 2**30
    norm: float | None = None
    curvature: float = 1e12
    examples: int = 10**7


@dataclass(frozen=True, eq=False)
class Answer:
    """What a client sends back, as the rest of the library knows it."""

    update: ClientUpdate
    buffers: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def encode(request: Request, answer: Answer) -> RecordDict:
    """The content of a reply; the update is flat."""
    update, summary = answer.update, answer.update.sketch
    assert isinstance(update.delta, Tensor)
    kind, about, curvature = NONE, dict[str, Any](), ArrayRecord()
    if summary is not None:
        kind, about = summary.kind, summary.about()
        curvature = pack(summary.sent(), gentler(request.precision, summary.roughest))
    head: dict[str, Any] = {
        "version": VERSION, "round": request.round_number, "client": request.client, "curvature": kind,
        "num-examples": int(update.num_examples), "about": json.dumps(about),
    }  # fmt: skip
    return RecordDict(
        {
            KEY: ConfigRecord(head), UPDATE: pack({"delta": update.delta}), CURVATURE: curvature,
            BUFFERS: pack(answer.buffers), METRICS: MetricRecord(dict(answer.metrics)),
        }
    )  # fmt: skip


def decode(
    content: RecordDict,
    request: Request,
    layout: Layout,
    theta: Tensor,
    buffers: Mapping[str, tuple[int, ...]],
    limits: Limits,
) -> Answer:
    """Read and check the reply to a request. Whatever is wrong with it is a `PayloadError`."""
    head = _record(content, KEY, ConfigRecord)
    check_version(head)
    for key, expected in (("round", request.round_number), ("client", request.client)):
        if type(head.get(key)) is not int or head[key] != expected:  # True and 1.0 are equal to 1
            raise PayloadError(f"is of {key} {head.get(key)!r}, expected {expected}")
    examples = head.get("num-examples")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 0 < examples <= limits.examples:
        raise PayloadError(f"has num-examples = {examples!r}, expected 1 to {limits.examples}")
    arrays = [_record(content, key, ArrayRecord) for key in (UPDATE, CURVATURE, BUFFERS)]
    size = nbytes(*arrays)
    if size > limits.nbytes:
        raise PayloadError(f"has {size} bytes, more than the limit of {limits.nbytes}")
    delta = unpack(arrays[0], {"delta": (layout.numel,)}, theta.dtype)["delta"]
    _check_size("update", delta.norm(), 10 * max(1.0, float(theta.norm())) if limits.norm is None else limits.norm)
    others = unpack(arrays[2], buffers, theta.dtype)
    for name, tensor in others.items():
        _check_size(f"buffer {name!r}", tensor.abs().sum(), limits.curvature)
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise PayloadError(f"has a negative variance in {name!r}")
    try:
        about = json.loads(str(head.get("about")))
    except (json.JSONDecodeError, RecursionError) as error:
        raise PayloadError("has no readable note about its curvature") from error
    summary = _summary(head.get("curvature"), about, arrays[1], request, layout, delta, examples, limits)
    metrics = finite_numbers(_record(content, METRICS, MetricRecord))
    return Answer(ClientUpdate(delta, examples, summary, request.client), others, metrics)


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What can be averaged: no lists, no NaN."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _summary(
    kind: Any,
    about: Any,
    arrays: ArrayRecord,
    request: Request,
    layout: Layout,
    delta: Tensor,
    examples: int,
    limits: Limits,
) -> CurvatureSummary | None:
    if kind != request.kind or not isinstance(about, dict):
        raise PayloadError(f"has a curvature of kind {kind!r}, expected {request.kind!r}")
    if request.plan is None:
        unpack(arrays, {}, delta.dtype)
        return None
    makes, plan = request.plan.makes, request.plan.at_most(limits.rank)
    found = {name: tuple(array.shape) for name, array in arrays.items()}
    try:
        tensors = unpack(arrays, makes.expected(plan, layout, about, found), delta.dtype)
        summary = makes.restore(tensors, about, plan, layout, examples, delta, request.test_seed)
    except SketchError as error:
        raise PayloadError(str(error)) from error
    for name, size in summary.sizes().items():
        _check_size(name, size, limits.curvature)
    problem = summary.problem(layout.numel)
    if problem:
        raise PayloadError(problem)
    return summary


def _check_size(name: str, size: Tensor, limit: float) -> None:
    if not bool(size.isfinite()):
        raise PayloadError(f"has NaN or infinity in its {name}")
    if float(size) > limit:
        raise PayloadError(f"has a {name} of size {float(size):.3g}, more than the limit of {limit:.3g}")


def _record(content: RecordDict, key: str, kind: type[Any]) -> Any:
    record = content.get(key)
    if not isinstance(record, kind):
        raise PayloadError(f"has no {kind.__name__} {key!r}")
    return record
