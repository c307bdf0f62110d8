"""One way to solve a problem: its stages, who takes part, and what is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from fipa.federation.participation import Faults, Participation, Share
from fipa.federation.stage import Stage
from fipa.spill import MEMORY_LIMIT

GROUP = 16  # clients of one form that are trained side by side
AVERAGED = 10  # models in the mean that is evaluated beside the last one


@dataclass(frozen=True)
class Arm:
    """One way to solve a problem.

    Parameters
    ----------
    stages
        What happens, one after the other; the arm is as long as they are together.
    participation, faults
        Who is asked, and who answers.
    centralised
        One client holds all data: the reference that no federation can use.
    group
        Most clients that are trained side by side (`vmap`); 1 for models that this does not work for or pay for.
    after
        Rounds of a warm-up that come before this arm's first.
    start
        File with the parameters that the warm-up ended with.
    params
        Names or patterns of the parameters that are trained, sketched and sent; the others stay as they are.
    average
        Number of last models whose mean is evaluated, too; 0 for none.
    memory_limit
        Bytes of a round's updates that the server holds in memory, see `fipa.aggregate`.
    trace
        Whether the gradient of a client that is trained alone is traced as well, where that pays.
    remembers
        Whether the last update of every client is kept, for a rule that remembers clients and comes later.
    """

    name: str
    stages: tuple[Stage, ...]
    participation: Participation | Share = field(default_factory=Participation)
    faults: Faults = field(default_factory=Faults)
    centralised: bool = False
    group: int = GROUP
    after: int = 0
    start: str | None = None
    params: tuple[str, ...] | None = None
    average: int = AVERAGED
    remembers: bool = False
    memory_limit: int = MEMORY_LIMIT
    trace: bool = False

    @property
    def last(self) -> int:
        """The number of the last round: those of the warm-up count."""
        return self.after + sum(stage.rounds for stage in self.stages)
