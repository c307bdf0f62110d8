"""What rules on features share: levels, one client after the other, classification only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clients.cases import network
from clients.feature_cases import LR, STEPS, delta, problem, relu_network, site
from fipa import FIPA, FipaError, Problem, Residual
from fipa.clients.features import FeatureRule
from fipa.clients.fedrcl import FedRCL
from fipa.clients.moon import Moon
from fipa.curvature.sketch import SketchPlan
from fipa.federation.arm import Arm
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.messages import Order
from fipa.federation.site import Site
from fipa.federation.stage import Stage
from fipa.models import ResNet, cnn


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
    _, (features,) = place._objective(0).features(place.initial, place.clients[0].data[0], ("1",))
    torch.testing.assert_close(features, relu_network()[0](place.clients[0].data[0]))
    assert bool((features < 0).any())


def test_a_level_that_is_never_called() -> None:
    place = site()
    place.problem.model.add_module("aside", nn.ModuleList([nn.ReLU()]))
    place.problem.model.forward = lambda x: place.problem.model[2](torch.relu(place.problem.model[0](x)))  # type: ignore[method-assign]
    with pytest.raises(FipaError, match="'aside' is never called with a tensor"):
        place._objective(0).features(place.initial, place.clients[0].data[0], ("aside",))


def test_least_squares_clients_are_refused() -> None:
    x = torch.zeros(2, 2, dtype=torch.float64)
    place = Site(Problem(network(), [Residual(lambda u, x: u(x)[:, 0], x)], lambda model: 0.0), 0)
    with pytest.raises(FipaError, match="Moon is for classification"):
        place.work((0,), Order(1, place.initial, Moon(lr=LR, steps=1)))


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
