"""MOON in local training, against its loss written out once more in plain autograd, and what clients keep for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from clients.feature_cases import LR, STEPS, by_hand, delta, hidden, problem, relu_network, site
from fipa import FedAvg
from fipa.clients.descent import SGD
from fipa.clients.moon import Moon
from fipa.clients.rule import Memory
from fipa.federation.arm import Arm
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.messages import Order
from fipa.federation.stage import Stage


def test_moon_pulls_to_the_broadcast_model_and_away_from_the_last_one() -> None:
    place = site()
    previous = place.initial + 0.3 * torch.randn(
        place.initial.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    old, fixed = relu_network(), relu_network()
    nn.utils.vector_to_parameters(previous, old.parameters())

    def extra(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        z, near, far = hidden(model, x), hidden(fixed, x).detach(), hidden(old, x).detach()
        a, b = (torch.exp(cosine_similarity(z, other) / 0.5) for other in (near, far))
        return 2.0 * -torch.log(a / (a + b)).mean()

    found = delta(Moon(lr=LR, steps=STEPS, weight=2.0), place, memories={0: {"model": previous}})
    torch.testing.assert_close(found, by_hand(extra, place.clients[0]), rtol=1e-9, atol=1e-12)


def test_moon_is_sgd_for_a_client_without_a_last_model() -> None:
    place = site()
    plain = delta(SGD(lr=LR, steps=1), place)
    torch.testing.assert_close(delta(Moon(lr=LR, steps=1), place), plain, rtol=1e-9, atol=1e-12)


def test_clients_keep_their_own_last_models_and_tell_nothing() -> None:
    """Two rounds through memories are the second round with the first one's models put in by hand."""
    place, rule = site(), Moon(lr=LR, steps=STEPS, weight=2.0)
    memories: dict[int, Memory] = {}
    theta = place.initial
    for k in (1, 2):
        previous = {m: memory["model"] for m, memory in memories.items()}
        replies = place.work((0, 1), Order(k, theta, rule, memories=memories))
        for m, reply in enumerate(replies):
            assert isinstance(reply.update.delta, Tensor)
            assert reply.message == {}
            assert reply.memory.keys() == {"model"}
            assert torch.equal(reply.memory["model"], theta + reply.update.delta)
            alone = Order(k, theta, rule, memories={m: {"model": previous.get(m, theta)}})
            (same,) = place.work((m,), alone)
            assert torch.equal(same.update.delta, reply.update.delta)
            memories[m] = reply.memory
        (forgot,) = place.work((0,), Order(k, theta, rule))
        assert torch.equal(forgot.update.delta, replies[0].update.delta) == (k == 1)
        theta = theta + torch.stack([reply.update.delta for reply in replies]).mean(0)


def test_the_engine_keeps_each_clients_last_model_for_moon() -> None:
    arm = Arm("moon", (Stage(FedAvg(), Moon(lr=LR, steps=2, weight=5.0), 2),))
    with Executor(problem) as executor:
        federation = Federation(arm, 0, executor)
        first, _ = federation.round(federation.start())
        assert sorted(first.memories) == [0, 1, 2]
        mean = torch.stack([memory["model"] for memory in first.memories.values()]).mean(0)
        torch.testing.assert_close(mean, first.theta)  # equal numbers of examples, step 1
        second, _ = federation.round(first)
        plain = Federation(Arm("sgd", (Stage(FedAvg(), SGD(lr=LR, steps=2), 2),)), 0, executor)
        other, _ = plain.round(plain.start())
        torch.testing.assert_close(first.theta, other.theta)
        assert not torch.allclose(second.theta, plain.round(other)[0].theta)
