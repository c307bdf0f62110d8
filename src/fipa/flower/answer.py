"""What a client sends back: encoded by the client, read and checked by the server before it is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.additive import AdditiveStatistics
from fipa.curvature.covariance import InputCovariance
from fipa.curvature.diagonal import DiagonalCurvature
from fipa.curvature.rank import RelativeThreshold, TraceShare
from fipa.curvature.sketch import Sketch
from fipa.curvature.summary import CurvatureSummary
from fipa.federation.plans import AdditivePlan, DiagonalPlan, SketchPlan
from fipa.flower.codec import PayloadError, Precision, nbytes, pack, unpack
from fipa.flower.request import KEY, VERSION, Request, check_version
from fipa.layout import Layout

UPDATE, CURVATURE, BUFFERS, METRICS = "update", "curvature", "buffers", "metrics"
UNIT = 0.05  # how far a column of eigenvectors may be from length 1: int8 takes a little


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
    update, curvature = answer.update, ArrayRecord()
    about: dict[str, Any] = {}
    kind, summary = "none", update.sketch
    assert isinstance(update.delta, Tensor)
    if isinstance(summary, Sketch):
        kind, about = "sketch", {"loss": summary.loss, "trace": summary.trace}
    elif isinstance(summary, AdditiveStatistics):
        kind, about = "additive", {"test-seed": summary.test_seed}
    elif isinstance(summary, DiagonalCurvature):
        kind = "diagonal"
    elif isinstance(summary, InputCovariance):
        kind, about = "covariance", {"biases": {weight: bias for weight, (bias, _) in summary.layers.items()}}
    if isinstance(summary, InputCovariance):
        precision: Precision = "bfloat16" if request.precision == "int8" else request.precision  # stays symmetric
        curvature = pack({weight: matrix for weight, (_, matrix) in summary.layers.items()}, precision)
    elif summary is not None:
        tensors = {name: t for name, t in summary.tensors().items() if name != "delta"}  # which travels anyway
        curvature = pack(tensors, request.precision)
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
    summary = _curvature(head.get("curvature"), about, arrays[1], request, layout, delta, examples, limits)
    metrics = finite_numbers(_record(content, METRICS, MetricRecord))
    return Answer(ClientUpdate(delta, examples, summary, request.client), others, metrics)


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What can be averaged: no lists, no NaN."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _curvature(
    kind: Any,
    about: Any,
    arrays: ArrayRecord,
    request: Request,
    layout: Layout,
    delta: Tensor,
    examples: int,
    limits: Limits,
) -> CurvatureSummary | None:
    plan, dtype, p = request.plan, delta.dtype, layout.numel
    if kind != request.kind or not isinstance(about, dict):
        raise PayloadError(f"has a curvature of kind {kind!r}, expected {request.kind!r}")
    if plan is None:
        unpack(arrays, {}, dtype)
        return None
    summary: CurvatureSummary
    if isinstance(plan, SketchPlan):
        shape = arrays["eigenvalues"].shape if "eigenvalues" in arrays else ()
        rank, most = shape[0] if len(shape) == 1 else -1, _most(plan, limits)
        if rank < 0 or (most is not None and rank > most):
            raise PayloadError(f"has eigenvalues of shape {tuple(shape)}, expected at most {most}")
        tensors = unpack(arrays, {"eigenvectors": (p, rank), "eigenvalues": (rank,)}, dtype)
        lengths = torch.linalg.vector_norm(tensors["eigenvectors"], dim=0)
        if not bool(((lengths - 1).abs() <= UNIT).all()):
            raise PayloadError("has eigenvectors that are not of length 1")
        trace = about.get("trace")
        summary = Sketch(
            **tensors, layout=layout, loss=str(about.get("loss")), num_examples=examples,
            trace=float(trace) if isinstance(trace, int | float) else math.nan,
        )  # fmt: skip
        _check_size("curvature", summary.eigenvalues.sum(), limits.curvature)
    elif isinstance(plan, AdditivePlan):
        if about.get("test-seed") != request.test_seed:
            raise PayloadError(f"used the test matrix of seed {about.get('test-seed')!r}, not {request.test_seed}")
        tensors = unpack(arrays, {"products": (p, plan.width), "response": (p,)}, dtype)
        summary = AdditiveStatistics(
            **tensors, delta=delta, num_examples=examples, test_seed=request.test_seed, layout=layout
        )
        for name, tensor in tensors.items():
            _check_size(name, tensor.norm(), limits.curvature)
    elif isinstance(plan, DiagonalPlan):
        summary = DiagonalCurvature(unpack(arrays, {"values": (p,)}, dtype)["values"], layout, examples)
        _check_size("curvature", summary.values.abs().sum(), limits.curvature)
    else:
        summary = _covariances(about.get("biases"), arrays, layout, dtype, examples, limits)
    problem = summary.problem(p)
    if problem:
        raise PayloadError(problem)
    return summary


def _covariances(
    biases: Any, arrays: ArrayRecord, layout: Layout, dtype: torch.dtype, examples: int, limits: Limits
) -> InputCovariance:
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if not isinstance(biases, dict) or not all(w in shapes and (b is None or b in shapes) for w, b in biases.items()):
        raise PayloadError("has covariances of parameters that nobody asked for")
    if not all(b is None or shapes[b] == shapes[w][:1] for w, b in biases.items()):
        raise PayloadError("has the bias of one layer with the covariance of another")
    sides = {weight: math.prod(shapes[weight][1:]) + (bias is not None) for weight, bias in biases.items()}
    tensors = unpack(arrays, {weight: (side, side) for weight, side in sides.items()}, dtype)
    for weight, tensor in tensors.items():
        _check_size(f"covariance of {weight}", tensor.norm(), limits.curvature)
    return InputCovariance({weight: (biases[weight], tensors[weight]) for weight in biases}, layout, examples)


def _most(plan: SketchPlan, limits: Limits) -> int | None:
    """Eigenpairs that a sketch may have."""
    asked = plan.rank.max_rank if isinstance(plan.rank, RelativeThreshold | TraceShare) else plan.rank
    caps = [cap for cap in (asked, limits.rank) if cap is not None]
    return min(caps) if caps else None


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
