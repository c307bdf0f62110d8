"""No training at all: clients tell their gradient, and leave the step to the server."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fipa.clients.rule import LocalRule, LocalWork
from fipa.curvature.modes import evaluation_mode


@dataclass(frozen=True)
class FullGradient(LocalRule):
    r"""The update is $-g_m$, the negative gradient of the client's loss on all of its data, in eval mode.

    Parameters
    ----------
    augment
        Take gradient and loss on examples that are varied anew in every round, where the client's data have a way to
        vary them: a model then learns more than the data as they are. The curvature stays on the data as they are.
    """

    augment: bool = False

    @property
    def varies(self) -> bool:
        """Whether losses are those of varied examples."""
        return self.augment

    def train(self, work: LocalWork) -> Tensor:  # noqa: D102
        objective = work.objective.varied(work.generators) if self.augment else work.objective
        with evaluation_mode(work.model):  # of the same function as the loss and the curvature: without dropout
            return -objective.gradients(work.theta.expand(len(work.clients), -1))
