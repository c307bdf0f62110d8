"""The shipped experiments, and what becomes of settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiny import ONE_ARM, write

from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.fipa import FIPA
from fipa.aggregation.registry import RULES
from fipa.clients.registry import LOCAL_RULES
from fipa.config.kinds import specs
from fipa.config.load import OWN_PROBLEM, load, names, tomllib, validate
from fipa.config.schema import Experiment, dump, resolved
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.covariance import CovariancePlan
from fipa.curvature.diagonal import DiagonalPlan
from fipa.curvature.rank import RelativeThreshold, TraceShare
from fipa.curvature.sketch import SketchPlan
from fipa.errors import FipaError
from fipa.federation.control import StepControl
from fipa.federation.trust import TrustRegion

FIPAS = ("fipa", "completed-fipa", "additive-fipa")


def with_arm(text: str) -> Experiment:
    rules = {"rule": {"name": "fedavg"}, "local": {"name": "sgd", "steps": 2}}
    arm = {"name": "A"} | rules | tomllib.loads(text)
    return validate({"rounds": 6, "problem": {"name": "sine"}, "arms": [arm]})


# --- shipped ---


@pytest.mark.parametrize("name", names())
def test_shipped_experiments_build(name: str) -> None:
    experiment = load(name)[1]
    assert experiment.title
    assert experiment.description
    arms = experiment.build(least_squares=True)
    assert [arm.name for arm in arms] == [arm.name for arm in experiment.arms]
    for arm, spec in zip(arms, experiment.arms, strict=True):
        assert arm.last - arm.after == (spec.rounds or experiment.rounds)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("least_squares", [True, False])
def test_resolved_says_all_and_is_input_again(name: str, least_squares: bool) -> None:
    experiment = load(name)[1]
    full = resolved(experiment, least_squares)
    for before, after in zip(experiment.arms, full.arms, strict=True):
        assert after.rounds == (before.rounds or experiment.rounds)
        for stage_before, stage in zip(before.stages or [before], after.stages or [after], strict=True):
            rule: Any = stage.rule or after.rule
            said = stage_before.step_control if stage_before.step_control is not None else before.step_control
            expected = said if said is not None else least_squares and rule.name in FIPAS
            if rule.name == "shared-fipa" and not expected:
                assert (stage.step_control, stage.trust_region is not None) == (None, True)
            else:
                assert stage.step_control == expected
    assert dump(validate(dump(full))) == dump(full) == dump(resolved(full, least_squares))
    assert full.build(least_squares) == experiment.build(least_squares)


def test_own_problems_have_step_control_only_where_it_is_least_squares(tmp_path: Path) -> None:
    experiment = load(str(write(tmp_path, "", "mine.py")))[1]
    assert OWN_PROBLEM not in names()
    on = {arm.name: arm.step_control for arm in resolved(experiment, True).arms}
    assert on.pop("FedAvg") is False
    assert set(on.values()) == {True}
    assert {arm.step_control for arm in resolved(experiment, False).arms} == {False}


# --- step control ---


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("least_squares", [True, False])
def test_step_control_is_on_for_fipa_on_least_squares(rule: str, least_squares: bool) -> None:
    local = 'local = { name = "gradient" }' if rule == "private-shared-fipa" else ""  # it takes no others
    experiment = with_arm(f'rule = {{ name = "{rule}" }}\n{local}')
    (arm,) = experiment.build(least_squares)
    expected = StepControl() if rule in FIPAS and least_squares else None
    assert arm.stages[0].control == expected
    said = resolved(experiment, least_squares).arms[0]
    assert (said.trust_region if rule.endswith("shared-fipa") else said.step_control) == (expected is not None)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("", TrustRegion()), ("trust_region = false", None), ("trust_region = { bad = 0.1 }", TrustRegion(bad=0.1)),
     ("step_control = true", StepControl())],
)  # fmt: skip
def test_gradients_have_a_trust_region(written: str, expected: Any) -> None:
    experiment = with_arm(f'{written}\nrule = {{ name = "shared-fipa" }}\nlocal = {{ name = "gradient" }}')
    assert experiment.build(False)[0].stages[0].control == expected
    again = validate(dump(resolved(experiment, False)))
    assert again.build(False)[0].stages[0].control == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [("false", None), ("true", StepControl()), ("{}", StepControl()), ("{ trials = 3 }", StepControl(trials=3))],
)
@pytest.mark.parametrize("rule", ["fipa", "fedavg"])
def test_step_control_is_as_written(written: str, expected: StepControl | None, rule: str) -> None:
    experiment = with_arm(f'step_control = {written}\nrule = {{ name = "{rule}" }}')
    for least_squares in (True, False):
        assert experiment.build(least_squares)[0].stages[0].control == expected
        again = validate(dump(resolved(experiment, least_squares)))
        assert again.build(not least_squares)[0].stages[0].control == expected


@pytest.mark.parametrize(
    ("rule", "local"), [("fipa", '{ name = "adam", steps = 2 }'), ("additive-fipa", '{ name = "gauss-newton" }')]
)
def test_acceleration_needs_gauss_newton_clients_with_sketches(rule: str, local: str) -> None:
    with pytest.raises(FipaError, match="acceleration needs gauss-newton clients that send eigen-sketches"):
        with_arm(f'step_control = {{ acceleration = 0.75 }}\nrule = {{ name = "{rule}" }}\nlocal = {local}')
    written = 'step_control = { acceleration = 0.5 }\nrule = { name = "fipa" }\nlocal = { name = "gauss-newton" }'
    assert with_arm(written).build(True)[0].stages[0].control == StepControl(acceleration=0.5)


# --- stages ---

WARM_UP = """
rule = { name = "fipa" }
local = { name = "sgd", steps = 2, lr = 0.5 }
sketch = { rank = 7 }
[[stages]]
rounds = 2
rule = { name = "fedavg", step = 2.0 }
[[stages]]
lr_scale = 0.1
"""


def test_stages_take_from_the_arm_what_they_do_not_say() -> None:
    (arm,) = with_arm(WARM_UP).build(least_squares=True)
    first, second = arm.stages
    assert (first.rounds, second.rounds) == (2, 4)
    assert (first.rule, second.rule) == (FedAvg(2.0), FIPA())
    assert (first.plan, second.plan) == (None, SketchPlan(7))
    assert (first.lr_scale, second.lr_scale) == (1.0, 0.1)
    assert (first.control, second.control) == (None, StepControl())
    assert first.local == second.local


@pytest.mark.parametrize(("rounds", "expected"), [(1, [1]), (2, [2]), (3, [2, 1]), (50, [2, 48])])
def test_stages_are_cut_to_the_rounds_there_are(rounds: int, expected: list[int]) -> None:
    experiment = with_arm(WARM_UP).model_copy(update={"rounds": rounds})
    assert [stage.rounds for stage in experiment.build(True)[0].stages] == expected
    again = validate(dump(resolved(experiment, True)))
    assert again.build(True) == experiment.build(True)


def test_resolved_rounds_are_those_that_are_run() -> None:
    experiment = with_arm("stages = [{ rounds = 2 }, { rounds = 1 }]")
    assert experiment.build(True)[0].last == 3
    assert resolved(experiment, True).arms[0].rounds == 3


# --- sketches ---


@pytest.mark.parametrize(
    ("written", "rank"),
    [
        ("{}", 20),
        ("{ rank = 3 }", 3),
        ('{ rank = "full" }', None),
        ("{ threshold = 0.1, max_rank = 4 }", RelativeThreshold(0.1, 4)),
        ("{ trace_share = 0.9 }", TraceShare(0.9)),
    ],
)
def test_ranks(written: str, rank: Any) -> None:
    (arm,) = with_arm(f'rule = {{ name = "fipa" }}\nsketch = {written}').build(True)
    assert arm.stages[0].plan == SketchPlan(rank)


def test_width_is_of_the_additive_rule() -> None:
    (arm,) = with_arm('rule = { name = "additive-fipa" }\nsketch = { width = 9 }').build(True)
    assert arm.stages[0].plan == AdditivePlan(9)


@pytest.mark.parametrize(
    ("rule", "sketch", "reason"),
    [
        (
            "additive-fipa",
            "{ rank = 3, solver = 'exact' }",
            "no sketch.rank, solver: choose one of width, max_examples, ",
        ),
        ("private-additive-fipa", "{ threshold = 0.1 }", "no sketch.threshold: choose one of width"),
        ("fipa", "{ width = 3 }", "fipa takes no sketch.width: choose one of rank"),
        ("diagonal-fisher", "{ width = 3 }", "no sketch.width: choose one of max_examples, sampled_labels"),
        ("foof", "{ width = 3 }", "foof takes no sketch.width"),
        ("fedavg", "{ width = 3 }", "fedavg takes no sketch.width"),
    ],
)
def test_settings_of_another_curvature_are_errors_that_name_them(rule: str, sketch: str, reason: str) -> None:
    with pytest.raises(FipaError, match=reason):
        with_arm(f'rule = {{ name = "{rule}" }}\nsketch = {sketch}')


@pytest.mark.parametrize(
    ("rule", "plan"), [("diagonal-fisher", DiagonalPlan(max_examples=9)), ("foof", CovariancePlan())]
)
def test_what_defaults_say_of_eigen_sketches_passes_by(rule: str, plan: Any) -> None:
    (arm,) = with_arm(f'rule = {{ name = "{rule}" }}\nsketch = {{ rank = 3, max_examples = 9 }}').build(True)
    assert arm.stages[0].plan == plan


@pytest.mark.parametrize("sketch", ["{ rank = 3, max_rank = 2 }", "{ max_rank = 2 }"])
def test_settings_that_would_do_nothing_are_errors(sketch: str) -> None:
    with pytest.raises(ValueError, match="max_rank"):
        with_arm(f'rule = {{ name = "fipa" }}\nsketch = {sketch}')


def test_inner_decides_on_the_curvature() -> None:
    (arm,) = with_arm('rule = { name = "fedadam" }\ninner = { name = "fipa", damping = 2.0 }').build(True)
    assert isinstance(arm.stages[0].plan, SketchPlan)
    assert arm.stages[0].rule.inner == FIPA(2.0)  # type: ignore[attr-defined]


# --- schemas are the classes ---


@pytest.mark.parametrize(("kind", "makers"), [("rule", RULES), ("local", LOCAL_RULES)])
def test_schemas_have_every_setting_with_its_default(kind: str, makers: dict[str, type]) -> None:
    for name, maker in makers.items():
        fields = {f.name: f for f in dataclasses.fields(maker) if f.name != "inner"}
        spec = specs(kind)[name].model_fields
        assert set(spec) == {"name", *fields}
        for key, field in fields.items():
            if field.default is not dataclasses.MISSING:
                assert spec[key].default == field.default


def test_every_setting_reaches_the_rule(tmp_path: Path) -> None:
    text = ONE_ARM.replace(
        'rule = { name = "fedavg" }', 'rule = { name = "fedyogi", lr = 0.5, beta1 = 0.25, tau = 2.0 }'
    )
    stage = load(str(write(tmp_path, text)))[1].build(True)[0].stages[0]
    rule: Any = stage.rule
    assert (rule.lr, rule.beta1, rule.tau) == (0.5, 0.25, 2.0)
    assert (stage.local.lr, stage.local.steps) == (0.1, 2)  # type: ignore[union-attr]
