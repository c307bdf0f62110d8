"""What client rules with a loss on the network's features share: MOON and FedRCL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fipa.clients.descent import SGD, Extra, descend
from fipa.clients.rule import LocalWork, Memory
from fipa.errors import FipaError, instead_of


@dataclass(frozen=True)
class FeatureRule(SGD):
    """SGD on cross entropy and something of the features, which are the inputs of the modules named in `levels`."""

    side_by_side: ClassVar[bool] = False  # features of several models cannot be had at once

    levels: tuple[str, ...] = ()

    def levels_of(self, model: nn.Module) -> tuple[str, ...]:
        """Levels of the rule, or the model's own."""
        known = dict(model.named_modules())
        unknown = [level for level in self.levels if level not in known]
        if unknown:
            instead = instead_of(unknown[0], filter(None, known))
            raise FipaError(f"{type(self).__name__}: the model has no module {unknown[0]!r}: {instead}")
        return self.levels or self.default_levels(model)

    @abstractmethod
    def default_levels(self, model: nn.Module) -> tuple[str, ...]:
        """Levels that the rule uses by default."""

    @abstractmethod
    def extra(self, features_at: Callable[[Tensor, Tensor], Sequence[Tensor]], theta: Tensor, memory: Memory) -> Extra:
        """What is added to the loss in a round.

        Parameters
        ----------
        features_at
            `features_at(parameters, x)` gives the features of another model.
        theta, memory
            The broadcast model, and what the client kept of its last round.
        """

    def train(self, work: LocalWork) -> Tensor:  # noqa: D102
        if work.loss != "cross_entropy":
            raise FipaError(f"{type(self).__name__} is for classification: client {work.clients[0]} has another loss")
        levels = self.levels_of(work.model)
        extra = self.extra(work.objective.features_at(levels), work.theta, work.memories[0])
        return descend(
            work.objective, work.theta, self, work.steps, lr=work.lr, generators=work.generators,
            correction=self.corrections(work), extra=extra, levels=levels,
        )  # fmt: skip
