"""No training at all: clients tell their gradient, and leave the step to the server."""

from __future__ import annotations

from dataclasses import dataclass

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
        Take the gradient on varied examples, where the client's data have a way to vary them: it then knows more than
        the data as they are. The loss and the curvature stay on the data as they are.
    passes
        So many gradients on examples varied anew, and their mean.
    """

    augment: bool = False
    passes: int = 1

    def __post_init__(self) -> None:
        if self.passes < 1 or (self.passes > 1 and not self.augment):
            raise FipaError(f"FullGradient(passes={self.passes}): at least 1, and more than 1 only with augment")

    def train(self, work: LocalWork) -> Tensor:  # noqa: D102
        thetas = work.theta.expand(len(work.clients), -1)
        varied = work.generators if self.augment else None
        with evaluation_mode(work.model):  # of the same function as the loss and the curvature: without dropout
            total = work.objective.gradients(thetas, None, varied)
            for _ in range(self.passes - 1):
                total = total + work.objective.gradients(thetas, None, varied)
        return -total / self.passes
