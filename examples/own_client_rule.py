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


@dataclass(frozen=True)
class Scaffnew(fipa.SGD):
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


# a name for messages: a Flower client that imports this file can be told to use it
fipa.register_local_rule("scaffnew", Scaffnew)


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
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    return fipa.Problem(
        model=model,
        clients=[fipa.Residual(residual, x, y) for x, y in data],
        metric=lambda model: (model.weight[0] - best).norm(),
        name="distance to the best model",
    )


def run(rule, rounds=100):
    """A whole federation with that rule; the distance to the best model after the last round."""
    arm = fipa.Arm("mine", (fipa.Stage(fipa.FedAvg(), rule, rounds),))
    with fipa.Executor(problem) as executor:
        federation = fipa.Federation(arm, 0, executor)
        *_, (_, last) = federation.rounds(federation.start())
    return last.metric


if __name__ == "__main__":
    for rule in (fipa.SGD(lr=0.1, steps=10), Scaffnew(lr=0.1, steps=10)):
        print(f"{type(rule).__name__}: {run(rule):.1e} from the best model")
