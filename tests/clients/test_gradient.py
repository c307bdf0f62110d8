"""Clients that send their gradient, against plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fipa
from clients.cases import KINDS, OUTPUTS, client, gradient_by_hand, layout_of, network, objectives
from clients.training import generators, start
from fipa import SGD, Client, FullGradient
from fipa.clients.objective import StackedObjective
from fipa.clients.rule import LocalWork
from fipa.federation.messages import Order
from fipa.federation.site import Site


def work_of(model: nn.Module, clients: list[Client], first: int = 0) -> LocalWork:
    layout, size = layout_of(model), len(clients)
    return LocalWork(
        clients=range(size),
        loss=clients[0].loss,
        theta=layout.flatten(dict(model.named_parameters())).detach(),
        model=model.train(),
        objective=StackedObjective(objectives(model, clients)),
        steps=[1] * size,
        lr=1.0,
        generators=generators(size, first),
        memories=[{}] * size,
        shared={},
    )


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_the_negative_gradient(kind: str, size: int) -> None:
    model = network(OUTPUTS[kind])
    clients = [client(kind, m) for m in range(size)]
    found = FullGradient().train(work_of(model, clients))
    assert found.shape == (size, layout_of(model).numel)
    assert not found.requires_grad
    for update, one in zip(found, clients, strict=True):
        expected = -gradient_by_hand(model, layout_of(model).names, one)
        torch.testing.assert_close(update, expected, rtol=1e-10, atol=1e-12)


def test_one_step_of_plain_descent_is_in_its_direction() -> None:
    """With a learning rate of 1 and all data in one batch."""
    problem = fipa.Problem(network(1), [client("plain", m) for m in range(2)], lambda model: 0.0)
    site = Site(problem, seed=0)
    for group in ((0,), (0, 1)):
        gradient, step = (site.work(group, Order(1, start(), rule)) for rule in (FullGradient(), SGD(lr=1.0, steps=1)))
        for one, other in zip(gradient, step, strict=True):
            torch.testing.assert_close(one.update.delta, other.update.delta, rtol=1e-10, atol=1e-12)
            assert (one.loss, one.memory) == (other.loss, None)


def test_dropout_is_off_and_the_model_in_training_mode_again() -> None:
    """As for the loss and the curvature: else the gradient is not that of what judges it."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).double()
    work = work_of(model, [client("cross_entropy", 0)])
    found = FullGradient().train(work)
    assert all(module.training for module in model.modules())
    expected = -gradient_by_hand(model.eval(), layout_of(model).names, client("cross_entropy", 0))
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-12)


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


def varied_client() -> Client:
    x, y = client("cross_entropy", 0).data
    return Client((x, y), "cross_entropy", augment=noisy)


def test_on_varied_examples_loss_and_gradient_are_of_the_same_ones() -> None:
    model, one = network(3), varied_client()
    found = FullGradient(augment=True).train(work_of(model, [one], first=5))
    (x, y), rng = one.data, torch.Generator().manual_seed(5)
    seen = Client((noisy(x, rng), y), "cross_entropy")
    torch.testing.assert_close(found[0], -gradient_by_hand(model, layout_of(model).names, seen), rtol=1e-10, atol=1e-12)
    site = Site(fipa.Problem(model, [one], lambda model: 0.0, loss="cross_entropy"), seed=0)
    theta = work_of(model, [one]).theta
    (reply,) = site.work((0,), Order(3, theta, FullGradient(augment=True)))
    assert [reply.loss] == site.varied_losses((0,), theta, 3) != site.losses((0,), theta, 3)
    assert site.varied_losses((0,), theta, 3) != site.varied_losses((0,), theta, 4)


def test_examples_are_not_varied_unless_asked_for() -> None:
    model = network(3)
    plain, varied = ([client("cross_entropy", 0)], [varied_client()])
    expected = FullGradient().train(work_of(model, plain))
    assert torch.equal(FullGradient().train(work_of(model, varied)), expected)
    assert torch.equal(FullGradient(augment=True).train(work_of(model, plain)), expected)  # nothing to vary
    assert not torch.allclose(FullGradient(augment=True).train(work_of(model, varied)), expected)
