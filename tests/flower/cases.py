"""A small app, as a user would write it."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fipa.flower

FEATURES, CLASSES = 4, 3


def network() -> nn.Module:
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes a traceback for every kind of device
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def data(partition: int) -> tuple[Tensor, Tensor]:
    """Clients have unlike classes and numbers of examples."""
    generator = torch.Generator().manual_seed(partition)
    n = 20 + 10 * partition
    y = (torch.randint(2, (n,), generator=generator) + partition) % CLASSES
    return torch.randn(n, FEATURES, generator=generator) + 2.0 * nn.functional.one_hot(y, FEATURES), y


def train(model: nn.Module, x: Tensor, y: Tensor, lr: float = 0.1, steps: int = 5) -> float:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def app(make: Any = network) -> ClientApp:
    app = fipa.flower.client(ClientApp())

    @app.train()
    def _(message: Message, context: Context) -> Message:
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        x, y = data(int(context.node_config["partition-id"]))
        loss = train(model, x, y, lr=0.1 * float(message.content["config"]["lr-scale"]))
        return fipa.flower.reply(message, context, model, (x, y), {"train_loss": loss})

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        x, y = data(int(context.node_config["partition-id"]))
        with torch.no_grad():
            z = model.eval()(x)
        numbers = {"accuracy": float((z.argmax(1) == y).float().mean()), "eval_loss": float(cross_entropy(z, y))}
        numbers["num-examples"] = len(y)
        return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)

    return app


def initial(make: Any = network) -> ArrayRecord:
    return ArrayRecord(make().state_dict())


def tensors(record: ArrayRecord) -> dict[str, Tensor]:
    return dict(record.to_torch_state_dict())


def refusals(strategy: fipa.flower.FIPA) -> list[str]:
    """Why answers were not used."""
    return [event["text"] for event in strategy.events if event["text"].startswith("refused")]


def same(a: ArrayRecord, b: ArrayRecord) -> bool:
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
