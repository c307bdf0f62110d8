"""A client rule of your own, with a memory, in one file: `python examples/own_client_rule.py`.

Clients whose data differ pull the model apart: each walks towards its own best model, and the mean of where they arrive
is not the best model for all. Scaffnew (Mishchenko et al., ICML 2022, here with a fixed number of local steps) mends
that without sending anything more. A client compares the model it arrived at with the mean that comes back in the next
round. The difference, by the length of its walk, tells how far its own slope is from everybody's; it adds this up over
the rounds, as its shift, and takes it off every gradient. Once all shifts are right, nobody wants to leave the common
model, and that is the best one.

What a rule says about its memory, each a method that does nothing unless you write it:

- `correction`: what to add to every local gradient, given the memory.
- `outcome`: after training, what the client keeps until its next round, and what it tells the server.
- `start` and `server`: the server's part, what it sends to all clients. `fipa/clients/scaffold.py` is a rule with one.

Everybody must take part in every round: the mean that comes back has to be one that the client was in.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

import fipa
from fipa.clients.descent import SGD
from fipa.clients.registry import register
from fipa.federation.messages import Order
from fipa.federation.site import Site


@dataclass(frozen=True)
class Scaffnew(SGD):
    """SGD along the client's gradient less its shift. Settings are those of SGD; more would be fields here."""

    remembers: ClassVar[bool] = True

    def correction(self, theta, memory, shared):
        """Added to every gradient."""
        return -shift(theta, memory)

    def outcome(self, theta, delta, steps, lr, memory, shared):
        """What the client keeps, by name, and what it tells the server: nothing."""
        rate = torch.tensor(1 / (steps * lr), dtype=theta.dtype)
        return {"shift": shift(theta, memory), "model": theta + delta, "rate": rate}, {}


def shift(theta, memory):
    """The shift at the beginning of a round; a client that is new has no memory."""
    if not memory:
        return torch.zeros_like(theta)
    return memory["shift"] + memory["rate"] * (theta - memory["model"])


register("scaffnew", Scaffnew)  # a name for messages: a Flower client that imports this file can be told to use it


def residual(model, x, y):
    """What should be zero, one number per example."""
    return model(x)[:, 0] - y


def problem(seed):
    """Three clients that disagree about a linear model; the metric is the distance to the best one for all."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for size in (20, 30, 50):
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        data.append((x, x @ torch.randn(3, generator=generator, dtype=torch.float64)))
    xs, ys = zip(*data, strict=True)
    best = torch.linalg.lstsq(torch.cat(xs), torch.cat(ys)[:, None]).solution[:, 0]
    return fipa.Problem(
        model=torch.nn.Linear(3, 1, bias=False).double(),
        clients=[fipa.Residual(residual, x, y) for x, y in data],
        metric=lambda model: (model.weight[0] - best).norm(),
        name="distance to the best model",
    )


def run(rule, rounds=100):
    """A whole federation, to see where memories go: the distance to the best model after the last round."""
    site = Site(problem(0), seed=0)
    theta, memories, shared = torch.zeros_like(site.initial), {}, rule.start(site.initial)
    for k in range(1, rounds + 1):
        order = Order(k, theta, rule, shared=shared, memories=memories)
        replies = [reply for m in range(3) for reply in site.work((m,), order)]
        theta = fipa.aggregate(theta, [reply.update for reply in replies], fipa.FedAvg()).theta
        memories = {reply.update.client_id: reply.memory for reply in replies}
        shared = rule.server(shared, [reply.message for reply in replies], clients=3)
    return site.problem.evaluate(theta)


if __name__ == "__main__":
    for rule in (SGD(lr=0.1, steps=10), Scaffnew(lr=0.1, steps=10)):
        print(f"{type(rule).__name__}: {run(rule):.1e} from the best model")
