"""Fed3R and FedNCM against dense solutions on everybody's data, whoever comes when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fipa
from fipa import ClientUpdate, Fed3R, FedNCM, SketchError, UpdateError
from fipa.federation.executor import Executor

D, C, CLIENTS = 6, 4, 7
RULES = {"fed3r": Fed3R(ridge=0.7), "fedncm": FedNCM()}


def model(bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(D, C, bias=bias).double()


def clients(classes: int = C) -> list[fipa.Client]:
    rng = torch.Generator().manual_seed(1)
    made = []
    for m in range(CLIENTS):
        x = torch.randn(9 + m, D, generator=rng, dtype=torch.float64)
        made.append(fipa.Client((x, torch.randint(classes, (9 + m,), generator=rng)), "cross_entropy"))
    return made


def updates(net: nn.Module, everyone: Sequence[fipa.Client], rule: fipa.Rule) -> list[ClientUpdate]:
    theta = fipa.parameters_of(net)
    layout, plan = fipa.Layout.of(theta), rule.needs()
    nothing = torch.zeros(layout.numel, dtype=torch.float64)
    return [
        ClientUpdate(nothing, one.num_examples, plan.compute(net, layout, one, fipa.Occasion(seed=0)), m)
        for m, one in enumerate(everyone)
    ]


def in_rounds(net: nn.Module, rounds: Sequence[Sequence[ClientUpdate]], rule: fipa.Rule) -> Tensor:
    theta, state = torch.cat([t.flatten() for t in fipa.parameters_of(net).values()]), None
    for some in rounds:
        result = fipa.aggregate(theta, some, rule, state)
        theta, state = result.theta, result.state
    return theta


def ridge(everyone: Sequence[fipa.Client], bias: bool, weight: float = 0.7) -> np.ndarray:
    """The minimum of squares, found from the data themselves."""
    x = torch.cat([one.data[0] for one in everyone]).numpy()
    y = np.eye(C)[torch.cat([one.data[1] for one in everyone]).numpy()]
    x = np.hstack([x, np.ones((len(x), 1))]) if bias else x
    stacked = np.vstack([x, np.sqrt(weight) * np.eye(x.shape[1])])
    W = np.linalg.lstsq(stacked, np.vstack([y, np.zeros((x.shape[1], C))]), rcond=None)[0]
    return np.concatenate([W[:-1].T.ravel(), W[-1]]) if bias else W.T.ravel()


@pytest.mark.parametrize("bias", [True, False])
def test_fed3r_is_the_ridge_regression_on_all_data(bias: bool) -> None:
    net, everyone = model(bias), clients()
    found = in_rounds(net, [updates(net, everyone, RULES["fed3r"])], RULES["fed3r"])
    np.testing.assert_allclose(found.numpy(), ridge(everyone, bias), atol=1e-11)


@pytest.mark.parametrize("classes", [C, 2])
def test_fedncm_finds_the_nearest_mean_and_no_class_that_nobody_has(classes: int) -> None:
    net, everyone = model(), clients(classes)
    theta = in_rounds(net, [updates(net, everyone, FedNCM())], FedNCM())
    x, y = (torch.cat([one.data[i] for one in everyone]) for i in (0, 1))
    means = torch.stack([x[y == c].mean(dim=0) if (y == c).any() else torch.full((D,), torch.inf) for c in range(C)])
    points = torch.randn(500, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    outputs = points @ theta[: C * D].reshape(C, D).T + theta[C * D :]
    nearest = (points[:, None] - means).square().sum(dim=2).argmin(dim=1)
    assert torch.equal(outputs.argmax(dim=1), nearest)


@pytest.mark.parametrize("name", RULES)
def test_all_at_once_one_by_one_in_any_order_and_again_are_the_same(name: str) -> None:
    net, rule = model(), RULES[name]
    sent = updates(net, clients(), rule)
    whole = in_rounds(net, [sent], rule)
    order = [4, 1, 6, 0, 3, 5, 2]
    ways = {
        "one by one": [[one] for one in sent],
        "in another order": [[sent[i]] for i in order],
        "the other way round": [sent[::-1]],
        "some twice": [sent[:3], sent[2:5], sent[:1], sent[4:]],
    }
    for rounds in ways.values():
        torch.testing.assert_close(in_rounds(net, rounds, rule), whole, atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", RULES)
def test_a_federation_asks_each_client_once_and_ends_with_the_solution_of_all(name: str) -> None:
    rule, everyone, net = RULES[name], clients(), model()
    problem = fipa.Problem(net, everyone, lambda _: 0.0)
    stage = fipa.Stage(rule, fipa.FullGradient(), rounds=40, plan=rule.needs())
    arm = fipa.Arm("closed form", (stage,), participation=fipa.Participation("uniform", 2))
    with Executor(lambda seed: problem) as executor:
        federation = fipa.Federation(arm, 0, executor)
        rounds = list(federation.rounds(federation.start()))
    assert [record.round for _, record in rounds] == list(range(1, 41))
    asked = [client for _, record in rounds for client in record.clients]
    assert sorted(asked) == list(range(CLIENTS))
    expected = in_rounds(model(), [updates(model(), everyone, rule)], rule)
    torch.testing.assert_close(rounds[-1][0].theta, expected, atol=1e-10, rtol=0)
    quiet = [record for _, record in rounds if not record.clients]
    assert quiet
    assert all(record.uplink_bytes == 0 for record in quiet)
    assert "have told what they know" in quiet[0].events[0]["text"]
    side = D + 1
    own = {"fed3r": side * (side + 1) // 2 + side * C, "fedncm": C * D + C}[name]
    sent = sum(record.uplink_bytes for _, record in rounds)
    assert sent == CLIENTS * 8 * (own + C * D + C + 1)  # statistics, gradient and loss


@pytest.mark.parametrize("name", RULES)
def test_more_than_a_head_is_refused(name: str) -> None:
    deep = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()
    with pytest.raises(SketchError, match=r"for a linear head alone, but .*params"):
        updates(deep, clients(), RULES[name])
    layout = fipa.Layout.of(fipa.parameters_of(deep, "0.*"))
    with pytest.raises(SketchError, match="for a linear head alone"):
        RULES[name].needs().compute(deep, layout, clients()[0], fipa.Occasion(seed=0))
    squares = fipa.Client((torch.randn(5, D).double(), torch.randn(5, C).double()), "mse")
    with pytest.raises(SketchError, match="need the loss cross_entropy, not mse"):
        updates(model(), [squares], RULES[name])


def test_settings_and_input_that_cannot_be() -> None:
    with pytest.raises(fipa.FipaError, match="positive ridge"):
        Fed3R(ridge=0)
    net = model()
    sent = updates(net, clients(), Fed3R())
    nameless = [ClientUpdate(one.delta, one.num_examples, one.sketch) for one in sent]
    with pytest.raises(UpdateError, match="has no id, but Fed3R counts each client once"):
        in_rounds(net, [nameless], Fed3R())
    state = fipa.aggregate(sent[0].delta, sent[:1], Fed3R()).state | {"gram": torch.eye(3)}
    with pytest.raises(fipa.LayoutError, match="start with state=None"):
        fipa.aggregate(sent[0].delta, sent[1:], Fed3R(), state)
    with pytest.raises(UpdateError, match="head without bias"):
        in_rounds(model(bias=False), [updates(model(bias=False), clients(), FedNCM())], FedNCM())
