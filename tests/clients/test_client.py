"""What a client holds, and what all clients together hold."""

from __future__ import annotations

import pytest
import torch

from clients.cases import DOUBLE, KINDS, OUTPUTS, client, edge, layout_of, loss_by_hand, misfit, network
from fipa import Client, FipaError, Residual
from fipa.clients.client import united
from fipa.clients.objective import Objective

X, Y = torch.zeros(4, 2, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE)


def test_number_of_examples() -> None:
    """Of all residuals together, unless the user knows better."""
    assert Client((Residual(misfit, X, Y),)).num_examples == 4
    assert Client((Residual(misfit, X, Y), Residual(edge, X[:3]))).num_examples == 7
    assert Client((X, Y), "mse").num_examples == 4
    assert Client((X, Y), "mse", num_examples=9).num_examples == 9


def test_of_takes_what_users_give() -> None:
    residual, other = Residual(misfit, X, Y), Residual(edge, X)
    whole = Client((residual,), num_examples=9)
    assert Client.of(whole) is whole
    assert Client.of(residual).data == (residual,)
    assert Client.of([residual, other]).data == (residual, other)
    pair = Client.of([X, Y], "mse")
    assert pair.loss == "mse"
    assert pair.data[0] is X
    assert pair.data[1] is Y


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        ((), "least_squares", "tuple of fipa.Residual"),
        ((X, Y), "least_squares", "tuple of fipa.Residual"),
        ((Residual(misfit, X, Y), X), "least_squares", "tuple of fipa.Residual"),
        ((X,), "mse", r'loss="mse" takes the tensors \(x, y\)'),
        ((X, [0, 1]), "cross_entropy", r'loss="cross_entropy" takes the tensors \(x, y\)'),
        ((Residual(misfit, X, Y), Residual(misfit, X, Y)), "mse", r'loss="mse" takes the tensors'),
        ((X, Y[:3]), "mse", "got 4 and 3"),
        ((X[:0], Y[:0]), "mse", "at least 1, got 0 and 0"),
        ((X, Y), "hinge", "hinge"),
    ],
)
def test_data_that_do_not_fit_the_loss(data: tuple[object, ...], loss: str, message: str) -> None:
    with pytest.raises(FipaError, match=message):
        Client(data, loss)


def test_negative_number_of_examples() -> None:
    with pytest.raises(FipaError, match="num_examples must be positive, got -1"):
        Client((X, Y), "mse", num_examples=-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(0, 0, 0), (30, 7, 2)], ids=["counted", "given"])
def test_united_loss_is_the_weighted_mean(kind: str, counts: tuple[int, ...]) -> None:
    """Clients of unequal sizes, also where their numbers of examples are not those of their tensors."""
    model = network(OUTPUTS[kind])
    clients = [client(kind, seed, n) for seed, n in enumerate((5, 2, 9))]
    clients = [Client(one.data, one.loss, count) for one, count in zip(clients, counts, strict=True)]
    total = sum(one.num_examples for one in clients)
    if counts[0] and clients[0].loss != "least_squares":  # their examples carry no weights that could make up for it
        with pytest.raises(FipaError, match="num_examples"):
            united(clients)
        return
    expected = sum(one.num_examples / total * loss_by_hand(model, one).item() for one in clients)
    together = united(clients)
    assert together.num_examples == total
    assert loss_by_hand(model, together).item() == pytest.approx(expected, rel=1e-12)
    objective = Objective(model, layout_of(model), together)
    flat = layout_of(model).flatten(dict(model.named_parameters()))
    assert objective.loss(flat, objective.terms).item() == pytest.approx(expected, rel=1e-12)


def test_different_losses_cannot_be_united() -> None:
    with pytest.raises(FipaError, match="different losses"):
        united([client("mse", 0), client("plain", 0)])


# --- what the model sees of the data ---


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_tensors_are_made_of_the_data_whenever_they_are_asked_for() -> None:
    calls = []

    def halves(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x / 2

    x, y = torch.arange(8, dtype=torch.uint8).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    one = Client((x, y), "cross_entropy", transform=halves)
    assert calls == []
    assert one.num_examples == 4
    seen, labels = one.tensors
    assert seen.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5], [3, 3.5]]
    assert labels is y
    assert one.tensors[0] is not seen
    assert calls == [4, 4]
    assert one.data[0] is x


def test_tensors_without_a_transform_are_the_data() -> None:
    one = Client((X, Y), "mse", augment=lambda x, generator: x + 1)
    assert one.tensors is one.data


@pytest.mark.parametrize("more", [{"transform": double}, {"augment": lambda x, generator: x}])
def test_residuals_are_not_transformed(more: dict[str, object]) -> None:
    with pytest.raises(FipaError, match="transform and augment are for tensors"):
        Client((Residual(misfit, X, Y),), **more)


def test_united_clients_are_transformed_and_augmented_as_each_of_them() -> None:
    def vary(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x

    clients = [Client((torch.full((n, 2), float(n)), Y[:n]), "mse", transform=double, augment=vary) for n in (1, 3)]
    whole = united(clients)
    assert whole.data[0].tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]]
    assert whole.tensors[0].tolist() == [[2, 2], [6, 6], [6, 6], [6, 6]]
    assert (whole.num_examples, whole.augment) == (4, vary)


@pytest.mark.parametrize("more", [{"transform": double}, {"augment": lambda x, generator: x}])
def test_clients_that_see_their_data_differently_cannot_be_united(more: dict[str, object]) -> None:
    with pytest.raises(FipaError, match="different losses, transforms or augmentations"):
        united([Client((X, Y), "mse"), Client((X, Y), "mse", **more)])
