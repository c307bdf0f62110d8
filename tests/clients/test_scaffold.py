"""SCAFFOLD: corrected gradients, and the variates that clients and server remember, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation.cases import START, alike, numbers

from clients.cases import DOUBLE, client
from clients.training import start, trained, trained_by_hand
from fipa.clients.rule import Memory
from fipa.clients.scaffold import Scaffold
from fipa.federation.messages import Order
from fipa.federation.site import Site

THETA = torch.tensor(START, dtype=DOUBLE)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_correction_is_added_to_every_gradient() -> None:
    shape = (2, len(start()))
    correction = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    updates = trained(Scaffold(steps=1, weight_decay=0.1), (4, 4), correction=correction)
    for m in range(2):
        expected = trained_by_hand(
            client("plain", m), torch.optim.SGD, 4, correction=correction[m], lr=0.05, weight_decay=0.1
        )
        torch.testing.assert_close(updates[m], expected, rtol=1e-9, atol=1e-11)


def test_memory_by_hand() -> None:
    """c_m = (1, 2), c = (3, 5), an update of (2, -4) in 4 steps of 0.5: the change is -c - (1, -2)."""
    rule = Scaffold(lr=0.5, steps=4)
    memory, shared = {"variate": vector(1, 2)}, {"variate": vector(3, 5)}
    assert rule.correction(THETA, memory, shared).tolist() == [2, 3]
    kept, told = rule.outcome(THETA, vector(2, -4), 4, 0.5, memory, shared)
    assert (kept.keys(), told.keys()) == ({"variate"}, {"change"})
    assert told["change"].tolist() == [-4, -3]
    assert kept["variate"].tolist() == [-3, -1]


def test_without_memory_all_variates_are_zero() -> None:
    rule = Scaffold(lr=0.5, steps=4)
    assert rule.correction(THETA, {}, {}).tolist() == [0, 0]
    assert rule.start(THETA)["variate"].tolist() == [0, 0]
    kept, told = rule.outcome(THETA, vector(2, -4), 4, 0.5, {}, {})
    assert kept["variate"].tolist() == told["change"].tolist() == [-1, 2]
    assert rule.server({}, [], 3) == {}


def test_the_server_divides_by_all_clients_and_adds_in_their_order() -> None:
    rule = Scaffold(steps=1)
    before = {"variate": vector(0.1, 0.2)}
    messages = [{"change": vector(0.3, 1e-17)}, {"change": vector(0.7, -0.1)}]
    after = rule.server(before, messages, 7)["variate"]
    assert torch.equal(after, (vector(0.1, 0.2) + 1 / 7 * messages[0]["change"]) + 1 / 7 * messages[1]["change"])
    assert before["variate"].tolist() == [0.1, 0.2]
    assert torch.equal(rule.server(before, [], 7)["variate"], before["variate"])
    from_nothing = rule.server({}, messages, 7)["variate"]
    assert torch.equal(from_nothing, 1 / 7 * messages[0]["change"] + 1 / 7 * messages[1]["change"])


@pytest.mark.parametrize("grouped", [True, False])
def test_rounds_against_numpy(grouped: bool) -> None:
    """Clients come and go; the learning rate falls; what a client keeps is all that it needs the next time."""
    rule, site, hand = Scaffold(lr=0.1, steps=3, lr_decay=0.9), Site(alike(0), 0), numbers(alike)
    memories: dict[int, Memory] = {}
    shared, theta = rule.start(THETA), THETA
    c, own = np.zeros(2), np.zeros((4, 2))
    for k, present in enumerate([(0, 1), (1, 2, 3), (0, 3), (0, 1, 2, 3)], start=1):
        order = Order(k, theta, rule, shared=shared, memories=memories)
        groups = [present] if grouped else [(m,) for m in present]
        replies = [reply for group in groups for reply in site.work(group, order)]
        lr, changes = 0.1 * 0.9 ** (k - 1), []
        for m, reply in zip(present, replies, strict=True):
            delta = hand[m].sgd(theta.numpy(), lr, 3, c - own[m])
            changes.append(-c - delta / (3 * lr))
            own[m] += changes[-1]
            np.testing.assert_allclose(reply.update.delta.numpy(), delta, rtol=1e-9, atol=1e-14)
            np.testing.assert_allclose(reply.message["change"].numpy(), changes[-1], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(reply.memory["variate"].numpy(), own[m], rtol=1e-9, atol=1e-12)
            memories[m] = reply.memory
        c = c + sum(changes) / 4
        shared = rule.server(shared, [reply.message for reply in replies], 4)
        np.testing.assert_allclose(shared["variate"].numpy(), c, rtol=1e-9, atol=1e-12)
        theta = theta + torch.stack([reply.update.delta for reply in replies]).mean(0)
