"""Model, data and training: nothing here knows of federations."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN for 32 x 32 images."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc = nn.Linear(16 * 5 * 5, 10)

    def forward(self, x):
        """Logits."""
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc(x.flatten(1))


def load_data(partition_id, num_partitions, size=80):
    """Images in the shape of CIFAR-10 that are made up: each class has its own pattern, each client few classes."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + partition_id)
    classes = torch.tensor([(3 * partition_id + k) % 10 for k in range(4)])
    labels = classes[torch.randint(4, (size,), generator=generator)]
    images = patterns[labels] + 2.0 * torch.randn(size, 3, 32, 32, generator=generator)
    train, test = TensorDataset(images[16:], labels[16:]), TensorDataset(images[:16], labels[:16])
    shuffle = torch.Generator().manual_seed(partition_id)
    return DataLoader(train, batch_size=16, shuffle=True, generator=shuffle), DataLoader(test, batch_size=16)


def train(net, trainloader, epochs, lr):
    """Train the model on the training set; return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader):
    """Loss and accuracy on the test set."""
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss += cross_entropy(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
