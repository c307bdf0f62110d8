"""The default strategy where it once did harm: `python docs/results/safety.py` runs what safety.csv lacks.

Five clients with 160 images of two classes of CIFAR-10 each, and 40 more to evaluate on, as an app has them: the
network of Flower's quickstart, one epoch of SGD with momentum. Training with FedAvg stops at 29 %. From there `FIPA()`,
as it comes, for this app and for one that gives an objective in the place of its training, stands beside FedAvg with
the app's learning rate and with a tenth of it, after 20 rounds and after as many rounds as take FIPA's bytes, up and
down. Needs CIFAR-10 (`fipa data get cifar10`), and some twenty minutes on a core.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fipa
from fipa.data import load
from fipa.flower import FIPA, client, reply
from fipa.flower.local import LocalGrid

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ("arm", "seed", "rounds", "mib", "start", "last", "lowest", "loss_start", "loss_last", "curvature_share")
ARMS = ("FIPA()", "FIPA(), objective", "FedAvg", "FedAvg, lr/10")
SEEDS, CLIENTS, ROUNDS, LR, TARGET = range(5), 5, 20, 0.03, 0.29
Data = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A CNN for 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x))).flatten(1)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


SIZE = 4 * sum(p.numel() for p in Net().parameters()) / 2**20  # MiB of a model


@cache
def images(seed: int) -> tuple[list[tuple[Data, Data]], Data]:
    """Each client's images to train and to evaluate on, and 2000 of the test set."""
    everything, g = load("cifar10"), torch.Generator().manual_seed(seed)

    def scaled(part: Any, chosen: Tensor) -> Data:
        return part.pixels[chosen].float() / 127.5 - 1, part.labels[chosen].long()

    clients, classes = [], torch.randperm(10, generator=g)
    for own in classes.split(2):
        found = [(everything.train.labels == label).nonzero()[:, 0] for label in own]
        mine = torch.cat([there[torch.randperm(len(there), generator=g)[:100]] for there in found])
        mine = mine[torch.randperm(200, generator=g)]
        clients.append((scaled(everything.train, mine[:160]), scaled(everything.train, mine[160:])))
    return clients, scaled(everything.test, torch.randperm(10_000, generator=g)[:2000])


def app(seed: int, objective: bool = False) -> ClientApp:
    """As a user has it: with training of its own, or with an objective."""

    def own(context: Context) -> tuple[nn.Module, Data]:
        return Net(), images(seed)[0][int(context.node_config["partition-id"])][0]

    app = client(ClientApp(), objective=own if objective else None)

    def loaded(message: Message) -> nn.Module:
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    def train(message: Message, context: Context) -> Message:
        model, config = loaded(message), message.content["config"]
        partition = int(context.node_config["partition-id"])
        x, y = images(seed)[0][partition][0]
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        g = torch.Generator().manual_seed(10_000 * seed + 10 * config["server-round"] + partition)
        for batch in torch.randperm(len(x), generator=g).split(32):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        return reply(message, context, model, (x, y))

    if not objective:
        app.train()(train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        x, y = images(seed)[0][int(context.node_config["partition-id"])][1]
        with torch.no_grad():
            numbers = {"eval_loss": float(cross_entropy(loaded(message)(x), y)), "num-examples": len(y)}
        return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)

    return app


def judged(seed: int, when: Callable[[int], bool]) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Accuracy and loss on the test set, in some rounds."""
    x, y = images(seed)[1]

    def evaluate(k: int, arrays: ArrayRecord) -> MetricRecord | None:
        if not when(k):
            return None
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            z = model(x)
        return MetricRecord({"accuracy": float((z.argmax(1) == y).float().mean()), "loss": float(cross_entropy(z, y))})

    return evaluate


def started(seed: int) -> ArrayRecord:
    """FedAvg with the app's learning rate, four rounds at a time, up to 29 %."""
    torch.manual_seed(seed)
    arrays = ArrayRecord(Net().state_dict())
    for part in range(100):
        strategy = FIPA(fipa.FedAvg(), fraction_evaluate=0.0, seed=part)
        config = ConfigRecord({"lr": LR})
        arrays = strategy.start(LocalGrid(app(seed), CLIENTS), arrays, 4, train_config=config).arrays
        if float(judged(seed, lambda k: True)(0, arrays)["accuracy"]) >= TARGET:  # type: ignore[index]
            break
    return arrays


def run(seed: int, arm: str, strategy: FIPA, lr: float, start: ArrayRecord, rounds: int, cuts: set[int]) -> list[Any]:
    """Rows for the rounds in `cuts`."""
    watch = judged(seed, lambda k: k in cuts or k == 0 or (k <= ROUNDS and arm.startswith("FIPA")))
    config, grid = ConfigRecord({"lr": lr}), LocalGrid(app(seed, arm.endswith("objective")), CLIENTS)
    result = strategy.start(grid, start, rounds, train_config=config, evaluate_fn=watch)
    train, central, rows, spent = result.train_metrics_clientapp, result.evaluate_metrics_serverapp, [], 0.0
    for k in range(1, rounds + 1):
        spent += (int(train[k]["uplink-bytes"]) + int(train[k]["downlink-bytes"])) / 2**20
        if k in cuts:
            seen = [float(m["accuracy"]) for j, m in central.items() if 0 < j <= k]
            share = [float(train[j]["curvature-seconds"]) / float(train[j]["train-seconds"])
                     for j in range(2, k + 1) if "train-seconds" in train[j]]  # fmt: skip
            rows.append((
                arm, seed, k, round(spent, 1), round(float(central[0]["accuracy"]), 4),
                round(float(central[k]["accuracy"]), 4), round(min(seen), 4), round(float(central[0]["loss"]), 3),
                round(float(central[k]["loss"]), 3), round(mean(share), 2) if share else 0,
            ))  # fmt: skip
            print(*rows[-1], flush=True)
    return rows


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = [tuple(row.values()) for row in csv.DictReader(FILE.open())] if FILE.exists() else []
    for seed in SEEDS:
        there = {row[0]: row for row in rows if int(row[1]) == seed}
        missing = [arm for arm in ARMS if arm not in there]
        start = started(seed) if missing else None
        for arm in missing:
            assert start is not None
            ours, lr = arm.startswith("FIPA"), LR / 10 if arm.endswith("lr/10") else LR
            strategy = FIPA(None if ours else fipa.FedAvg(), fraction_evaluate=0.0)
            alike = ROUNDS if ours else round(float(there["FIPA()"][3]) / (2 * CLIENTS * SIZE))
            new = run(seed, arm, strategy, lr, start, max(alike, ROUNDS), {ROUNDS, alike})
            there[arm] = new[0]
            rows = sorted([*rows, *new], key=lambda row: (int(row[1]), ARMS.index(row[0]), int(row[2])))
        with FILE.open("w", newline="") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerows([COLUMNS, *rows])
    table(rows)


def table(rows: list[Any]) -> None:
    """Means over the seeds, with standard deviations."""
    groups: dict[tuple[str, bool], list[Any]] = {}
    for row in rows:
        groups.setdefault((row[0], int(row[2]) == ROUNDS), []).append(row)
    print("| arm | rounds | MiB | accuracy, % | test loss | seeds below their start |\n" + "|---" * 6 + "|")
    for (arm, _), some in groups.items():
        last, loss = [100 * float(row[5]) for row in some], [float(row[8]) for row in some]
        rounds, size = mean(int(row[2]) for row in some), mean(float(row[3]) for row in some)
        worse, spread = sum(float(row[5]) < float(row[4]) for row in some), stdev(last) if len(last) > 1 else 0.0
        print(f"| {arm} | {rounds:.0f} | {size:.0f} | {mean(last):.1f} ± {spread:.1f} | {mean(loss):.2f} | {worse} |")


if __name__ == "__main__":
    main()
