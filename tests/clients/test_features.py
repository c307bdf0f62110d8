"""MOON and FedRCL in local training, against losses written out once more in plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from clients.cases import client, network
from fipa import FIPA, Client, FedAvg, FipaError, Problem, Residual
from fipa.clients.contrastive import divergence_penalty, relaxed_contrastive
from fipa.clients.features import FeatureRule, FedRCL, Moon
from fipa.clients.local_rules import SGD
from fipa.federation.engine import Arm, Federation
from fipa.federation.executor import Executor
from fipa.federation.plans import SketchPlan
from fipa.federation.site import Order, Site
from fipa.federation.stage import Stage
from fipa.models import ResNet, cnn

STEPS, LR = 3, 0.05


def relu_network() -> nn.Sequential:
    model = network(3)
    model[1] = nn.ReLU()
    return model


def site() -> Site:
    clients = [client("cross_entropy", seed, n=8) for seed in (0, 1)]
    return Site(Problem(relu_network(), clients, lambda model: 0.0), 0)


def by_hand(extra: Callable[[nn.Sequential, Tensor, Tensor], Tensor], one: Client) -> Tensor:
    """Full-batch descent on cross entropy and something more."""
    model = relu_network()
    x, y = one.data
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for _ in range(STEPS):
        loss = cross_entropy(model(x), y) + extra(model, x, y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before


def delta(rule: FeatureRule | SGD, place: Site, number: int = 0, **order: dict[int, Tensor]) -> Tensor:
    (reply,) = place.work((number,), Order(1, place.initial, rule, **order))  # type: ignore[arg-type]
    assert isinstance(reply.update.delta, Tensor)
    return reply.update.delta


def hidden(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[1](model[0](x))


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

    found = delta(Moon(lr=LR, steps=STEPS, weight=2.0), place, variates={0: previous})
    torch.testing.assert_close(found, by_hand(extra, place.clients[0]), rtol=1e-9, atol=1e-12)


def test_moon_is_sgd_for_a_client_without_a_last_model() -> None:
    place = site()
    plain = delta(SGD(lr=LR, steps=1), place)
    torch.testing.assert_close(delta(Moon(lr=LR, steps=1), place), plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["relaxed", "supervised"])
@pytest.mark.parametrize("pairs", ["all", "least"])
def test_fedrcl_adds_both_losses_at_every_level(kind: str, pairs: str) -> None:
    place = site()
    rule = FedRCL(
        lr=LR, steps=STEPS, contrast=0.7, penalty=0.4, temperature=0.2, kind=kind, pairs=pairs, levels=("1", "2")
    )

    def extra(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        levels = [model[0](x), hidden(model, x)]
        losses = [
            0.7 * relaxed_contrastive(z, y, 0.2, kind) + 0.4 * divergence_penalty(z, y, 0.7, 0.2, pairs) for z in levels
        ]
        return (losses[0] + losses[1]) / 2

    torch.testing.assert_close(delta(rule, place), by_hand(extra, place.clients[0]), rtol=1e-9, atol=1e-12)


def test_clients_in_a_group_are_trained_as_if_alone() -> None:
    place, rule = site(), FedRCL(lr=LR, steps=STEPS, batch=4)
    together = place.work((0, 1), Order(1, place.initial, rule))
    for number, reply in enumerate(together):
        assert isinstance(reply.update.delta, Tensor)
        assert torch.equal(reply.update.delta, delta(rule, place, number))


def test_levels() -> None:
    generator = torch.Generator().manual_seed(0)
    resnet = ResNet([4, 8], 2, classes=3, generator=generator)
    assert FedRCL(lr=1, steps=1).levels_of(resnet) == ("relu", "blocks.1.relu2", "blocks.3.relu2")
    small = cnn([2, 4], 5, image=(1, 8), generator=generator)
    assert FedRCL(lr=1, steps=1).levels_of(small) == ("2", "5", "8")
    assert Moon(lr=1, steps=1).levels_of(small) == ("9",)
    with pytest.raises(FipaError, match="no module 'stem2'"):
        Moon(lr=1, steps=1, levels=("stem2",)).levels_of(small)
    with pytest.raises(FipaError, match="no linear layer"):
        Moon(lr=1, steps=1).levels_of(nn.ReLU())
    with pytest.raises(FipaError, match="no ReLU"):
        FedRCL(lr=1, steps=1).levels_of(nn.Linear(1, 1))


def test_features_before_relu_can_be_negative() -> None:
    """A level is what goes into a module: the features of the paper are taken before ReLU."""
    place = site()
    _, (features,) = place._objectives[0].features(place.initial, place.clients[0].data[0], ("1",))
    torch.testing.assert_close(features, relu_network()[0](place.clients[0].data[0]))
    assert bool((features < 0).any())


def test_a_level_that_is_never_called() -> None:
    place = site()
    place.problem.model.add_module("aside", nn.ModuleList([nn.ReLU()]))
    place.problem.model.forward = lambda x: place.problem.model[2](torch.relu(place.problem.model[0](x)))  # type: ignore[method-assign]
    with pytest.raises(FipaError, match="'aside' is never called with a tensor"):
        place._objectives[0].features(place.initial, place.clients[0].data[0], ("aside",))


def test_least_squares_clients_are_refused() -> None:
    x = torch.zeros(2, 2, dtype=torch.float64)
    place = Site(Problem(network(), [Residual(lambda u, x: u(x)[:, 0], x)], lambda model: 0.0), 0)
    with pytest.raises(FipaError, match="Moon is for classification"):
        place.work((0,), Order(1, place.initial, Moon(lr=LR, steps=1)))


def problem(seed: int) -> Problem:
    clients = [client("cross_entropy", number, n=8) for number in range(3)]
    return Problem(relu_network(), clients, lambda model: 0.0)


def test_the_engine_keeps_each_clients_last_model_for_moon() -> None:
    arm = Arm("moon", (Stage(FedAvg(), Moon(lr=LR, steps=2, weight=5.0), 2),))
    with Executor(problem) as executor:
        federation = Federation(arm, 0, executor)
        first, _ = federation.round(federation.start())
        assert sorted(first.variates) == [0, 1, 2]
        mean = torch.stack(list(first.variates.values())).mean(0)
        torch.testing.assert_close(mean, first.theta)  # equal numbers of examples, step 1
        second, _ = federation.round(first)
        plain = Federation(Arm("sgd", (Stage(FedAvg(), SGD(lr=LR, steps=2), 2),)), 0, executor)
        other, _ = plain.round(plain.start())
        torch.testing.assert_close(first.theta, other.theta)
        assert not torch.allclose(second.theta, plain.round(other)[0].theta)


@pytest.mark.parametrize("rule", [Moon(lr=LR, steps=2), FedRCL(lr=LR, steps=2)])
def test_fipa_takes_their_updates_with_sketches(rule: FeatureRule) -> None:
    arm = Arm("both", (Stage(FIPA(damping=0.1), rule, 2, SketchPlan(rank=3)),))
    with Executor(problem) as executor:
        federation = Federation(arm, 0, executor)
        for _, record in federation.rounds(federation.start()):
            assert record.ranks == (3, 3, 3)


def test_fipa_without_a_sketch_fails_loudly() -> None:
    arm = Arm("none", (Stage(FIPA(damping=0.1), FedRCL(lr=LR, steps=1), 1),))
    with Executor(problem) as executor:
        federation = Federation(arm, 0, executor)
        with pytest.raises(FipaError, match="sketch"):
            federation.round(federation.start())
