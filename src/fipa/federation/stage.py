"""What a round is made of, and when it changes: warm-up with one rule, then another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fipa.aggregation.fipa import FIPA, CompletedFIPA
from fipa.aggregation.private_shared import PrivateSharedFIPA
from fipa.aggregation.rule import Rule
from fipa.aggregation.shared import SharedFIPA
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.gradient import FullGradient
from fipa.clients.rule import LocalRule
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.control import StepControl
from fipa.federation.safety import Safety
from fipa.federation.trust import TrustRegion
from fipa.randomness import seed_for

Control = StepControl | TrustRegion


@dataclass(frozen=True)
class Stage:
    """A number of rounds with the same rules.

    Parameters
    ----------
    rule, local, plan
        What the server does, what the clients do (None leaves it to them), and what they report about their curvature.
    rounds
        Length of this stage.
    lr_scale
        Multiplies the clients' learning rate.
    damping_decay
        The rule's damping is multiplied by this after every round of the stage.
    control
        Adapts damping or step to the clients' reported loss; for `SharedFIPA` also a `TrustRegion`.
    adaptive_rank, adaptive_steps
        Let each client choose its rank and its number of local steps.
    evaluate_every
        Rounds from one evaluation to the next; the stage's last round is always evaluated.
    safety
        Limits for rules and clients that nobody has tuned.
    """

    rule: Rule
    local: LocalRule | None
    rounds: int
    plan: CurvaturePlan | None = None
    lr_scale: float = 1.0
    damping_decay: float = 1.0
    control: Control | None = None
    adaptive_rank: AdaptiveRank | None = None
    adaptive_steps: AdaptiveSteps | None = None
    evaluate_every: int = 1
    safety: Safety | None = None

    def __post_init__(self) -> None:
        if self.evaluate_every < 1:
            raise FipaError(f"evaluate_every must be at least 1, got {self.evaluate_every}")
        check_together(self.rule, self.local, self.plan, self.control)

    @property
    def sums(self) -> bool:
        """Whether the curvature that clients send is of use in one round's sum only."""
        return self.plan is not None and self.plan.makes.is_sum

    def evaluates(self, place: int) -> bool:
        """Whether the model is evaluated after round `place` of this stage, counted from 0."""
        return (place + 1) % self.evaluate_every == 0 or place + 1 == self.rounds

    def rule_at(self, place: int, seed: int) -> Rule:
        """The rule in round `place` of this stage, counted from 0, in the run with that seed."""
        rule: Any = self.rule
        if getattr(rule, "seed", None) is not None:  # of a private rule's noise: runs must not share it
            rule = replace(rule, seed=seed_for(rule.seed, f"noise of run {seed}"))
        if self.damping_decay == 1.0:
            return rule
        if rule.damping is None:
            raise FipaError("damping_decay: the rule has no damping that is given")
        return replace(rule, damping=rule.damping * self.damping_decay**place)


def check_together(rule: Rule, local: LocalRule | None, plan: CurvaturePlan | None, control: Control | None) -> None:
    """Refuse settings of server and clients that only work in pairs."""
    newton = isinstance(local, GaussNewton)
    if isinstance(control, StepControl) and (control.acceleration is not None or control.corrections):
        sketches = isinstance(rule, FIPA | CompletedFIPA) and isinstance(plan, SketchPlan)
        if not newton or not sketches:
            name = "corrections" if control.acceleration is None else "acceleration"
            raise FipaError(f"step_control.{name} needs gauss-newton clients that send eigen-sketches")
    gradients = isinstance(local, FullGradient)
    if isinstance(control, TrustRegion) and not isinstance(rule, SharedFIPA):
        raise FipaError(f"a trust region is for SharedFIPA, not for {type(rule).__name__}: use step control")
    if isinstance(control, TrustRegion) and not gradients:
        raise FipaError(
            "a trust region is for clients that send gradients: give clients that train step control instead, or none "
            "(trust_region = false)"
        )
    if isinstance(rule, PrivateSharedFIPA) and (control is not None or not gradients):
        raise FipaError(
            "PrivateSharedFIPA takes clients that send gradients, local=fipa.FullGradient(), and no control of its "
            "steps: the clients' losses have no noise"
        )
    if isinstance(rule, SharedFIPA) and plan is None:
        raise FipaError("SharedFIPA needs to know how clients compute their curvature: give plan=fipa.BasisPlan()")
    if isinstance(rule, SharedFIPA) and local is None:
        raise FipaError("SharedFIPA asks clients on two trips: say how they train, as local=fipa.FullGradient()")
    if isinstance(rule, SharedFIPA) and not gradients and (rule.weight_decay or rule.radius is not None):
        raise FipaError("SharedFIPA's weight_decay and radius are for clients that send gradients: leave them out")
    if isinstance(local, GaussNewton):
        local.check_floor(floor_of(rule))


def floor_of(rule: Rule) -> float:
    """Curvature that a rule, or the one inside it, adds to each client's in all directions: orders carry it."""
    inner: Rule | None = getattr(rule, "inner", None)
    floor: float = getattr(rule, "floor", 0.0)
    return floor if floor or inner is None else floor_of(inner)


def stage_at(stages: Sequence[Stage], round_number: int) -> tuple[Stage, int]:
    """The stage of a round (counted from 1), and the round's place in it (from 0)."""
    place = round_number - 1
    for stage in stages:
        if place < stage.rounds:
            return stage, place
        place -= stage.rounds
    raise FipaError(f"round {round_number} is beyond the last stage")
