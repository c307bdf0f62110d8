"""In the manner of Lightning: the module knows its loss and its optimizer, a trainer does the rest."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

LR = 0.1


class LitClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.head = nn.Linear(6 + 1, 3)
        self.logged = {}

    def forward(self, x, age):
        return self.head(torch.cat([self.encoder(x), age[:, None]], dim=1))

    def step(self, batch, name):
        x, age, y = batch
        loss = cross_entropy(self(x, age), y)
        self.logged[name] = loss.item()
        return loss

    def training_step(self, batch, index):
        return self.step(batch, "train_loss")

    def configure_optimizers(self, lr):
        return torch.optim.Adam(self.parameters(), lr=lr / 10)


class Trainer:
    def fit(self, module, loader, lr):
        optimizer = module.configure_optimizers(lr)
        module.train()
        for index, batch in enumerate(loader):
            optimizer.zero_grad()
            module.training_step(batch, index).backward()
            optimizer.step()
        return module.logged["train_loss"]


def make():
    torch.manual_seed(0)
    return LitClassifier()


def data(partition):
    g = torch.Generator().manual_seed(partition)
    y = (torch.randint(2, (60,), generator=g) + partition) % 3
    x = torch.randn(60, 4, generator=g) + 2.0 * nn.functional.one_hot(y, 4)
    parts = x, torch.rand(60, generator=g), y
    return tuple(DataLoader(TensorDataset(*(t[some] for t in parts)), 10) for some in (slice(40), slice(40, 60)))


def fit(model, trainloader, lr):
    return Trainer().fit(model, trainloader, lr)


@torch.no_grad()
def judge(model, testloader):
    model.eval()
    return sum(model.step(batch, "val_loss").item() for batch in testloader) / len(testloader)


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
