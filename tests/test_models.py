import pytest
import torch

from fipa.models import cnn, mlp, resnet18, resnet20


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (cnn([4, 8], 16, generator=generator()), 8_748),
        (cnn([6, 12], 32, generator=generator()), 25_706),
        (cnn([12, 24, 48], 61, generator=generator()), 201_286),
        (resnet20(generator=generator()), 272_474),
        (resnet18(generator=generator()), 11_173_962),
    ],
    ids=["CNN-8k", "CNN-23k", "CNN-207k", "ResNet-20", "ResNet-18"],
)
def test_parameter_counts_of_the_reference(model, parameters):
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_head_of_resnet18_by_number_of_classes():
    # .46 % of the parameters at 100 classes
    model = resnet18(classes=100, generator=generator())
    head = sum(p.numel() for p in model.head.parameters())
    assert head == 512 * 100 + 100
    assert head / sum(p.numel() for p in model.parameters()) == pytest.approx(0.0046, abs=1e-4)


def test_initialisation_is_seeded_and_scaled():
    first, second = (mlp([1, 400, 400, 1], generator=generator()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    hidden = first[2]
    assert float(hidden.weight.detach().std()) == pytest.approx(400**-0.5, rel=0.02)
    assert not hidden.bias.any()
    assert float(cnn([6, 12], 32, generator=generator())[7].weight.detach().std()) == pytest.approx(768**-0.5, rel=0.05)


def test_mlp_ends_linearly():
    model = mlp([1, 5, 1], generator=generator())
    assert isinstance(model[-1], torch.nn.Linear)
    assert model[0].weight.dtype == torch.float64
