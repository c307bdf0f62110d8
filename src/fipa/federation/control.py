r"""Step control after Levenberg and Marquardt, with the clients' loss as the judge.

The server's rule solves a linearised problem, and far from the solution its step may overshoot. So the server proposes
a model; each client of the round reports its loss there, one number; if their weighted mean did not fall, the server
rolls back and proposes a more careful step **from the updates it already has**: no client trains again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from fipa.aggregation.rule import Result, Rule
from fipa.errors import Diverged, FipaError
from fipa.federation.messages import Answers, Ask

T = TypeVar("T")
Conversation = Generator[Ask, Answers, T]  # asks questions, is sent the answers, and ends with a T


@dataclass(frozen=True)
class StepControl:
    r"""Adapts a rule's damping $\beta$ (or, for rules without one, its step $\gamma$) from trial to trial.

    Parameters
    ----------
    adapt
        `"damping"` or `"step"`; `"auto"` takes the damping of rules that have one.
    initial
        First damping or step; None takes the rule's own, or 0.01 where that is zero.
    caution
        After a rejected trial: damping times this, or step divided by it.
    boldness
        After an accepted round: damping times this, or step divided by it (never above the rule's own step). Not with
        `select="best"`, which begins every round alike.
    trials
        Most trials in one round; if none is accepted, the model stays as it is.
    select
        `"first"`: the first trial that lowers the loss is taken, and the next round begins with what served this one.
        `"best"`: every round starts from `initial` (or the rule's own setting) and grows more careful as long as that
        lowers the loss further; the best trial is taken. More trials, but nothing that one odd round can spoil: for
        losses on few or noisy clients.
    acceleration
        Follow the valley's bend (geodesic acceleration, Transtrum and Sethna 2012). The server sends its step v, and
        clients answer with $J_m^\top r''_m$, the second derivative of their residuals along v seen as a gradient. What
        the same rule makes of that, $a = -\frac12 (\hat H + \beta I)^{-1} \sum_m w_m J_m^\top r''_m$, is added to v. A
        step with $2 |a| > $ `acceleration` $|v|$ leaves the region where this expansion holds and is rejected. Needs
        Gauss-Newton clients; 0.75 is a good value, None goes straight.
    corrections
        How often a step d, before it is judged, is led back to the floor of the valley (as the second-order correction
        of constrained optimization). Clients answer with $g_m = J_m^\top r_m(\theta + d)$, what the step leaves of
        their residuals, seen as a gradient where it began, and $-(\hat H + \varphi \beta I)^{-1} \sum_m w_m g_m$ is
        added to d: it takes away the stiff part of the linearisation's error, and the way along the valley stays.
        Needs Gauss-Newton clients, and a damping that is adapted; 3 is a good value.
    firmness
        $\varphi$: how many times the damping of the step that of its corrections is.
    """

    adapt: Literal["auto", "damping", "step"] = "auto"
    select: Literal["first", "best"] = "first"
    initial: float | None = None
    caution: float = 4.0
    boldness: float = 0.5
    trials: int = 8
    acceleration: float | None = None
    corrections: int = 0
    firmness: float = 1e3

    def __post_init__(self) -> None:
        if not self.caution > 1 or not 0 < self.boldness <= 1 or self.trials < 1:
            raise FipaError("step control: caution must exceed 1, boldness be in (0, 1], and trials at least 1")
        if (self.acceleration is not None or self.corrections) and self.select == "best":
            raise FipaError('step control: acceleration and corrections go with select = "first"')
        if self.corrections < 0 or not self.firmness >= 1:
            raise FipaError("step control: corrections must not be negative, and firmness at least 1")
        if self.corrections and self.adapt == "step":
            raise FipaError('step control: corrections need a damping, not adapt = "step"')
        if self.acceleration is not None and not self.acceleration > 0:
            raise FipaError(f"step control: acceleration must be positive, got {self.acceleration}")
        if self.initial is not None and not 0 < self.initial < math.inf:
            raise FipaError(f"step control: initial must be positive, got {self.initial}")

    def parameter(self, rule: Rule) -> str:
        """Which of the rule's settings is adapted; server optimizers call their step `lr`."""
        wanted = {"auto": ("damping", "step", "lr"), "damping": ("damping",), "step": ("step", "lr")}[self.adapt]
        for name in wanted:
            if hasattr(rule, name):
                return name
        raise FipaError(f"step control: {type(rule).__name__} has no {wanted[0]} to adapt")

    def start(self, rule: Rule) -> float:
        """The first value; a step is never above the rule's own."""
        name = self.parameter(rule)
        own = float(getattr(rule, name) or 0.0)
        value = self.initial or own or 0.01
        return value if name == "damping" else min(value, own)


@dataclass(frozen=True, eq=False)
class Trial:
    """What came of the trials of one round."""

    result: Result[Tensor] | None  # None: no trial was accepted
    value: float  # for the next round
    used: float  # in the accepted trial, or in the last, or with select="best" in the first
    trials: int
    loss: float | None = None  # at the accepted model


SMALLEST, LARGEST = 1e-15, 1e15
Propose = Callable[[Rule], Result[Tensor]]
Probe = Callable[[Tensor], Conversation[float]]
Follow = Callable[[Rule, Result[Tensor]], Conversation[tuple[Result[Tensor], float]]]
Settle = Callable[[Rule, Result[Tensor]], Conversation[Result[Tensor]]]


def controlled(
    control: StepControl,
    rule: Rule,
    value: float,
    loss: float,
    propose: Propose,
    probe: Probe,
    follow: Follow,
    settle: Settle,
) -> Conversation[Trial]:
    """Propose steps until the clients' loss falls.

    Parameters
    ----------
    value
        Damping or step to begin with.
    loss
        That of the round's clients at the broadcast model.
    propose
        Aggregates the round's updates by a rule.
    probe
        The same clients' loss at a proposed model.
    follow
        Adds a rule's second-order correction to its result; ends with $2 |a| / |v|$ beside it.
    settle
        Adds to a result what a rule makes of the residuals that it leaves.
    """
    if control.select == "best":
        return (yield from _best(control, rule, loss, propose, probe))
    name = control.parameter(rule)
    careful = control.caution if name == "damping" else 1 / control.caution
    bold = control.boldness if name == "damping" else 1 / control.boldness
    most = LARGEST if name == "damping" else float(getattr(rule, name))
    settings: Any = rule
    for trial in range(1, control.trials + 1):
        reached = math.inf
        try:
            tried = replace(settings, **{name: value})
            result, ratio = propose(tried), 0.0
            if control.acceleration is not None:
                result, ratio = yield from follow(tried, result)
            if ratio <= (control.acceleration or math.inf):
                for _ in range(control.corrections):
                    result = yield from settle(replace(settings, **{name: value * control.firmness}), result)
                reached = yield from probe(result.theta)
        except Diverged:
            reached = math.inf
        if reached < loss:
            return Trial(result, min(max(value * bold, SMALLEST), most), value, trial, reached)
        used, value = value, min(max(value * careful, SMALLEST), most)
    return Trial(None, value, used, control.trials)


def _best(control: StepControl, rule: Rule, loss: float, propose: Propose, probe: Probe) -> Conversation[Trial]:
    """Try from bold to careful, until the loss, once below where it began, rises again."""
    name, value = control.parameter(rule), control.start(rule)
    careful = control.caution if name == "damping" else 1 / control.caution
    settings: Any = rule
    best, result, used, trials = loss, None, value, 0
    while trials < control.trials:
        trials += 1
        try:
            tried = propose(replace(settings, **{name: value}))
            reached = yield from probe(tried.theta)
        except Diverged:
            reached = math.inf
        if reached < best:
            best, result, used = reached, tried, value
        elif result is not None:
            break
        value *= careful
    return Trial(result, control.start(rule), used, trials, None if result is None else best)
