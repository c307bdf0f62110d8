"""No training at all: clients send their gradient, and leave the step to the server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.clients.rule import LocalRule, LocalWork
from fipa.curvature.modes import evaluation_mode


@dataclass(frozen=True)
class FullGradient(LocalRule):
    r"""The update is $-g_m$, the negative gradient of the client's loss on all of its data, in eval mode.

    Parameters
    ----------
    augment
        Take gradient and loss on examples that are augmented anew in every round, if the client's data have a way to do
        that: it keeps the model from memorising them. The curvature uses the data as they are.
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
        """The same in parts (M x parts x p) that add up to it: each of a share of the examples.

        There are no more parts than examples, and one of a loss that is a sum of several means.
        """
        objective = work.objective.varied(work.generators) if self.augment else work.objective
        thetas, n, found = work.theta.expand(len(work.clients), -1), objective.lengths[0], []
        parts = 1 if len(objective.lengths) > 1 else min(parts, n)
        with evaluation_mode(work.model):
            for part in range(parts):
                chosen = torch.arange(part, n, parts)
                index = None if parts == 1 else [chosen.expand(len(work.clients), -1)]
                found.append(objective.gradients(thetas, index) * (-len(chosen) / n))
        return torch.stack(found, dim=1)
