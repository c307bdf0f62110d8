"""A curvature of your own, with a rule of your own, in one file: `python examples/own_curvature.py`.

FIPA's clients tell the server how the loss bends along some directions. Here they tell less, one number for each
weight matrix and bias: the mean of its part of the Fisher's diagonal, which is how much the loss bends along one of its
entries. The server averages the updates layer by layer, and listens more to the clients whose loss bends more there.

There are three pieces: the *summary* (what is sent), the *plan* (how clients compute it) and the *rule* (what the
server makes of it). `register_curvature` makes the first two known by their name, so that messages may ask for them.
It shows how, and is no better rule: these clients' losses bend alike, and it does as well as FedAvg.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fipa
from fipa.data import Dirichlet, load

CLIENTS, STEPS, LR = 5, 5, 0.5


@dataclass(frozen=True, eq=False)
class LayerwiseCurvature(fipa.CurvatureSummary):
    """What a client sends: one number for each tensor of parameters, in the order of the layout."""

    values: Tensor
    layout: fipa.Layout
    num_examples: int = 0

    kind = "layerwise"  # its name in messages
    made_by = "LayerwisePlan().compute"  # for the error of a client that sends something else

    def tensors(self) -> dict[str, Tensor]:
        """By the name of their field; these travel, too."""
        return {"values": self.values}

    def flaw(self, parameters: int) -> str | None:
        """Why a rule must not use it, after the client's name: whoever sent it need not be honest."""
        if bool((self.values < 0).any()):
            return "sent a negative curvature: a Fisher matrix has none"
        if len(self.values) != len(self.layout.names):
            return f"sent {len(self.values)} numbers for {len(self.layout.names)} tensors"
        return None

    @classmethod
    def expected(cls, plan: Any, layout: fipa.Layout, about: Mapping[str, Any], found: Any) -> dict[str, Any]:
        """Names and shapes of the arrays that must arrive; others are refused before they are looked at."""
        return {"values": (len(layout.names),)}


@fipa.register_curvature
@dataclass(frozen=True)
class LayerwisePlan(fipa.CurvaturePlan):
    """How clients compute it. Settings have defaults; they travel with the server's question."""

    max_examples: int | None = None
    makes = LayerwiseCurvature

    def compute(
        self, model: nn.Module, layout: fipa.Layout, client: Any, occasion: fipa.Occasion
    ) -> LayerwiseCurvature:
        """`client` has `tensors`, `loss` and `num_examples`; the model has the parameters that the server sent."""
        fisher = fipa.diagonal_fisher(
            model, client.tensors, client.loss, params=layout.names, max_examples=self.max_examples, seed=occasion.seed
        )
        means = [part.mean() for part in layout.unflatten(fisher.values).values()]
        return LayerwiseCurvature(torch.stack(means), layout, fisher.num_examples)


@dataclass(frozen=True)
class LayerwiseFisher:
    """The rule: in each layer, clients count by their curvature there plus `damping`, times their examples."""

    damping: float = 0.01
    step: float = 1.0
    needs = LayerwisePlan  # what clients are asked for

    def __call__(self, cohort: fipa.Cohort, state: Mapping[str, Tensor]) -> fipa.Step:
        """The change of the flat parameters."""
        summaries = cohort.require(LayerwiseCurvature, "LayerwiseFisher")
        weights = torch.tensor(cohort.weights, dtype=summaries[0].values.dtype)[:, None]
        bends = weights * (torch.stack([one.values for one in summaries]) + self.damping)
        shares = bends / bends.sum(dim=0)  # clients x layers
        sizes = torch.tensor(summaries[0].layout.sizes)
        parts = [
            self.step * share.repeat_interleave(sizes) * delta
            for share, delta in zip(shares, cohort.deltas, strict=True)
        ]
        change = torch.stack(parts).sum(dim=0)
        return fipa.Step(change, float(len(sizes)), 1.0, [float(part @ change) for part in parts])


# --- what follows uses it: first in a loop of one's own, then on Flower ---


def network() -> nn.Module:
    """A small classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def pixels(images: Any) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    return images.pixels.flatten(1) / 255, images.labels


def clients() -> list[fipa.Client]:
    """The digits that come with fipa, split so that clients have few classes each."""
    x, y = pixels(load("digits").train)
    parts = Dirichlet(alpha=0.3, smallest=20).split(y, CLIENTS, torch.Generator().manual_seed(0))
    return [fipa.Client((x[part], y[part]), "cross_entropy") for part in parts]


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A client's local training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model: nn.Module) -> float:
    """Share of the test images that are recognised."""
    x, y = pixels(load("digits").test)
    return float((model(x).argmax(dim=1) == y).float().mean())


def in_a_loop(rounds: int, rule: fipa.Rule) -> nn.Module:
    """Federated training by hand, with `fipa.aggregate`."""
    model, plan, everyone = network(), LayerwisePlan(), clients()
    for k in range(rounds):
        theta, updates = fipa.parameters_of(model), []
        layout = fipa.Layout.of(theta)
        for m, client in enumerate(everyone):
            local = copy.deepcopy(model)
            train(local, *client.tensors)
            delta = {name: after - theta[name] for name, after in fipa.parameters_of(local).items()}
            told = plan.compute(model, layout, client, fipa.Occasion(seed=k))
            updates.append(fipa.ClientUpdate(delta, client.num_examples, told, client_id=m))
        model.load_state_dict(fipa.aggregate(theta, updates, rule).theta)
    return model


def on_flower(rounds: int, rule: fipa.Rule) -> nn.Module:
    """The same with Flower (`pip install fipa[flower]`): curvatures travel as messages. Here, within this process."""
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp

    import fipa.flower
    from fipa.flower.local import LocalGrid

    app, everyone = fipa.flower.client(ClientApp()), clients()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = everyone[int(context.node_config["partition-id"])].tensors
        train(model, x, y)
        return fipa.flower.reply(message, context, model, (x, y))

    model = network()
    strategy = fipa.flower.FIPA(rule, fraction_evaluate=0.0)
    result = strategy.start(LocalGrid(app, CLIENTS), ArrayRecord(model.state_dict()), rounds)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    return model


if __name__ == "__main__":
    for rule in (fipa.FedAvg(), LayerwiseFisher()):
        print(f"{rule}: {accuracy(in_a_loop(20, rule)):.1%} of the test images recognised")
    try:
        import flwr  # noqa: F401
    except ImportError:
        print("pip install 'fipa[flower]' to see it on Flower")
    else:
        print(f"on Flower: {accuracy(on_flower(20, LayerwiseFisher())):.1%}")
