"""In the manner of the PyTorch quickstart: a small CNN, batches that are dicts."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

LR = 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(36, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        x = nn.functional.dropout(torch.relu(self.fc1(x.flatten(1))), 0.1, self.training)
        return self.fc2(x)


def make():
    torch.manual_seed(0)
    return Net()


def data(partition):
    g = torch.Generator().manual_seed(partition)
    labels = (torch.randint(2, (48,), generator=g) + partition) % 3
    patterns = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(99))
    images = patterns[labels] + torch.randn(48, 1, 8, 8, generator=g)
    rows = [
        {"img": image, "label": label, "id": f"image {k}"}
        for k, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    return DataLoader(rows[:32], batch_size=8), DataLoader(rows[32:], batch_size=8)


def fit(model, trainloader, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for batch in trainloader:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch["img"]), batch["label"])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def judge(model, testloader):
    model.eval()
    return sum(cross_entropy(model(b["img"]), b["label"]).item() for b in testloader) / len(testloader)


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
