"""No training at all: clients tell their gradient, and leave the step to the server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.clients.rule import LocalRule, LocalWork
from fipa.curvature.modes import evaluation_mode
from fipa.errors import FipaError


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

    def split(self, work: LocalWork, parts: int) -> Tensor:
        """The same in parts (M x parts x p) that add up to it: each of a share of the examples."""
        objective = work.objective.varied(work.generators) if self.augment else work.objective
        if parts > 1 and len(objective.lengths) > 1:
            raise FipaError(f"a loss of {len(objective.lengths)} terms has no parts: set SharedFIPA(parts=1)")
        thetas, n, found = work.theta.expand(len(work.clients), -1), objective.lengths[0], []
        with evaluation_mode(work.model):
            for part in range(min(parts, n)):
                chosen = torch.arange(part, n, min(parts, n))
                index = None if parts == 1 else [chosen.expand(len(work.clients), -1)]
                found.append(objective.gradients(thetas, index) * (-len(chosen) / n))
        return torch.stack(found, dim=1)
