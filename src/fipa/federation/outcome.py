"""What the server did with a round's updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fipa.aggregation.rule import Result


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the server did with a round's updates."""

    result: Result[Tensor] | None = None  # None: the model stays as it is
    control_value: float | None = None  # for the next round
    trials: int = 0
    damping: float | None = None
    step: float | None = None
    radius: float | None = None
    rule_state: dict[str, Tensor] | None = None  # None: the result's, or as it was
    loss: float | None = None  # at the model that was broadcast, and after the step
    loss_after: float | None = None
    judged: dict[int, float] = field(default_factory=dict)  # clients' losses at the model of the next round
