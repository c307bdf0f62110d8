"""What an arm and its stages may say, and how they are built."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from fipa.aggregation.additive import AdditiveFIPA
from fipa.aggregation.fipa import FIPA, CompletedFIPA
from fipa.aggregation.private import PrivateAdditiveFIPA, PrivateFedAvg
from fipa.aggregation.private_shared import PrivateSharedFIPA
from fipa.aggregation.registry import RULES
from fipa.aggregation.rule import needs_of
from fipa.aggregation.shared import SharedFIPA
from fipa.clients.gradient import FullGradient
from fipa.clients.registry import LOCAL_RULES
from fipa.config.kinds import LocalSpec, RuleSpec, Strict, settings_of
from fipa.config.sketch import SketchSpec
from fipa.curvature.sketch import Sketch
from fipa.curvature.summary import CurvaturePlan
from fipa.federation.adaptive import AdaptiveSteps
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.participation import Faults, Participation
from fipa.federation.stage import Stage, check_together
from fipa.federation.trust import TrustRegion


class StageSpec(Strict):
    """Part of an arm; what it does not say is as in the arm.

    Attributes
    ----------
    rounds
        Length of the stage. The last stage may leave it out, and lasts as long as the arm.
    rule
        The server's rule: a table with its `name` and settings.
    inner
        The rule inside of `fedavgm`, `fedadam`, `fedyogi` or `fedadagrad`; FedAvg if it is left out.
    local
        What clients do: a table with its `name` and settings.
    sketch
        What clients report about their curvature.
    step_control
        Let the clients' loss decide on damping or step. On by default for FIPA's rules on least squares.
    trust_region
        Limit the length of steps in a shared basis. On by default for `gradient` clients.
    adaptive_steps
        Let each client choose its number of local steps; needs `sketch.adaptive`.
    lr_scale
        Factor for the clients' learning rate, 1.0 by default.
    evaluate_every
        Rounds from one evaluation to the next, 1 by default.
    damping_decay
        The rule's damping is multiplied by this after every round, 1.0 by default.
    """

    rounds: Annotated[int, Field(ge=1)] | None = None
    rule: RuleSpec | None = None
    inner: RuleSpec | None = None
    local: LocalSpec | None = None
    sketch: SketchSpec | None = None
    step_control: bool | StepControl | None = None
    trust_region: bool | TrustRegion | None = None
    adaptive_steps: AdaptiveSteps | None = None
    lr_scale: Annotated[float, Field(gt=0)] | None = None
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    damping_decay: Annotated[float, Field(gt=0)] | None = None


class ArmSpec(StageSpec):
    """A named way to solve the problem.

    Attributes
    ----------
    name
        What the arm is called in tables, figures and `--arm`.
    stages
        Parts of the arm, one after the other; each may change any of the keys of a stage.
    participation
        Which clients are asked in a round; all by default.
    faults
        A simulated network that drops and delays answers; none by default.
    centralised
        One client holds all data: the reference that no federation can use.
    start
        Round of the warm-up that the arm starts from; 0 is from scratch, its last round is the default.
    params
        Names or patterns of the parameters that are trained, sketched and sent; all by default.
    average
        Number of last models whose mean is evaluated, too; 0 for none.
    """

    name: Annotated[str, Field(min_length=1)]
    stages: tuple[StageSpec, ...] = ()
    participation: Participation = Participation()
    faults: Faults = Faults()
    centralised: bool = False
    start: Annotated[int, Field(ge=0)] | None = None  # round of the warm-up; its last one by default
    params: str | tuple[str, ...] | None = None
    average: Annotated[int, Field(ge=0)] = 10  # the last models whose mean is evaluated, too; 0 for none

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for i, stage in enumerate(self.stages[:-1]):
            if stage.rounds is None:
                raise ValueError(f"stage {i} needs rounds: only the last one may leave its length to the arm")
        for stage in self.stages or (self,):
            _check_stage(self._whole(stage), self)
        return self

    def _whole(self, stage: StageSpec) -> StageSpec:
        """A stage with what it leaves to the arm."""
        own = {name: getattr(self, name) for name in StageSpec.model_fields if name != "rounds"}
        said = {name: getattr(stage, name) for name in stage.model_fields_set if name in StageSpec.model_fields}
        if "rule" in said:
            own["inner"] = None  # it was the arm's rule's
        return StageSpec.model_construct(**(own | said))

    def merged(self, rounds: int) -> list[StageSpec]:
        """Complete stages that last `rounds` together."""
        total = self.rounds or rounds
        if not self.stages:
            return [self._whole(self).model_copy(update={"rounds": total})]
        merged, left = [], total
        for stage in self.stages:
            length = left if stage.rounds is None else min(stage.rounds, left)
            left -= length
            if length:
                merged.append(self._whole(stage).model_copy(update={"rounds": length}))
        return merged

    def build(self, rounds: int, group: int, least_squares: bool) -> Arm:
        """The arm as the engine takes it."""
        stages = tuple(_stage(stage, least_squares) for stage in self.merged(rounds))
        params = (self.params,) if isinstance(self.params, str) else self.params
        return Arm(
            self.name, stages, self.participation, self.faults, self.centralised, group, after=self.start or 0,
            params=params, average=self.average,
        )  # fmt: skip


class WarmupSpec(ArmSpec):
    """What is done once per seed before all arms, which start where it ends."""

    name: Annotated[str, Field(min_length=1)] = "warm-up"
    rounds: Annotated[int, Field(ge=1)]
    average: Annotated[int, Field(ge=0)] = 0


def _check_stage(stage: StageSpec, arm: ArmSpec) -> None:
    if stage.rule is None or stage.local is None:
        raise ValueError("needs a rule and a local rule, here or in [defaults]")
    rule: Any = stage.rule
    sketch = stage.sketch or SketchSpec()
    plan = _plan(rule, stage.inner, sketch)
    if RULES[(stage.inner or rule).name] in (PrivateFedAvg, PrivateAdditiveFIPA, PrivateSharedFIPA):
        _check_private(stage, arm)
    if stage.inner is not None and "inner" not in inspect.signature(RULES[rule.name]).parameters:
        raise ValueError(f"inner belongs to fedavgm, fedadam, fedyogi and fedadagrad, not to {rule.name}")
    if (stage.adaptive_steps or sketch.adaptive) and (plan is None or not issubclass(plan.makes, Sketch)):
        raise ValueError(f"adaptive rank and steps need eigen-sketches, which {rule.name} does not use")
    if stage.adaptive_steps and not sketch.adaptive:
        raise ValueError("adaptive_steps needs sketch.adaptive, whose gradients it uses")
    if stage.damping_decay is not None and getattr(rule, "damping", None) is None:
        raise ValueError(f"damping_decay: {rule.name} has no damping, or none that is given")
    local: Any = stage.local
    if local.name in ("gauss-newton", "gradient") and (stage.adaptive_steps or stage.lr_scale not in (None, 1.0)):
        raise ValueError(
            f"{local.name} clients take one step, without a learning rate: no adaptive_steps, no lr_scale but 1.0"
        )
    if (
        plan is not None
        and plan.makes.is_sum
        and (arm.participation.kind == "weighted" or (arm.faults.late and arm.faults.use_late))
    ):
        raise ValueError(
            f"{(stage.inner or rule).name} pools plain sums of one round: it takes no weighted participation, and no "
            "late answers (set faults.use_late = false)"
        )
    built = _build(RULES, rule)
    if stage.inner is not None:
        _build(RULES, stage.inner)
    trained = _build(LOCAL_RULES, stage.local)
    control = stage.step_control if isinstance(stage.step_control, StepControl) else StepControl()
    if stage.step_control:
        control.parameter(built)
    if stage.trust_region and not isinstance(built, SharedFIPA):
        raise ValueError(f"trust_region is for shared-fipa, not for {rule.name}")
    if stage.trust_region and stage.step_control:
        raise ValueError("trust_region and step_control exclude each other")
    check_together(built, trained, plan, control if stage.step_control else None)
    if stage.damping_decay is not None and stage.step_control is not False and control.parameter(built) == "damping":
        raise ValueError("damping_decay needs step_control = false: else the control chooses the damping itself")


def _check_private(stage: StageSpec, arm: ArmSpec) -> None:
    """Refuse what would tell the server about single clients past the noise, or is not what the accountant assumes."""
    local: Any = stage.local
    if stage.step_control or stage.trust_region:
        name = "step_control" if stage.step_control else "trust_region"
        raise ValueError(f"a private rule takes no {name}: it uses the clients' losses, which have no noise")
    if LOCAL_RULES[local.name].tells:
        raise ValueError(f"a private rule takes no {local.name} clients: what they send to the server has no noise")
    if arm.participation.kind == "weighted" or (arm.faults.late and arm.faults.use_late):
        raise ValueError(
            "a private rule weighs all clients alike, and each has the same chance to take part: no weighted "
            "participation, and no late answers (set faults.use_late = false)"
        )


def _build(makers: Mapping[str, Callable[..., Any]], spec: Any, **more: Any) -> Any:
    return makers[spec.name](**settings_of(spec), **more)


def _plan(rule: Any, inner: Any, sketch: SketchSpec) -> CurvaturePlan | None:
    name: str = (inner or rule).name
    return sketch.plan(needs_of(RULES[name]), name)


def controls_by_default(stage: StageSpec, least_squares: bool) -> bool:
    """Step control is on for FIPA's rules on least squares, unless the experiment says otherwise."""
    rule: Any = stage.rule
    return least_squares and RULES[rule.name] in (FIPA, CompletedFIPA, AdditiveFIPA)


def _trusts(stage: StageSpec) -> bool | TrustRegion:
    """Clients that send gradients in a shared basis have a trust region, unless the experiment says otherwise."""
    local: Any = stage.local
    rule: Any = stage.rule
    free = RULES[rule.name] is not PrivateSharedFIPA
    return LOCAL_RULES[local.name] is FullGradient and free if stage.trust_region is None else stage.trust_region


def _stage(stage: StageSpec, least_squares: bool) -> Stage:
    rule = _build(RULES, stage.rule, **({"inner": _build(RULES, stage.inner)} if stage.inner is not None else {}))
    sketch = stage.sketch or SketchSpec()
    control: StepControl | TrustRegion | bool | None = stage.step_control
    local = _build(LOCAL_RULES, stage.local)
    if isinstance(rule, SharedFIPA) and not control:
        region = _trusts(stage)
        control = TrustRegion() if region is True else region or None
    elif control is None:
        control = controls_by_default(stage, least_squares)
    if control is True:
        control = StepControl()
    assert stage.rounds is not None
    return Stage(
        rule,
        local,
        stage.rounds,
        _plan(stage.rule, stage.inner, sketch),
        stage.lr_scale or 1.0,
        stage.damping_decay or 1.0,
        control or None,
        sketch.adaptive,
        stage.adaptive_steps,
        stage.evaluate_every or 1,
    )


def resolved_arm(arm: ArmSpec, rounds: int, least_squares: bool) -> ArmSpec:
    """The same arm with its length, and with what controls its steps."""
    stages = [
        stage.model_copy(update=_controls(whole, least_squares))
        for stage, whole in zip(arm.stages, arm.merged(sys.maxsize), strict=False)
    ]
    change: dict[str, Any] = {
        "stages": tuple(stages),
        "rounds": sum(stage.rounds or 0 for stage in arm.merged(rounds)),
    }
    return arm.model_copy(update=change if stages else change | _controls(arm, least_squares))


def _controls(stage: StageSpec, least_squares: bool) -> dict[str, Any]:
    """What controls the steps of a stage, said also where the experiment leaves it to the rule."""
    rule: Any = stage.rule
    if issubclass(RULES[rule.name], SharedFIPA) and not stage.step_control:
        return {"step_control": None, "trust_region": _trusts(stage)}
    default = controls_by_default(stage, least_squares)
    return {"step_control": default if stage.step_control is None else stage.step_control}
