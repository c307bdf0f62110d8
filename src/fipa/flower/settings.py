"""Arguments of the strategy: checked one by one, and put together where they are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import fipa
from fipa.aggregation.rule import Rule, plan_for
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.gradient import FullGradient
from fipa.clients.rule import LocalRule
from fipa.curvature.basis import BasisPlan
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.safety import Safety
from fipa.federation.stage import Control, Stage
from fipa.federation.trust import TrustRegion

FLOOR = 0.01
RANK, EXAMPLES = 10, 32  # of the default sketches: about as much work as one epoch on a few hundred images
SEEN = 500  # examples that matrices in a shared basis are of, at most
LEAST = {
    "warmup_rounds": 0,
    "rank": 1,
    "labels": 0,
    "examples": 1,
    "keep": 0,
    "stop_after": 0,
    "seed": 0,
    "memory_limit": 0,
}
KINDS: dict[str, tuple[type, ...]] = {
    "control": (StepControl, TrustRegion, bool),
    "safety": (Safety, bool),
    "loss_name": (str,),
}
CALLED = {"rule": "a rule: make one, as fipa.CompletedFIPA()", "validate": "a function of the arrays"}


def check(given: Mapping[str, Any]) -> None:
    """Refuse the first argument that makes no sense; None stands for one that is left out."""
    there = {name: value for name, value in given.items() if value is not None}
    for name, value in there.items():
        if name in LEAST and not whole(value, LEAST[name]):
            raise FipaError(f"FIPA({name}={value!r}): must be a whole number of at least {LEAST[name]}")
        if name in ("late", "quorum") and not (number(value) and 0 < value <= 1):
            raise FipaError(f"FIPA({name}={value!r}): must be above 0 and at most 1")
        if name == "lr_scale" and not (number(value) and value > 0):
            raise FipaError(f"FIPA({name}={value!r}): must be a positive number")
        if name in ("deadline", "grace") and not (number(value) and value >= 0):
            raise FipaError(f"FIPA({name}={value!r}): seconds must be a number, not negative")
        if name in CALLED and (isinstance(value, type) or not callable(value)):
            raise FipaError(f"FIPA({name}={value!r}): is not {CALLED[name]}")
        if name in KINDS and not isinstance(value, KINDS[name]):
            raise FipaError(f"FIPA({name}={value!r}): takes {' or '.join(kind.__name__ for kind in KINDS[name])}")


def main_stage(
    rule: Rule | None, local: LocalRule | None, plan: CurvaturePlan | None, control: Control | bool | None,
    safety: Safety | bool | None, lr_scale: float, sketches: Mapping[str, int | None],
) -> Stage:  # fmt: skip
    """The stage after the warm-up, with defaults for what is left out; `sketches` has rank, labels and examples."""
    newton, ours = isinstance(local, GaussNewton), rule is None
    if rule is None and isinstance(local, FullGradient):
        rule = fipa.SharedFIPA()
    elif rule is None:
        rule = fipa.FIPA(floor=FLOOR) if newton else fipa.CompletedFIPA(damping=1.0, pull=0.0)
    gradients = isinstance(rule, fipa.SharedFIPA) and isinstance(local, FullGradient)
    gradients = gradients and not isinstance(rule, fipa.PrivateSharedFIPA)  # nobody judges its steps
    if control is None:
        control = ours or gradients
    if control is True and gradients:
        control, safety = TrustRegion(), None
    elif control is True:
        control = StepControl(select="best", initial=FLOOR) if newton else StepControl()
        if ours and not newton:
            control = StepControl(adapt="step", caution=3.0, boldness=1 / 3, trials=4)
    if isinstance(safety, bool):
        safety = Safety() if safety and ours and not newton else None
    if lr_scale != 1.0 and isinstance(local, GaussNewton | FullGradient):
        raise FipaError(f"FIPA(lr_scale={lr_scale}): {local!r} clients take one step, without a learning rate")
    given = {name: value for name, value in sketches.items() if value is not None}
    if given and isinstance(rule, fipa.SharedFIPA):
        raise FipaError(
            f"FIPA({next(iter(given))}=...) is for sketches, and here clients share a basis: its size is that of the "
            "rule, FIPA(fipa.SharedFIPA(columns=...), local=...)"
        )
    sketched = isinstance(plan_for(rule), SketchPlan) and not newton
    if given and (plan is not None or not sketched):
        raise FipaError(
            f"FIPA({next(iter(given))}=...) is for the sketches of clients that train: give plan=... instead"
        )
    if safety is not None and "examples" in given:
        safety = replace(safety, share=None)
    if plan is None and (given or (ours and sketched)):
        labels = given.get("labels", 1) or None
        plan = SketchPlan(given.get("rank", RANK), max_examples=given.get("examples", EXAMPLES), sampled_labels=labels)
    if plan is None and gradients:
        plan = BasisPlan(max_examples=SEEN, sampled_labels=1)
    plan = plan_for(rule) if plan is None else plan
    return Stage(rule, local, 1, plan, lr_scale, control=control or None, safety=safety)


def warmup_stage(rounds: int, rule: Rule | None, local: LocalRule | None, main: LocalRule | None) -> Stage | None:
    """The warm-up, if there is one; `main` is how clients train after it."""
    said = [name for name, value in (("warmup_rule", rule), ("warmup_local", local)) if value is not None]
    if said and not rounds:
        raise FipaError(f"FIPA({said[0]}=...) is for a warm-up, and there is none: give warmup_rounds=...")
    if rounds and main is not None and local is None:
        raise FipaError(
            f"FIPA(warmup_rounds={rounds}, local={main!r}): say how these clients train in the warm-up, too, as "
            "warmup_local=fipa.SGD(lr=0.1, epochs=1)"
        )
    first = fipa.FedAvg() if rule is None else rule
    return Stage(first, local, rounds, plan_for(first)) if rounds else None


def settings_of(arm: Arm) -> tuple[dict[str, str], dict[str, str]]:
    """What of an arm must not change between a checkpoint and its use, and what may."""
    fixed = {}
    for i, stage in enumerate(arm.stages):
        fixed[f"rule of stage {i}"] = type(stage.rule).__name__
        fixed[f"local rule of stage {i}"] = type(stage.local).__name__
        if stage is not arm.stages[-1]:
            fixed[f"rounds of stage {i}"] = repr(stage.rounds)
    free = {f"stage {i}": repr(stage) for i, stage in enumerate(arm.stages)}
    return fixed, free | {"participation": repr(arm.participation)}


def whole(value: Any, least: int) -> bool:
    """Whether this is a whole number of at least that."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number(value: Any) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
