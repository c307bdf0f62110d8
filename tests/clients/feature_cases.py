"""A small classifier whose features rules look at, and its training written out in plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.cases import client, network
from fipa import Client, Problem
from fipa.clients.descent import SGD
from fipa.clients.rule import Memory
from fipa.federation.messages import Order
from fipa.federation.site import Site

STEPS, LR = 3, 0.05


def relu_network() -> nn.Sequential:
    model = network(3)
    model[1] = nn.ReLU()
    return model


def site() -> Site:
    clients = [client("cross_entropy", seed, n=8) for seed in (0, 1)]
    return Site(Problem(relu_network(), clients, lambda model: 0.0), 0)


def by_hand(extra: Callable[[nn.Sequential, Tensor, Tensor], Tensor], one: Client) -> Tensor:
    """Full-batch descent on cross entropy and something more."""
    model = relu_network()
    x, y = one.data
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for _ in range(STEPS):
        loss = cross_entropy(model(x), y) + extra(model, x, y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before


def delta(rule: SGD, place: Site, number: int = 0, **order: dict[int, Memory]) -> Tensor:
    (reply,) = place.work((number,), Order(1, place.initial, rule, **order))  # type: ignore[arg-type]
    assert isinstance(reply.update.delta, Tensor)
    return reply.update.delta


def hidden(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[1](model[0](x))


def problem(seed: int) -> Problem:
    clients = [client("cross_entropy", number, n=8) for number in range(3)]
    return Problem(relu_network(), clients, lambda model: 0.0)
