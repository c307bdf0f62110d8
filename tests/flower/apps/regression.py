"""A regression: mean squared error of two numbers."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

LR = 0.05


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def data(partition):
    g = torch.Generator().manual_seed(partition)
    x = torch.randn(50, 3, generator=g) + partition
    y = torch.stack([x.sum(1), x[:, 0] - x[:, 2]], dim=1) / 3
    return DataLoader(TensorDataset(x[:40], y[:40]), 10), DataLoader(TensorDataset(x[40:], y[40:]), 10)


def fit(model, trainloader, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in trainloader:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def judge(model, testloader):
    return sum(mse_loss(model(x), y).item() for x, y in testloader) / len(testloader)


app = ClientApp()


def load(msg):
    model = make()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(msg: Message, context: Context):
    model = load(msg)
    trainloader, _ = data(context.node_config["partition-id"])
    loss = fit(model, trainloader, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(trainloader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = load(msg)
    _, testloader = data(context.node_config["partition-id"])
    metrics = {"eval_loss": judge(model, testloader), "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def server(grid):
    """All of a ServerApp's main function."""
    strategy = FedAvg()
    return strategy.start(
        grid=grid, initial_arrays=ArrayRecord(make().state_dict()), num_rounds=3, train_config=ConfigRecord({"lr": LR})
    )
