"""Local training of the clients in `cases`, by the library and by a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from clients.cases import OUTPUTS, client, gradient_by_hand, layout_of, network, objectives
from fipa import Client
from fipa.clients.descent import Descent, descend
from fipa.clients.objective import StackedObjective


def generators(size: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + m) for m in range(size)]


def start(kind: str = "plain") -> Tensor:
    model = network(OUTPUTS[kind])
    return layout_of(model).flatten(dict(model.named_parameters()))


@cache
def stack_of(kind: str, first: int, size: int) -> StackedObjective:
    """Made once: tracing takes longer than training."""
    return StackedObjective(objectives(network(OUTPUTS[kind]), [client(kind, first + m) for m in range(size)]))


def trained(
    rule: Descent,
    steps: Sequence[int],
    *,
    kind: str = "plain",
    first: int = 0,
    lr: float = 0.05,
    correction: Tensor | None = None,
    clients: list[Client] | None = None,
) -> Tensor:
    size = len(steps)
    stack = StackedObjective(objectives(network(), clients)) if clients else stack_of(kind, first, size)
    rngs = generators(size, first)
    return descend(stack, start(kind), rule, steps, lr=lr, generators=rngs, correction=correction)


def trained_by_hand(
    one: Client,
    optimizer: type[torch.optim.Optimizer],
    steps: int,
    *,
    kind: str = "plain",
    proximal: float = 0.0,
    correction: Tensor | None = None,
    **settings: float,
) -> Tensor:
    """The usual loop: the model's own parameters, backward(), step()."""
    model = network(OUTPUTS[kind])
    layout, begin = layout_of(model), start(kind)
    training = optimizer(model.parameters(), **settings)
    for _ in range(steps):
        gradient = gradient_by_hand(model, layout.names, one)
        theta = layout.flatten(dict(model.named_parameters()))
        gradient = gradient + proximal * (theta - begin)
        if correction is not None:
            gradient = gradient + correction
        for name, parameter in model.named_parameters():
            parameter.grad = layout.unflatten(gradient)[name]
        training.step()
    return layout.flatten(dict(model.named_parameters())) - begin
