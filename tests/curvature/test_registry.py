"""Curvatures by name, their plans as plain data, and one of a user's own in one file."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fipa
from curvature.cases import make, mlp, randn
from fipa.config.sketch import SketchSpec
from fipa.curvature.registry import PLANS, kind_of, plan_of, register, settings_of, summaries
from fipa.curvature.summary import Arrived, CurvaturePlan, CurvatureSummary
from fipa.errors import FipaError, SketchError

SHIPPED = [*PLANS.values()]
HEADS = ("ridge", "class-sums")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_curvature.py"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = dict(PLANS)
    yield
    PLANS.clear()
    PLANS.update(before)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_curvature", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- plans as plain data ---


@pytest.mark.parametrize("cls", SHIPPED)
def test_every_plan_survives_as_json(cls: type[CurvaturePlan]) -> None:
    plan = cls()
    assert plan_of(kind_of(plan), json.loads(json.dumps(settings_of(plan)))) == plan
    assert cls.makes in summaries()
    assert kind_of(plan) == cls.makes.kind


@pytest.mark.parametrize("rank", [3, None, fipa.RelativeThreshold(0.1, 7), fipa.TraceShare(0.9)])
def test_ranks_of_all_kinds_survive(rank: Any) -> None:
    plan = fipa.SketchPlan(rank, "krylov", max_examples=9)
    assert plan_of("sketch", json.loads(json.dumps(settings_of(plan)))) == plan


def test_no_curvature_is_a_kind_too() -> None:
    assert (kind_of(None), settings_of(None), plan_of("none", {})) == ("none", {}, None)


def test_what_is_not_known_here() -> None:
    with pytest.raises(SketchError, match="'kronecker' that is not known here"):
        plan_of("kronecker", {})
    with pytest.raises(SketchError, match="setting 'depth' that is not known"):
        plan_of("sketch", {"depth": 3})


@dataclass(frozen=True)
class Odd(CurvaturePlan):
    shape: Any = (1, 2)
    makes = fipa.DiagonalCurvature

    def compute(self, *_: Any) -> Any:
        raise NotImplementedError


def test_settings_that_cannot_travel() -> None:
    assert settings_of(Odd()) == {"shape": [1, 2]}
    with pytest.raises(SketchError, match=r"shape = .* cannot be sent"):
        settings_of(Odd(torch.ones(2)))
    with pytest.raises(FipaError, match="Odd is not registered"):
        kind_of(Odd())


# --- what cannot be registered ---


def named(kind: Any) -> type[CurvatureSummary]:
    return type("Own", (fipa.DiagonalCurvature,), {"kind": kind})


def planned(makes: Any) -> Any:
    return dataclass(frozen=True)(type("OwnPlan", (Odd,), {"makes": makes}))


@dataclass(frozen=True)
class WithoutDefault(Odd):
    size: int = field(kw_only=True)
    makes = named("sized")


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Odd, "as has that of DiagonalPlan"),
        (planned(named("none")), "a name of its own"),
        (planned(named(3)), "a name of its own"),
        (planned(None), "whose `makes` is a summary"),
        (planned(int), "whose `makes` is a summary"),
        (fipa.FIPA, "derives from CurvaturePlan"),
        (WithoutDefault, "no default for 'size'"),
    ],
)
def test_refused(plan: Any, reason: str) -> None:
    with pytest.raises(FipaError, match=reason):
        register(plan)
    assert list(PLANS.values()) == SHIPPED


# --- what travelled is what was sent ---


def shipped(kind: str) -> tuple[CurvaturePlan, CurvatureSummary]:
    model, x, delta = make(mlp), randn(5, 3), randn(59, seed=2)
    settings = {"sketch": {"rank": 4}, "additive": {"width": 6}}.get(kind, {})
    plan = PLANS[kind](**settings)
    layout = fipa.Layout.of(fipa.parameters_of(model))
    client = fipa.Client((x, randn(5, 5)), "mse")
    if kind in HEADS:  # for one linear layer and classes
        model = torch.nn.Linear(3, 4).double()
        layout = fipa.Layout.of(fipa.parameters_of(model))
        client = fipa.Client((x, torch.tensor([0, 3, 1, 1, 0])), "cross_entropy")
    return plan, plan.compute(model, layout, client, fipa.Occasion(1, 11, delta))


@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind != "basis"])  # that one answers a second question
def test_restored_from_what_is_sent(kind: str) -> None:
    plan, one = shipped(kind)
    sent, about = one.sent(), json.loads(json.dumps(one.about()))
    found = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    assert type(one).expected(plan, one.layout, about, found) == found
    again = type(one).restore(Arrived(sent, about, plan, one.layout, 5, randn(59, seed=2), 11))
    assert again.flaw(59) is None
    assert again.form() == one.form()
    assert again.tensors().keys() == one.tensors().keys()
    for name, tensor in again.tensors().items():
        assert torch.equal(tensor, one.tensors()[name])
        assert tensor.is_contiguous()
    assert all(bool(size.isfinite()) and float(size) >= 0 for size in one.sizes().values())
    poisoned = replace(one, **_poisoned(one))  # type: ignore[type-var]
    assert any(not bool(size.isfinite()) for size in poisoned.sizes().values())
    half = 4 * 3 // 2 if kind == "ridge" else 0  # of a symmetric matrix
    assert one.sent_bytes == one.nbytes - 8 * (59 if one.is_sum else half)


def _poisoned(one: CurvatureSummary) -> dict[str, Any]:
    """The last tensor with NaN in it."""
    if isinstance(one, fipa.InputCovariance):
        return {"layers": {name: (bias, matrix * torch.nan) for name, (bias, matrix) in one.layers.items()}}
    *_, name = one.sent()
    return {name: one.sent()[name] * torch.nan}


def test_a_curvature_that_does_not_say_what_arrives() -> None:
    class Mute(CurvatureSummary):
        """Not meant to travel."""

    with pytest.raises(SketchError, match="has a Mute, which cannot be received: define its classmethod expected"):
        Mute.expected(None, fipa.Layout((), ()), {}, {})


# --- one of a user's own ---


def test_own_curvature_in_a_loop_and_on_flower() -> None:
    pytest.importorskip("flwr")
    own = example()
    rule = own.LayerwiseFisher()
    by_hand, by_message = own.in_a_loop(3, rule), own.on_flower(3, rule)
    assert own.accuracy(by_hand) > 0.7
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(by_message.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_own_rule_by_hand() -> None:
    own = example()
    layout = fipa.Layout(("a", "b"), ((2,), (1,)))
    theta = {"a": torch.zeros(2), "b": torch.zeros(1)}
    updates = [
        fipa.ClientUpdate(torch.tensor([4.0, 4.0, 4.0]), 10, own.LayerwiseCurvature(torch.tensor([3.0, 0.0]), layout)),
        fipa.ClientUpdate(torch.zeros(3), 10, own.LayerwiseCurvature(torch.tensor([1.0, 0.0]), layout)),
    ]
    result = fipa.aggregate(theta, updates, own.LayerwiseFisher(damping=1e-9))
    torch.testing.assert_close(result.theta, {"a": torch.tensor([3.0, 3.0]), "b": torch.tensor([2.0])})
    for values, reason in [([-1.0, 0.0], "a negative curvature"), ([1.0], "1 numbers for 2 tensors")]:
        odd = replace(updates[1], sketch=own.LayerwiseCurvature(torch.tensor(values), layout))
        with pytest.raises(fipa.UpdateError, match=f"client #1 sent {reason}"):
            fipa.aggregate(theta, [updates[0], odd], own.LayerwiseFisher())


def test_own_curvature_in_the_sketch_table_and_in_a_checkpoint(tmp_path: Path) -> None:
    own = example()
    table = SketchSpec(max_examples=7)
    assert table.plan(own.LayerwisePlan, "layerwise") == own.LayerwisePlan(max_examples=7)
    with pytest.raises(ValueError, match=r"layerwise takes no sketch.width: choose max_examples"):
        SketchSpec(width=3).plan(own.LayerwisePlan, "layerwise")
    layout = fipa.Layout(("a",), ((2,),))
    told = own.LayerwiseCurvature(torch.tensor([3.0]), layout, 9)
    torch.save(fipa.ClientUpdate(torch.ones(2), 9, told, 4), tmp_path / "late.pt")
    with torch.serialization.safe_globals([fipa.ClientUpdate, fipa.Layout, *summaries()]):  # as storage reads
        back = torch.load(tmp_path / "late.pt", weights_only=True)
    assert isinstance(back.sketch, own.LayerwiseCurvature)
    assert torch.equal(back.sketch.values, told.values)


def test_a_file_that_is_run_again_registers_again() -> None:
    first, second = example(), example()
    assert first.LayerwisePlan is not second.LayerwisePlan
    assert PLANS["layerwise"] is second.LayerwisePlan
