"""What keeps a server from harm where nobody has tuned its rule: short steps, slower clients, cheap curvature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError
from fipa.spill import Passing

SLOWEST = 1 / 1024  # factor for the learning rate
FEWEST = 8  # examples of a sketch
BRIEF = 0.25  # seconds of curvature that are nobody's concern: such short times are noise, and runs should repeat
TRAINING, CURVATURE = "train-seconds", "curvature-seconds"  # what clients report of their time


@dataclass(frozen=True)
class Pace:
    """What the rounds so far have taught the server; part of its state, so that a run that resumes repeats it.

    Attributes
    ----------
    lr_scale
        Factor for the clients' learning rate.
    examples
        Most examples in a sketch; None for as many as the plan says.
    """

    lr_scale: float = 1.0
    examples: int | None = None


@dataclass(frozen=True)
class Safety:
    """Limits of a stage.

    Parameters
    ----------
    longest_step
        Longest step of the server, in multiples of the longest update of its round; None for any length.
    slower
        After a round in which no step lowered the loss, the clients' learning rate is divided by this, and the step
        control starts again. The rate grows again, half as fast, with every round whose first trial is taken, up to its
        old value. 1 leaves it alone.
    share
        How long curvature may take, as a share of the clients' training time. If it takes longer, and longer than a
        quarter of a second, the sketches of the next rounds use fewer examples; None allows any time. The choice is
        part of the state, but another run may choose differently: fix the examples if two runs must agree to the last
        bit.
    """

    longest_step: float | None = 1.0
    slower: float = 3.0
    share: float | None = 1.0

    def __post_init__(self) -> None:
        positive = all(value is None or value > 0 for value in (self.longest_step, self.share))
        if not positive or not self.slower >= 1:
            raise FipaError("Safety: longest_step and share are positive or None, and slower is at least 1")

    def limited(self, apply: Callable[..., Any], theta: Tensor, updates: Sequence[ClientUpdate]) -> Callable[..., Any]:
        """The same function of a rule, with results that are no longer than the limit."""
        if self.longest_step is None:
            return apply
        most = self.longest_step * max(float(delta.norm()) for delta in Passing([update.delta for update in updates]))  # type: ignore[union-attr]

        def shortened(*args: Any) -> Any:
            result = apply(*args)
            length = result.diagnostics.step_length
            if not length > most > 0:
                return result
            diagnostics = replace(result.diagnostics, step_length=most)
            return replace(result, theta=theta + (result.theta - theta) * (most / length), diagnostics=diagnostics)

        return shortened

    def after(self, pace: Pace, trials: int, accepted: bool, metrics: Mapping[str, float], plan: object) -> Pace:
        """The pace of the next round."""
        factor = pace.lr_scale
        if trials and not accepted:
            factor = max(SLOWEST, factor / self.slower)
        elif accepted and trials == 1:
            factor = min(1.0, factor * self.slower**0.5)
        return Pace(factor, self._examples(pace, metrics, plan))

    def _examples(self, pace: Pace, metrics: Mapping[str, float], plan: object) -> int | None:
        now = pace.examples or getattr(plan, "max_examples", None)
        if self.share is None or not now or TRAINING not in metrics or CURVATURE not in metrics:
            return pace.examples
        allowed, taken = self.share * metrics[TRAINING], metrics[CURVATURE]
        if taken <= max(allowed, BRIEF):
            return pace.examples
        return max(FEWEST, int(now * max(0.25, 0.8 * allowed / taken)))


def planned(plan: CurvaturePlan | None, pace: Pace) -> CurvaturePlan | None:
    """A plan at the pace of a round."""
    if plan is None or pace.examples is None or not hasattr(plan, "max_examples"):
        return plan
    settings: Any = plan
    return replace(settings, max_examples=pace.examples)
