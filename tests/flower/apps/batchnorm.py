"""BatchNorm, a normalisation of its own with buffers by other names, and a learning rate that falls."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

LR = 0.1


class Scale(nn.Module):
    """Divides by a moving mean of magnitudes; `table` never changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("magnitude", torch.ones(1))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        if self.training:
            self.magnitude.lerp_(x.detach().abs().mean(), 0.1)
        return self.table * x / self.magnitude


def make():
    torch.manual_seed(0)
    return nn.Sequential(Scale(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(partition):
    g = torch.Generator().manual_seed(partition)
    y = (torch.randint(2, (60,), generator=g) + partition) % 3
    x = torch.randn(60, 4, generator=g) + 2.0 * nn.functional.one_hot(y, 4)
    return DataLoader(TensorDataset(x[:40], y[:40]), 10), DataLoader(TensorDataset(x[40:], y[40:]), 10)


def fit(model, trainloader, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(trainloader))
    model.train()
    for x, y in trainloader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


@torch.no_grad()
def judge(model, testloader):
    model.eval()
    return sum(cross_entropy(model(x), y).item() for x, y in testloader) / len(testloader)


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
