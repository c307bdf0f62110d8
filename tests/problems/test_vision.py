"""Images between clients: who gets which, what accuracy is, and the networks that can be named."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from fipa.data import Augment, BalancedDirichlet, Indices, load
from fipa.data.images import Images, ImageSet, Normalise
from fipa.errors import FipaError
from fipa.models import cnn
from fipa.problems.vision import Accuracy, ConvNet, ResidualNet, images, split


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def part(n: int, shape: tuple[int, int, int], seed: int) -> Images:
    pixels = torch.randint(256, (n, *shape), generator=rng(seed), dtype=torch.uint8)
    return Images(pixels, torch.arange(n) % 10)


def fake(shape: tuple[int, int, int] = (3, 32, 32), n: int = 40) -> ImageSet:
    names = tuple(map(str, range(10)))
    return ImageSet("fake", part(n, shape, 0), part(12, shape, 1), names, (0.5,) * shape[0], (0.25,) * shape[0])


# --- accuracy ---


class First(nn.Module):
    """Finds the class that the first pixel names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return -(x[:, 0, 0, 0, None] * self.scale - torch.arange(4)).abs()


@pytest.mark.parametrize("n", [4, 500, 1203])
def test_accuracy_by_hand(n: int) -> None:
    """Every fourth image is not what it seems; blocks of 500 do not matter."""
    labels = torch.arange(n) % 4
    shown = torch.where(labels == 3, 0, labels).to(torch.uint8)
    metric = Accuracy(Images(shown.reshape(n, 1, 1, 1), labels), lambda x: x.float())
    assert metric(First()) == pytest.approx(100 * int((labels != 3).sum()) / n)


def test_accuracy_transforms_its_images_once() -> None:
    calls = []

    def transform(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x.float()

    metric = Accuracy(
        Images(torch.zeros(600, 1, 1, 1, dtype=torch.uint8), torch.zeros(600, dtype=torch.int64)), transform
    )
    assert calls == []
    assert metric(First()) == metric(First()) == 100.0
    assert calls == [500, 100]
    assert metric.through(lambda x: x.float() + 2)(First()) == 0.0


# --- the split ---


def test_every_client_holds_its_part() -> None:
    data = fake((1, 4, 4))
    groups = Indices(parts=((0, 5, 7), (1, 39)))
    found = split(data, 0, model=ConvNet((2, 2), 3), clients=2, partition=groups, augment=Augment(1))
    for client, index in zip(found.clients, ([0, 5, 7], [1, 39]), strict=True):
        assert torch.equal(client.data[0], data.train.pixels[index])
        assert client.data[0].dtype == torch.uint8
        assert torch.equal(client.data[1], data.train.labels[index])
        assert client.loss == "cross_entropy"
        assert client.augment == Augment(1)
        torch.testing.assert_close(client.tensors[0], (data.train.pixels[index] / 255 - 0.5) / 0.25)
    counts = found.picture.counts.tolist()
    assert counts == [[1, 0, 0, 0, 0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0, 1]]
    assert found.picture.classes == data.classes
    assert (found.name, found.goal, found.scale) == ("test accuracy, %", "max", "linear")


def test_samples_per_client_and_of_the_test() -> None:
    data = load("digits")
    found = images(3, clients=4, samples=30, test_samples=7, model=ConvNet((2,), 3), partition=BalancedDirichlet(0.5))
    held = torch.cat([client.data[0] for client in found.clients])
    assert [client.num_examples for client in found.clients] == [30] * 4
    assert int(found.picture.counts.sum()) == 120
    assert all(any(torch.equal(image, other) for other in data.train.pixels) for image in held[:5])
    assert len(found.metric._images) == 7
    assert torch.equal(found.metric._images.pixels, data.test.pixels[:7])
    everything = images(3, clients=4, model=ConvNet((2,), 3))
    assert sum(client.num_examples for client in everything.clients) == len(data.train)
    assert len(everything.metric._images) == len(data.test)


CODE = """
import hashlib, torch
from fipa.problems.vision import ConvNet, images
torch.rand(5)
p = images(2, clients=3, samples=20, model=ConvNet((2,), 3))
bits = b"".join(t.numpy().tobytes() for c in p.clients for t in c.data) + p.initial.numpy().tobytes()
print(hashlib.sha256(bits).hexdigest())
"""


@pytest.mark.long
def test_the_same_problem_in_every_process_and_another_for_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    other = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    torch.manual_seed(99)
    exec(CODE, {})
    assert capsys.readouterr().out == other
    first, second = (images(seed, clients=3, samples=20, model=ConvNet((2,), 3)) for seed in (2, 3))
    assert not torch.equal(first.initial, second.initial)
    assert not torch.equal(first.clients[0].data[0], second.clients[0].data[0])


# --- networks ---


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cnn8k", 8_748), ("cnn23k", 25_706), ("cnn207k", 201_286), ("resnet20", 272_474), ("resnet18", 11_173_962)],
)
def test_networks_by_name(name: str, parameters: int) -> None:
    found = split(fake(), 0, model=name, clients=2)
    assert found.layout.numel == parameters
    with torch.no_grad():
        assert found.model(found.clients[0].tensors[0][:1]).shape == (1, 10)


def test_networks_by_their_layers() -> None:
    assert split(fake((1, 8, 8)), 0, model=ConvNet((2, 3), 4), clients=2).layout.shapes == (
        (2, 1, 3, 3), (3, 2, 3, 3), (4, 12), (10, 4),
    )  # fmt: skip
    found = split(fake((1, 9, 7)), 0, model=ResidualNet((2, 4), 1), clients=2)
    assert found.model(found.clients[0].tensors[0]).shape == (20, 10)


def test_network_of_ones_own() -> None:
    """It is told about the images, and draws from the seed's generator."""

    def mine(data: ImageSet, generator: torch.Generator) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, len(data.classes)))
        with torch.no_grad():
            model[1].weight.copy_(torch.randn(10, 16, generator=generator))
        return model

    first, again, other = (split(fake((1, 4, 4)), seed, model=mine, clients=2, params="1.weight") for seed in (0, 0, 1))
    assert first.layout.names == ("1.weight",)
    assert torch.equal(first.initial, again.initial)
    assert not torch.equal(first.initial, other.initial)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "cnn9k"}, r"there is no model 'cnn9k': did you mean 'cnn8k'"),
        ({"clients": 0}, "clients, samples and test_samples must be at least 1"),
        ({"samples": 0}, "must be at least 1"),
        ({"test_samples": 0}, "must be at least 1"),
        ({"samples": 21}, "2 clients with 21 samples each: fake has only 40"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(FipaError, match=message):
        split(fake((1, 8, 8)), 0, **({"model": ConvNet((2,), 3), "clients": 2} | settings))


@pytest.mark.parametrize("shape", [(1, 8, 12), (1, 6, 6)])
def test_cnns_need_squares_of_a_multiple_of_4(shape: tuple[int, int, int]) -> None:
    with pytest.raises(FipaError, match="fake: a cnn needs square images with a side of a multiple of 4"):
        split(fake(shape), 0, model=ConvNet((2, 2), 3), clients=2)


def test_pooling_before_relu_is_pooling_after_it() -> None:
    model = cnn([4, 8, 3], 5, generator=rng())
    layers = list(model)
    places = [i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    assert len(places) == 2
    for i in places:
        assert isinstance(layers[i + 1], nn.ReLU)
        layers[i], layers[i + 1] = layers[i + 1], layers[i]
    x = torch.randn(6, 3, 32, 32, generator=rng(1))
    assert torch.equal(nn.Sequential(*layers)(x), model(x))


def test_normalised_images_have_mean_0_and_variance_1() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
    assert Normalise((0.2,), (0.4,))(pixels).flatten().tolist() == pytest.approx([-0.5, 0.0, 2.0], abs=1e-6)
