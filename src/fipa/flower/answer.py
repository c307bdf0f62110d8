"""What a client sends back: encoded by the client, read and checked by the server before it is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.clients.gradient import FullGradient
from fipa.clients.rule import LocalRule
from fipa.coding import BLOCK, Coded, whole_of
from fipa.curvature.registry import kind_of
from fipa.curvature.summary import Arrived, CurvatureSummary
from fipa.errors import SketchError
from fipa.federation.messages import Curve, Loss, Order, Reply, VariedLoss
from fipa.flower.codec import PayloadError, exactly, nbytes, pack, rougher, unpack
from fipa.flower.request import JUDGE, KEY, VERSION, Request, check_version
from fipa.layout import Layout
from fipa.randomness import seed_for

UPDATE, CURVATURE, MESSAGE, BUFFERS, METRICS = "update", "curvature", "message", "buffers", "metrics"
ANSWER = "answer"  # to a question that is no order: one tensor, or one number
LONGEST = 10**4  # characters of a client's notes


@dataclass(frozen=True)
class Limits:
    """What the server takes from one client at most.

    Parameters
    ----------
    rank
        Eigenpairs of a sketch; None for as many as were asked for.
    nbytes
        The size of all arrays together.
    norm
        The norm of the update; None for ten times that of the parameters, or 10 if they are shorter than 1, and for
        Gauss-Newton clients no limit but `curvature`.
    curvature
        The sum of the eigenvalues or of the diagonal, and the norms of additive statistics and covariances, and of
        the averaged buffers.
    examples
        The number that a client may say it has, which is its weight.
    """

    rank: int | None = None
    nbytes: int = 2**30
    norm: float | None = None
    curvature: float = 1e12
    examples: int = 10**7

    def longest(self, theta: Tensor, local: LocalRule | None) -> float:
        """The longest update of these parameters.

        That of a Gauss-Newton client may have any length: the server sees it through the client's curvature. So may a
        gradient.
        """
        if self.norm is not None:
            return self.norm
        newton = local is not None and (local.needs_curvature or isinstance(local, FullGradient))
        return self.curvature if newton else 10 * max(1.0, float(theta.norm()))


def encode(request: Request, reply: Reply) -> RecordDict:
    """The reply to an order as it travels; the update is flat."""
    update, summary = reply.update, reply.update.sketch
    assert isinstance(update.delta, Tensor)
    about, curvature = {} if summary is None else summary.about(), ArrayRecord()
    if summary is not None:
        curvature = pack(summary.sent(), rougher(request.precision, summary.roughest))
    head: dict[str, Any] = {
        "version": VERSION, "round": request.round_number, "client": request.client,
        "curvature": kind_of(request.plan), "num-examples": int(update.num_examples), "about": json.dumps(about),
        "local-steps": int(reply.local_steps), "notes": json.dumps(reply.notes), "remembers": reply.memory is not None,
    }  # fmt: skip
    if reply.loss is not None:
        head["loss"] = float(reply.loss)
    sent = {"delta": update.delta}
    if reply.coded:
        sent = {f"{name}.{i}": t for i, part in enumerate(reply.coded) for name, t in vars(part).items()}
    return RecordDict(
        {
            KEY: ConfigRecord(head), UPDATE: pack(sent), CURVATURE: curvature,
            MESSAGE: pack(dict(reply.message)), BUFFERS: pack(dict(reply.buffers)),
            METRICS: MetricRecord(dict(reply.metrics)),
        }
    )  # fmt: skip


def encode_value(request: Request, value: Tensor | float) -> RecordDict:
    """The reply to another question as it travels."""
    head: dict[str, Any] = {"version": VERSION, "round": request.round_number, "client": request.client}
    if isinstance(value, Tensor):
        return RecordDict({KEY: ConfigRecord(head), ANSWER: pack({ANSWER: value})})
    return RecordDict({KEY: ConfigRecord(head | {ANSWER: float(value)})})


@dataclass(frozen=True, eq=False)
class Expected:
    """What answers must fit.

    Parameters
    ----------
    layout, theta
        The parameters, and their present values.
    buffers
        Shapes of the tensors that are averaged.
    limits
        How large they may be.
    loss_name
        What apps call the loss that they return; None for the one name with "loss" in it.
    """

    layout: Layout
    theta: Tensor
    buffers: Mapping[str, tuple[int, ...]]
    limits: Limits
    loss_name: str | None = None


def decode(content: RecordDict, request: Request, expected: Expected) -> Reply | Tensor | float:
    """Read and check the answer to a request. Whatever is wrong with it is a `PayloadError`."""
    if request.method == JUDGE:
        return judged(content, expected.loss_name)
    head = _head(content, request)
    size = nbytes(*content.array_records.values())
    if size > expected.limits.nbytes:
        raise PayloadError(f"has {size} bytes, more than the limit of {expected.limits.nbytes} (Limits.nbytes)")
    if request.method == Order.method:
        return _reply(content, head, request, expected)
    if request.method in (Loss.method, VariedLoss.method):
        return _loss(head, ANSWER)
    arrays = _record(content, ANSWER, ArrayRecord)
    if request.method == Curve.method:  # who asked looks at what is in it
        return exactly(arrays, {ANSWER: ((request.curve["length"],), torch.uint8)})[ANSWER]
    value = unpack(arrays, {ANSWER: (expected.layout.numel,)}, expected.theta.dtype)[ANSWER]
    _check_size("gradient", value.norm(), expected.limits.curvature)
    return value


def judged(content: RecordDict, name: str | None) -> float:
    """The loss in the metrics that an app's evaluate function returned; infinite where it is no number."""
    numbers = {key: value for record in content.metric_records.values() for key, value in record.items()}
    found = [key for key in numbers if (key == name if name else "loss" in key.lower())]
    if len(found) != 1:
        there = ", ".join(map(repr, numbers)) or "no metrics"
        wanted = repr(name) if name else 'one name with "loss" in it'
        raise PayloadError(
            f"has {there}, expected {wanted}: let @app.evaluate() return the loss, or name it with FIPA(loss_name=...)"
        )
    return _loss(numbers, found[0])


def judgements(
    replies: Iterable[Message], key: str, most: int
) -> tuple[list[tuple[float, dict[str, float]]], list[str]]:
    """Weights and numbers of apps' evaluations, and what is wrong with those that cannot be used."""
    rows, refused = [], []
    for reply in replies:
        reason, weight, numbers = judgement(reply, key, most)
        if reason is None:
            rows.append((float(weight), finite_numbers(numbers)))
        else:
            refused.append(f"refused: the evaluation of node {reply.metadata.src_node_id} {reason}")
    return rows, refused


def judgement(reply: Message, key: str, most: int) -> tuple[str | None, int, dict[str, Any]]:
    """What is wrong with an app's evaluation, its weight by that key and up to a limit, and its numbers."""
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return (reply.error.reason if reply.has_error() else "has not one MetricRecord"), 0, {}
    numbers: dict[str, Any] = dict(next(iter(reply.content.metric_records.values())))
    weight = numbers.pop(key, None)
    if type(weight) is not int or not 0 < weight <= most:
        return f"has {key} = {weight!r}", 0, {}
    return None, weight, numbers


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What can be averaged: no lists, no NaN."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _head(content: RecordDict, request: Request) -> Any:
    head = _record(content, KEY, ConfigRecord)
    check_version(head)
    for key, wanted in (("round", request.round_number), ("client", request.client)):
        if type(head.get(key)) is not int or head[key] != wanted:  # True and 1.0 are equal to 1
            raise PayloadError(f"is of {key} {head.get(key)!r}, expected {wanted}")
    return head


def _reply(content: RecordDict, head: Any, request: Request, expected: Expected) -> Reply:
    limits, theta, p = expected.limits, expected.theta, expected.layout.numel
    examples, steps = head.get("num-examples"), head.get("local-steps")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 0 < examples <= limits.examples:
        raise PayloadError(f"has num-examples = {examples!r}, expected 1 to {limits.examples} (Limits.examples)")
    if type(steps) is not int or not 0 <= steps < 2**31:
        raise PayloadError(f"has local-steps = {steps!r}, expected a number of steps")
    coded = _coded(_record(content, UPDATE, ArrayRecord), request, p)
    if coded:
        delta = whole_of(coded, theta)
    else:
        delta = unpack(_record(content, UPDATE, ArrayRecord), {"delta": (p,)}, theta.dtype)["delta"]
    _check_size("update", delta.norm(), limits.longest(theta, request.local))
    buffers = unpack(_record(content, BUFFERS, ArrayRecord), expected.buffers, theta.dtype)
    for name, tensor in buffers.items():
        _check_size(f"buffer {name!r}", tensor.abs().sum(), limits.curvature)
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise PayloadError(f"has a negative variance in {name!r}")
    told: dict[str, tuple[int, ...]] = {} if request.local is None else dict.fromkeys(request.local.tells, (p,))
    message = unpack(_record(content, MESSAGE, ArrayRecord), told, theta.dtype)
    for name, tensor in message.items():
        _check_size(name, tensor.norm(), limits.curvature)
    summary = _curvature(content, head, request, expected, delta, examples)
    notes = _json(head, "notes", list)
    return Reply(
        ClientUpdate(delta, examples, summary, request.client),
        None if "loss" not in head else _number(head, "loss"),
        steps,
        tuple(note for note in notes if isinstance(note, str) and len(note) < LONGEST),
        message,
        request.round_number if head.get("remembers") is True else None,  # it is with the client, by this number
        buffers,
        finite_numbers(_record(content, METRICS, MetricRecord)),
        coded,
    )


def _coded(arrays: ArrayRecord, request: Request, parameters: int) -> tuple[Coded, ...]:
    """The parts of a gradient that travels in few bits; a client with few examples has fewer parts."""
    parts = int(request.order.get("parts", 0))
    if not parts:
        return ()
    found = len(arrays) // 2
    if not 1 <= found <= parts:
        raise PayloadError(f"has a gradient in {found} parts, expected 1 to {parts}")
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for i in range(found):
        kinds[f"codes.{i}"] = (parameters,), torch.int8
        kinds[f"scales.{i}"] = (-(-parameters // BLOCK),), torch.float32
    tensors = exactly(arrays, kinds)
    return tuple(Coded(tensors[f"codes.{i}"], tensors[f"scales.{i}"]) for i in range(found))


def _curvature(
    content: RecordDict, head: Any, request: Request, expected: Expected, delta: Tensor, examples: int
) -> CurvatureSummary | None:
    arrays, plan, about = _record(content, CURVATURE, ArrayRecord), request.plan, _json(head, "about", dict)
    if head.get("curvature") != kind_of(plan):
        raise PayloadError(f"has a curvature of kind {head.get('curvature')!r}, expected {kind_of(plan)!r}")
    if plan is None:
        unpack(arrays, {}, delta.dtype)
        return None
    plan, layout = plan.at_most(expected.limits.rank), expected.layout
    try:
        found = {name: tuple(array.shape) for name, array in arrays.items()}
        shapes = plan.makes.expected(plan, layout, about, found)
        tensors = unpack(arrays, shapes, delta.dtype)
        shared_seed = seed_for(request.seed, "test matrix", request.round_number)
        summary = plan.makes.restore(Arrived(tensors, about, plan, layout, examples, delta, shared_seed))
    except SketchError as error:
        limited = expected.limits.rank is not None and plan is not request.plan and "at most" in str(error)
        raise PayloadError(f"{error} (Limits.rank)" if limited else str(error)) from error
    for name, size in summary.sizes().items():
        _check_size(name, size, expected.limits.curvature)
    flaw = summary.flaw(layout.numel)
    if flaw:
        raise PayloadError(flaw)
    return summary


def _json(head: Any, key: str, kind: type[Any]) -> Any:
    try:
        value = json.loads(str(head.get(key)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise PayloadError(f"has no readable {key!r}") from error
    if not isinstance(value, kind):
        raise PayloadError(f"has a {type(value).__name__} as its {key!r}")
    return value


def _number(head: Any, key: str) -> float:
    value = head.get(key)
    if type(value) is not float or not math.isfinite(value):
        raise PayloadError(f"has {key} = {value!r}, expected a finite number")
    return value


def _loss(numbers: Any, key: str) -> float:
    """Where a model is so bad that its loss is no number, that is what the server must know."""
    value = numbers.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PayloadError(f"has {key} = {value!r}, expected a number")
    return float(value) if math.isfinite(value) else math.inf


def _check_size(name: str, size: Tensor, limit: float) -> None:
    if not bool(size.isfinite()):
        raise PayloadError(f"has NaN or infinity in its {name}")
    if float(size) > limit:
        raise PayloadError(
            f"has a {name} of size {float(size):.3g}, more than the limit of {limit:.3g}: if that is right, raise "
            f"FIPA(limits=Limits({'norm' if name == 'update' else 'curvature'}=...))"
        )


def _record(content: RecordDict, key: str, kind: type[Any]) -> Any:
    record = content.get(key)
    if not isinstance(record, kind):
        raise PayloadError(f"has no {kind.__name__} {key!r}")
    return record
