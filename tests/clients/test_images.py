"""Objectives of clients with images: transformed when needed, varied in training, by loops where these can run it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clients.cases import layout_of, objectives
from fipa import Client
from fipa.clients.descent import SGD, descend
from fipa.clients.objective import Objective, StackedObjective
from fipa.data import Augment
from fipa.data.images import Normalise
from fipa.kernels.small_cnn import SmallCNN
from fipa.models import cnn

NORMALISE = Normalise((0.3,), (0.2,))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Sequential:
    return cnn([3, 5], 6, classes=4, image=(1, 8), generator=rng())


def client(seed: int, n: int = 23, augment: object = None, transform: object = NORMALISE) -> Client:
    pixels = torch.randint(256, (n, 1, 8, 8), generator=rng(seed), dtype=torch.uint8)
    labels = torch.randint(4, (n,), generator=rng(50 + seed))
    return Client((pixels, labels), "cross_entropy", transform=transform, augment=augment)


def stack(clients: list[Client]) -> StackedObjective:
    model = network()
    small = SmallCNN.of(model, layout_of(model))
    return StackedObjective([Objective(model, layout_of(model), one, small) for one in clients])


def theta() -> Tensor:
    return layout_of(network()).flatten(dict(network().named_parameters()))


@pytest.fixture(params=["loops", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the loops for small CNNs, and without."""
    if request.param == "torch":
        monkeypatch.setattr(SmallCNN, "of", staticmethod(lambda *_: None))
    else:
        pytest.importorskip("numba")
    return request.param


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def by_hand(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient at `theta()`, by plain autograd."""
    model = network()
    loss = nn.functional.cross_entropy(model(x), y)
    return loss.detach(), torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("size", [1, 2])
def test_objective_is_that_of_the_transformed_data(path: str, size: int) -> None:
    clients = [client(m) for m in range(size)]
    both = stack(clients)
    assert (both._small is not None) == (path == "loops" and size == 1)
    thetas = theta().expand(size, -1)
    losses, gradients = both.losses(thetas), both.gradients(thetas)
    for m, one in enumerate(clients):
        pixels, labels = one.data
        loss, gradient = by_hand((pixels / 255 - 0.3) / 0.2, labels)
        close(losses[m], loss)
        close(gradients[m], gradient)


@pytest.mark.parametrize("augment", [None, Augment(2), Augment(1, False), Augment(1, True, 20.0)])
def test_batches_are_those_of_augment(path: str, augment: Augment | None) -> None:
    """Of the examples chosen, with numbers that come from the client's generator."""
    one = client(0, augment=augment)
    x, y = one.tensors
    index = torch.tensor([[4, 0, 22, 7, 7]])
    found = stack([one]).gradients(theta()[None], [index], [rng(3)])
    seen = x[index[0]] if augment is None else augment(x[index[0]], rng(3))
    close(found[0], by_hand(seen, y[index[0]])[1])


def test_clients_side_by_side_have_generators_of_their_own() -> None:
    clients, index = [client(m, augment=Augment(2)) for m in range(2)], torch.tensor([[0, 1, 2], [3, 4, 5]])
    found = stack(clients).gradients(theta().expand(2, -1), [index], [rng(3), rng(4)])
    for m, one in enumerate(clients):
        x, y = one.tensors
        close(found[m], by_hand(Augment(2)(x[index[m]], rng(3 + m)), y[index[m]])[1])


def test_only_training_varies_the_images(path: str) -> None:
    plain, varied = stack([client(0)]), stack([client(0, augment=Augment(2))])
    assert torch.equal(varied.losses(theta()[None]), plain.losses(theta()[None]))
    assert torch.equal(varied.gradients(theta()[None]), plain.gradients(theta()[None]))
    assert not torch.equal(varied.gradients(theta()[None], None, [rng()]), plain.gradients(theta()[None]))


def train(augment: object, seed: int = 3) -> Tensor:
    rule = SGD(lr=0.05, epochs=2, batch=10)
    return descend(stack([client(0, augment=augment)]), theta(), rule, [6], lr=0.05, generators=[rng(seed)])[0]


@pytest.mark.parametrize("augment", [None, Augment(2)])
def test_training_by_loops_is_training_by_torch(augment: Augment | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps, with batches of 10 and 3: the same examples, moved in the same way."""
    pytest.importorskip("numba")
    fast = train(augment)
    monkeypatch.setattr(SmallCNN, "of", staticmethod(lambda *_: None))
    slow = train(augment)
    assert float((fast - slow).norm()) < 1e-5 * float(slow.norm())


def test_training_repeats_itself(path: str) -> None:
    assert torch.equal(train(Augment(2)), train(Augment(2)))
    assert not torch.equal(train(Augment(2)), train(Augment(2), seed=4))
    assert not torch.equal(train(Augment(2)), train(None))


def test_own_augmentation_is_called_with_the_batch(path: str) -> None:
    """It is no `Augment`, so the loops leave it to torch."""
    one = client(0, augment=lambda x, generator: x.flip(3))
    x, y = one.tensors
    found = stack([one]).gradients(theta()[None], [torch.tensor([[1, 2]])], [rng()])
    close(found[0], by_hand(x[1:3].flip(3), y[1:3])[1])


def test_terms_are_made_when_they_are_needed() -> None:
    made = []

    def transform(x: Tensor) -> Tensor:
        made.append(len(x))
        return NORMALISE(x)

    (objective,) = objectives(network(), [client(0, transform=transform)])
    assert made == []
    assert objective.lengths == (23,)
    ((x, _),) = objective.terms
    assert made == [23]
    assert x.dtype == torch.float32
    stack = StackedObjective([objective])
    for _ in range(3):
        stack.gradients(theta()[None])
    assert made == [23, 23]


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (client(1), True),
        (client(0, n=22), False),
        (client(0, augment=Augment(2)), False),
        (client(0, transform=Normalise((0.3,), (0.2,))), True),
        (client(0, transform=Normalise((0.3,), (0.25,))), False),
    ],
)
def test_forms_of_clients_with_images(other: Client, alike: bool) -> None:
    layout = layout_of(network())
    assert (Objective(network(), layout, client(0)).form == Objective(network(), layout, other).form) == alike
