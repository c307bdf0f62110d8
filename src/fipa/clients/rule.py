"""What all local rules have in common: what they are given to work with, and what they remember between rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fipa.clients.objective import StackedObjective
from fipa.curvature.sketch import Sketch
from fipa.curvature.terms import LossName

Memory = Mapping[str, Tensor]  # what lasts from round to round, by name


@dataclass(frozen=True, eq=False)
class LocalWork:
    """Clients of one form that a rule trains side by side: M of them.

    Parameters
    ----------
    clients, loss
        Their numbers, and the loss that they have.
    theta, model
        The broadcast model as flat parameters (p), and the module they belong to, which is in training mode.
    objective
        The clients' losses.
    steps, lr
        How many steps each is to take, and how long they are in this round.
    generators
        For what each draws, such as batches.
    memories, shared
        What each client kept of its last round (nothing if it had none), and what the server's part of the rule sent.
    gradients, sketches
        Of each client at the broadcast model (M x p, and M), for rules that need curvature.
    floor
        Curvature that the server's rule adds to each client's in all directions.
    """

    clients: Sequence[int]
    loss: LossName
    theta: Tensor
    model: nn.Module
    objective: StackedObjective
    steps: Sequence[int]
    lr: float
    generators: Sequence[torch.Generator]
    memories: Sequence[Memory]
    shared: Memory
    gradients: Tensor | None = None
    sketches: Sequence[Sketch] = ()
    floor: float = 0.0


class LocalRule(ABC):
    """How clients train. A rule is a frozen dataclass, in one file with its memory and its server's part.

    Rules that go down a gradient inherit from `Descent` or `SGD` and seldom write `train` themselves. For a rule to be
    known by name, in messages and in experiments, see `fipa.register_local_rule`.

    Attributes
    ----------
    side_by_side
        Whether `train` can take several clients at once; else it is given one after the other.
    needs_curvature
        Whether it needs each client's gradient and sketch.
    remembers
        Whether `outcome` gives something to keep.
    tells
        Names of what it gives for the server's part of the rule: tensors as long as the parameters.
    """

    side_by_side: ClassVar[bool] = True
    needs_curvature: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    tells: ClassVar[tuple[str, ...]] = ()

    @property
    def varies(self) -> bool:
        """Whether losses are those of examples that are varied anew in every round, as training sees them."""
        return False

    @abstractmethod
    def train(self, work: LocalWork) -> Sequence[Tensor] | Tensor:
        """The clients' updates (M x p)."""

    def steps_for(self, examples: int) -> int:
        """Number of steps for a client with that many examples."""
        return 1

    def lr_at(self, round_number: int, scale: float = 1.0) -> float:
        """The learning rate of a round, for rules that have one; `scale` is the stage's factor for it."""
        return 1.0

    def outcome(
        self, theta: Tensor, delta: Tensor, steps: int, lr: float, memory: Memory, shared: Memory
    ) -> tuple[Memory, Memory]:
        """What a client keeps until its next round, and what it tells the server's part.

        Parameters
        ----------
        theta, delta
            The broadcast model, and the client's update.
        steps, lr
            How it was trained.
        memory, shared
            As `train` had them.
        """
        return {}, {}

    def start(self, theta: Tensor) -> dict[str, Tensor]:
        """What the server's part sends to all clients before anybody has told it anything."""
        return {}

    def server(self, shared: Memory, messages: Sequence[Memory], clients: int) -> dict[str, Tensor]:
        """The server's part: what it sends to all clients from now on.

        Parameters
        ----------
        shared
            What it sent until now.
        messages
            What the clients of a round told, in the order of the clients.
        clients
            How many there are in the federation, whether they took part or not.
        """
        return dict(shared)
