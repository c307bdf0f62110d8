"""Who takes part in a round, who drops out, and who answers late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fipa.errors import FipaError
from fipa.randomness import generator_for


@dataclass(frozen=True)
class Participation:
    """Which clients are asked.

    Parameters
    ----------
    kind
        `"full"`: all. `"uniform"`: `count` of them, all alike. `"weighted"`: `count` of them, drawn in proportion to
        their numbers of examples, who then count alike in the average.
    count
        Clients per round.
    """

    kind: Literal["full", "uniform", "weighted"] = "full"
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "full") != (self.count is None):
            raise FipaError('participation: give count with kind "uniform" or "weighted", and only then')
        if self.count is not None and self.count < 1:
            raise FipaError(f"participation: count must be at least 1, got {self.count}")

    def select(self, num_examples: Sequence[int], seed: int, round_number: int) -> list[int]:
        """The clients of this round, in order."""
        if self.count is None:
            return list(range(len(num_examples)))
        if self.count > len(num_examples):
            raise FipaError(f"participation: count = {self.count}, but there are only {len(num_examples)} clients")
        generator = generator_for(seed, "select", round_number)
        chances = torch.ones(len(num_examples), dtype=torch.float64)
        if self.kind == "weighted":
            chances = torch.tensor(num_examples, dtype=torch.float64)
        return sorted(torch.multinomial(chances, self.count, generator=generator).tolist())


@dataclass(frozen=True)
class Share:
    """A part of those who are there, which may be more or fewer from round to round; all alike.

    Parameters
    ----------
    fraction, least
        So many of them, rounded down, but at least `least` and at most all.
    """

    fraction: float = 1.0
    least: int = 1
    kind: ClassVar[str] = "uniform"
    count: ClassVar[None] = None

    def select(self, num_examples: Sequence[int], seed: int, round_number: int) -> list[int]:
        """The clients of this round, in order."""
        there = len(num_examples)
        count = min(there, max(int(there * self.fraction), self.least))
        return Participation("uniform", count).select(num_examples, seed, round_number)


@dataclass(frozen=True)
class Faults:
    r"""A seeded model of an unreliable network.

    Parameters
    ----------
    drop
        Probability that a client of the round never answers.
    late
        Probability that its answer arrives 1 to `max_delay` rounds late, all delays alike.
    max_delay
        The longest delay, in rounds.
    use_late
        Whether late answers, with the sketches they were made with, are used or thrown away.
    discount
        The weight of an answer that is a rounds late is multiplied by this to the power a.
    """

    drop: float = 0.0
    late: float = 0.0
    max_delay: int = 3
    use_late: bool = True
    discount: float = 0.5

    def __post_init__(self) -> None:
        if not (self.drop >= 0 and self.late >= 0 and self.drop + self.late <= 1):
            raise FipaError("faults: drop and late are probabilities that add up to 1 at most")
        if self.max_delay < 1 or not 0 < self.discount <= 1:
            raise FipaError("faults: max_delay must be at least 1, and discount in (0, 1]")

    def delay(self, seed: int, round_number: int, client: int) -> int | None:
        """Rounds until this client's answer arrives: 0 in time, None never."""
        generator = generator_for(seed, "fault", round_number, client)
        chance = float(torch.rand((), generator=generator, dtype=torch.float64))
        if chance < self.drop:
            return None
        if chance < self.drop + self.late:
            return int(torch.randint(1, self.max_delay + 1, (), generator=generator))
        return 0
