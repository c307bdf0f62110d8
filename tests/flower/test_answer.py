"""Replies that are not what was asked for: every one is refused, and changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import fipa
from fipa.clients.descent import SGD
from fipa.clients.scaffold import Scaffold
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.covariance import CovariancePlan
from fipa.curvature.diagonal import DiagonalPlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation.messages import Bend, Gradient, Loss, Order, Remainder
from fipa.flower import FIPA, Limits, PayloadError
from fipa.flower.answer import Expected, decode, encode_value
from fipa.flower.codec import nbytes
from fipa.flower.local import FIRST, LocalGrid
from fipa.flower.request import Request, question_of, settings_of, tensors_of
from fipa.layout import Layout
from flower.cases import app, initial, network, refusals, same

RULES: dict[str, tuple[Any, Any]] = {
    "none": (fipa.FedAvg(), None),
    "sketch": (fipa.FIPA(damping=0.1), SketchPlan(rank=8)),
    "additive": (fipa.AdditiveFIPA(damping=0.1), AdditivePlan(width=6)),
    "diagonal": (fipa.DiagonalFisher(damping=0.1), DiagonalPlan()),
    "covariance": (fipa.FOOF(damping=0.1), CovariancePlan()),
}
Forge = Callable[[RecordDict], RecordDict]


class Forged(LocalGrid):
    """The last of three nodes sends what `forge` makes of its reply; question and honest reply are kept."""

    def __init__(self, forge: Forge) -> None:
        super().__init__(app(), 3)
        self._forge = forge

    def _answer(self, message: Message, node: int) -> Message:
        reply = super()._answer(message, node)
        if node == FIRST + 2 and "config" in message.content:
            self.kept = Request.of(message.content), reply.content
            reply = Message(self._forge(reply.content), reply_to=message)
        return reply


@cache
def asked(kind: str) -> tuple[RecordDict, Request, Expected]:
    """The honest reply of the third client, and what it must fit."""
    rule, plan = RULES[kind]
    grid = Forged(lambda content: content)
    strategy = FIPA(rule, plan=plan, fraction_evaluate=0.0)
    strategy.start(grid, initial(), 1)
    assert not refusals(strategy)
    layout = Layout.of(dict(network().named_parameters()))
    theta = layout.flatten(dict(network().state_dict()))
    return *reversed(grid.kept), Expected(layout, theta, {}, Limits())


def refusal(kind: str, forge: Forge, limits: Limits = Limits()) -> str:
    """Why a forged reply is refused: the inbox takes any error for a reason."""
    content, request, expected = asked(kind)
    forged = forge(content)
    with pytest.raises(Exception) as error:  # noqa: PT011
        decode(forged, request, replace(expected, limits=limits))
    return str(error.value)


def raw(values: Any, dtype: str = "float32", shape: tuple[int, ...] | None = None, stype: str = "fipa.rows") -> Array:
    words = np.asarray(values, "float32")
    return Array(dtype, words.shape if shape is None else shape, stype, words.tobytes())


def head(content: RecordDict, **change: Any) -> RecordDict:
    changed = dict(content["fipa"]) | {name.replace("_", "-"): value for name, value in change.items()}
    return RecordDict({**content, "fipa": ConfigRecord({k: v for k, v in changed.items() if v is not None})})


def arrays(content: RecordDict, key: str, change: dict[str, Array | None]) -> RecordDict:
    changed = dict(content[key]) | change
    return RecordDict({**content, key: ArrayRecord({k: v for k, v in changed.items() if v is not None})})


P = sum(p.numel() for p in network().parameters())
CASES: list[tuple[str, Forge, str]] = [
    ("sketch", lambda c: head(c, version=1), "version 1"),
    ("sketch", lambda c: head(c, version=True), "version True"),
    ("sketch", lambda c: head(c, round=7), "of round 7, expected 1"),
    ("sketch", lambda c: head(c, round=True), "of round True, expected 1"),
    ("sketch", lambda c: head(c, client=2.0), "of client 2.0, expected 2"),
    ("sketch", lambda c: head(c, client=0), "of client 0, expected 2"),
    ("sketch", lambda c: head(c, num_examples=0), "num-examples = 0"),
    ("sketch", lambda c: head(c, num_examples=10**15), "num-examples"),
    ("sketch", lambda c: head(c, num_examples=1.5), "num-examples"),
    ("sketch", lambda c: head(c, num_examples=True), "num-examples"),
    ("sketch", lambda c: head(c, curvature="diagonal"), "kind 'diagonal', expected 'sketch'"),
    ("sketch", lambda c: head(c, about="{"), "no readable 'about'"),
    ("sketch", lambda c: head(c, about="[" * 100000), "no readable 'about'"),
    ("sketch", lambda c: head(c, about="[]"), "a list as its 'about'"),
    ("sketch", lambda c: head(c, notes="{}"), "a dict as its 'notes'"),
    ("sketch", lambda c: head(c, local_steps=-1), "local-steps = -1"),
    ("sketch", lambda c: head(c, local_steps=1.0), "local-steps = 1.0"),
    ("sketch", lambda c: head(c, loss=math.nan), "loss = nan, expected a finite number"),
    ("sketch", lambda c: head(c, loss="0"), "loss = '0'"),
    ("sketch", lambda c: arrays(c, "message", {"change": raw([0.0] * P)}), "'change' that nobody asked for"),
    ("sketch", lambda c: RecordDict(), "no ConfigRecord 'fipa'"),
    ("sketch", lambda c: RecordDict({"fipa": MetricRecord({"version": 1})}), "no ConfigRecord"),
    ("sketch", lambda c: RecordDict({k: v for k, v in c.items() if k != "update"}), "no ArrayRecord 'update'"),
    ("sketch", lambda c: RecordDict({k: v for k, v in c.items() if k != "curvature"}), "no ArrayRecord"),
    ("sketch", lambda c: RecordDict({**c, "metrics": ConfigRecord()}), "no MetricRecord"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([math.nan] * P)}), "NaN or infinity in its update"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([math.inf] + [0.0] * (P - 1))}), "NaN or infinity"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([1e6] * P)}), "update of size"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([3e38] * P)}), "update"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([0.0] * (P + 1))}), "shape"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([0.0] * P, shape=(P, 10**12))}), "shape"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([0.0] * P, shape=(-P,))}), "shape"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([0.0] * (P - 1), shape=(P,))}), "bytes"),
    ("none", lambda c: arrays(c, "update", {"delta": raw([0.0] * P, dtype="object")}), "format"),
    ("none", lambda c: arrays(c, "update", {"delta": Array(np.zeros(P, "float32"))}), "format 'numpy.ndarray'"),
    ("none", lambda c: arrays(c, "update", {"delta": None}), "no array 'delta'"),
    ("none", lambda c: arrays(c, "update", {"more": raw([0.0])}), "'more' that nobody asked for"),
    ("none", lambda c: arrays(c, "curvature", {"eigenvalues": raw([1.0])}), "nobody asked for"),
    ("none", lambda c: arrays(c, "buffers", {"0.running_mean": raw([1.0])}), "nobody asked for"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvalues": None}), "eigenvalues"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvalues": raw([[1.0]])}), "eigenvalues"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvalues": raw([-1.0] * 8)}), "negative eigenvalue"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvalues": raw([math.nan] * 8)}), "NaN"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvalues": raw([1e30] * 8)}), "limit"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvalues": raw([1.0] * 9), "eigenvectors": raw(np.ones((P, 9)))}),
     "at most 8"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvectors": raw(np.ones((P, 8)))}), "not of length 1"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvectors": raw(np.full((P, 8), np.nan))}), "not of length 1"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvectors": raw(np.zeros((8, P)))}), "shape"),
    ("sketch", lambda c: arrays(c, "curvature", {"eigenvectors": Array("int8", (P, 8), "fipa.rows", bytes(P * 8))}),
     "no scales"),
    ("additive", lambda c: head(c, about=json.dumps({"test-seed": 1})), "test matrix"),
    ("additive", lambda c: arrays(c, "curvature", {"products": raw(np.zeros((P, 7)))}), "shape"),
    ("additive", lambda c: arrays(c, "curvature", {"products": raw(np.full((P, 6), np.inf))}), "NaN or infinity"),
    ("additive", lambda c: arrays(c, "curvature", {"response": raw(np.full(P, 1e14))}), "limit"),
    ("diagonal", lambda c: arrays(c, "curvature", {"values": raw(-np.ones(P))}), "negative diagonal"),
    ("diagonal", lambda c: arrays(c, "curvature", {"values": raw(np.full(P, np.nan))}), "NaN"),
    ("covariance", lambda c: head(c, about="{}"), "nobody asked for"),
    ("covariance", lambda c: head(c, about=json.dumps({"biases": {"9.weight": None}})), "nobody asked for"),
    ("covariance", lambda c: head(c, about=json.dumps({"biases": {"0.weight": "2.bias"}})), "bias of one layer"),
    ("covariance", lambda c: arrays(c, "curvature", {"0.weight": raw(np.ones((2, 2)))}), "shape"),
    ("covariance", lambda c: arrays(c, "curvature", {"0.weight": raw(np.full((5, 5), np.nan))}), "NaN"),
]  # fmt: skip


OTHER_LAYERS: tuple[str, Forge, str] = (  # which only those of others can tell
    "covariance",
    lambda c: RecordDict({**head(c, about='{"biases": {}}'), "curvature": ArrayRecord()}),
    "covariances of other layers",
)


@pytest.mark.parametrize(("kind", "forge", "reason"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_named_reasons(kind: str, forge: Forge, reason: str) -> None:
    assert reason in refusal(kind, forge)


def last_of_each_kind() -> list[tuple[str, Forge, str]]:
    return [*{case[0]: case for case in CASES}.values(), OTHER_LAYERS]


@pytest.mark.parametrize(("kind", "forge", "reason"), last_of_each_kind())
def test_a_refused_reply_does_not_change_the_model(kind: str, forge: Forge, reason: str) -> None:
    """The round ends as one without the third client."""
    rule, plan = RULES[kind]
    silent = LocalGrid(app(), 3, lambda message, k: None if k == 2 and "config" in message.content else 0)
    honest = FIPA(rule, plan=plan, deadline=0.0, grace=0.0, fraction_evaluate=0.0).start(silent, initial(), 1)
    strategy = FIPA(rule, plan=plan, fraction_evaluate=0.0)
    result = strategy.start(Forged(forge), initial(), 1)
    assert same(result.arrays, honest.arrays)
    (refused,) = refusals(strategy)
    assert reason in refused


def scalars() -> st.SearchStrategy[Any]:
    integers = st.integers(-(2**63), 2**63 - 1).filter(lambda n: not 1 <= n <= 10**7)
    return st.one_of(integers, st.floats(), st.text(max_size=8), st.binary(max_size=8), st.booleans())


def odd_arrays() -> st.SearchStrategy[Array]:
    """Whose bytes, shape, dtype or format do not fit."""
    shapes = st.lists(st.integers(-3, 2**40), max_size=4).map(tuple)
    dtypes = st.sampled_from(["float32", "float64", "bfloat16", "int8", "uint64", "object", "U10", ""])
    formats = st.sampled_from(["fipa.rows", "fipa.columns", "numpy.ndarray", "pickle", ""])
    return st.builds(Array, dtypes, shapes, formats, st.binary(max_size=64))


@st.composite
def forgeries(draw: st.DrawFn) -> tuple[str, Forge]:
    kind = draw(st.sampled_from(list(RULES)))
    way = draw(st.sampled_from(["head", "missing head", "missing record", "array", "extra", "numbers", "types"]))
    if way == "head":
        field = draw(st.sampled_from(["version", "round", "client", "num_examples", "curvature"]))
        value = draw(scalars())
        return kind, lambda c: head(c, **{field: value})
    if way == "missing head":
        field = draw(st.sampled_from(["version", "round", "client", "num_examples", "curvature", "about"]))
        return kind, lambda c: head(c, **{field: None})
    if way == "missing record":
        key = draw(st.sampled_from(["fipa", "update", "curvature", "buffers", "metrics"]))
        return kind, lambda c: RecordDict({name: record for name, record in c.items() if name != key})
    if way == "types":
        key = draw(st.sampled_from(["fipa", "update", "curvature", "buffers"]))
        return kind, lambda c: RecordDict({**c, key: MetricRecord({"x": 1.0})})
    place = draw(st.integers(0, 2**31))
    if way == "array":
        array = draw(odd_arrays())
        return kind, lambda c: arrays(c, "update", {"delta": array}) if kind == "none" else swap(c, place, array)
    if way == "extra":
        name, key = draw(st.text(min_size=1, max_size=8)), draw(st.sampled_from(["update", "curvature", "buffers"]))
        array = draw(odd_arrays())
        return kind, lambda c: arrays(c, key, {f"extra {name}": array})
    poison = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return kind, lambda c: poisoned(c, kind, place, poison)


def swap(content: RecordDict, place: int, array: Array) -> RecordDict:
    names = sorted(content["curvature"])
    return arrays(content, "curvature", {names[place % len(names)]: array})


def poisoned(content: RecordDict, kind: str, place: int, poison: float) -> RecordDict:
    """One number of one array is NaN or infinite."""
    key = "update" if kind == "none" or place % 2 else "curvature"
    names = sorted(content[key])
    name = names[(place // 2) % len(names)]
    array = content[key][name]
    words = np.frombuffer(array.data, "<f4").copy()
    words[place % len(words)] = poison
    return arrays(content, key, {name: Array(array.dtype, array.shape, array.stype, words.tobytes())})


@settings(max_examples=220)
@given(forgeries())
def test_forged_replies_are_refused(forgery: tuple[str, Forge]) -> None:
    assert refusal(*forgery)


def test_limits() -> None:
    content = asked("sketch")[0]
    size = nbytes(*content.array_records.values())
    assert size == 4 * (P * 9 + 8)
    for limits, reason in [
        (Limits(rank=7), "at most 7"),
        (Limits(nbytes=size - 1), "more than the limit"),
        (Limits(norm=1e-3), "update of size"),
        (Limits(curvature=1e-6), "curvature of size"),
        (Limits(examples=5), "num-examples"),
    ]:
        assert reason in refusal("sketch", lambda c: c, limits)


def test_requests_survive_the_way() -> None:
    plans = [
        None, SketchPlan(rank=fipa.RelativeThreshold(0.1, 7), sampled_labels=1), SketchPlan(rank=None),
        SketchPlan(rank=fipa.TraceShare(0.9)), AdditivePlan(width=3), DiagonalPlan(max_examples=9), CovariancePlan(),
    ]  # fmt: skip
    for plan in plans:
        order = Order(3, torch.zeros(4), SGD(lr=0.5, steps=2), 0.1, plan, 0.01, gradient_norm=2.0)
        request = Request("work", 3, 1, 2**62, ("a", "b.c"), "int8", ("m",), "checksum", 2, settings_of(order))
        found = Request.of(RecordDict({"fipa": request.record()}))
        assert (found.plan, found.local, found.lr_scale) == (plan, order.local, 0.1)
        assert replace(found, order={}) == replace(request, order={})
    with pytest.raises(PayloadError, match="does not come from"):
        Request.of(RecordDict())


THETA = torch.arange(4.0, dtype=torch.float64)
LAYOUT = Layout(("w",), ((4,),))


@pytest.mark.parametrize("question", [Gradient(THETA), Loss(THETA), Bend(THETA, -THETA), Remainder(THETA, -THETA)])
def test_questions_and_their_answers_survive_the_way(question: Any) -> None:
    request = Request(question.method, 2, 5, params=LAYOUT.names)
    content = RecordDict({"fipa": request.record(), **tensors_of(question, 0)})
    found = question_of(Request.of(content), content, LAYOUT, THETA, None)
    assert type(found) is type(question)
    sent = {name: value for name, value in vars(question).items() if name != "buffers"}  # only apps are sent these
    assert all(torch.equal(getattr(found, name), tensor) for name, tensor in sent.items())
    value = 1.5 if isinstance(question, Loss) else 3 * THETA
    answer = decode(encode_value(request, value), request, Expected(LAYOUT, THETA, {}, Limits()))
    assert torch.equal(torch.as_tensor(answer), torch.as_tensor(value))


def test_orders_with_shared_tensors_and_memories_survive_the_way() -> None:
    rule = Scaffold(lr=0.1, steps=3)
    order = Order(2, THETA, rule, 0.5, SketchPlan(rank=3), 0.25, shared={"variate": 2 * THETA})
    request = Request("work", 2, 5, params=LAYOUT.names, order=settings_of(order))
    content = RecordDict({"fipa": request.record(), **tensors_of(order, 0)})
    memory = {"variate": -THETA}
    found: Any = question_of(Request.of(content), content, LAYOUT, THETA, memory)
    assert (found.local, found.lr_scale, found.plan, found.floor) == (rule, 0.5, SketchPlan(rank=3), 0.25)
    assert torch.equal(found.shared["variate"], 2 * THETA)
    assert found.memories == {5: memory}


@pytest.mark.parametrize(
    ("question", "forge", "reason"),
    [
        (Loss(THETA), lambda c: head(c, answer=None), "answer = None"),
        (Loss(THETA), lambda c: head(c, answer=True), "answer = True"),
        (Gradient(THETA), lambda c: arrays(c, "answer", {"answer": raw([0.0] * 3)}), "shape"),
        (Gradient(THETA), lambda c: arrays(c, "answer", {"answer": raw([math.nan] * 4)}), "NaN or infinity"),
        (Bend(THETA, THETA), lambda c: RecordDict({"fipa": c["fipa"]}), "no ArrayRecord 'answer'"),
    ],
)
def test_forged_answers_to_other_questions(question: Any, forge: Forge, reason: str) -> None:
    request = Request(question.method, 2, 5, params=LAYOUT.names)
    content = encode_value(request, 1.0 if isinstance(question, Loss) else THETA)
    with pytest.raises(PayloadError, match=reason.replace("(", r"\(")):
        decode(forge(content), request, Expected(LAYOUT, THETA, {}, Limits()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_infinite(value: float) -> None:
    """Who answers that a model is ruined must be heard: a refusal would leave the verdict to the others."""
    request = Request(Loss.method, 2, 5, params=LAYOUT.names)
    assert decode(encode_value(request, value), request, Expected(LAYOUT, THETA, {}, Limits())) == math.inf


def test_gauss_newton_clients_may_send_long_updates() -> None:
    long = Limits().longest(THETA, fipa.GaussNewton())
    assert long == Limits().curvature > Limits().longest(THETA, SGD(steps=1)) == 10 * float(THETA.norm())
    assert Limits(norm=3.0).longest(THETA, fipa.GaussNewton()) == 3.0
