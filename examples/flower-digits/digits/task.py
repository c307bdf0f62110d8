"""Model, data and training: nothing here knows of federations."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fipa.data import BalancedDirichlet, load


class Net(nn.Module):
    """A small CNN for 8 x 8 images."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(8 * 2 * 2, 10)

    def forward(self, x):
        """Logits."""
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc(x.flatten(1))


def images(part):
    """Pixels between -1 and 1, and labels."""
    return part.pixels.float() / 127.5 - 1, part.labels


def load_data(partition, partitions):
    """Training data of one client: few classes, of which other clients have few."""
    x, y = images(load("digits").train)
    parts = BalancedDirichlet(alpha=0.1).split(y, partitions, torch.Generator().manual_seed(0))
    return x[parts[partition]], y[parts[partition]]


def train(net, x, y, epochs=2, lr=0.05):
    """Plain SGD; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for batch in torch.arange(len(x)).split(16):
            optimizer.zero_grad()
            loss = cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total


def accuracy(net):
    """On the test images, in percent."""
    x, y = images(load("digits").test)
    with torch.no_grad():
        return 100 * (net(x).argmax(1) == y).float().mean().item()
