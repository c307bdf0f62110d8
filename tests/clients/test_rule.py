"""What every local rule does about its memory unless it says otherwise, and what sites make of what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from federation.cases import DOUBLE, START, alike, numbers
from torch import Tensor

from fipa import FipaError
from fipa.clients.descent import SGD, Adam
from fipa.clients.fedrcl import FedRCL
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.moon import Moon
from fipa.clients.rule import LocalRule, LocalWork, Memory
from fipa.clients.scaffold import Scaffold
from fipa.federation.messages import Order
from fipa.federation.site import Site

THETA = torch.tensor(START, dtype=DOUBLE)


@pytest.mark.parametrize("rule", [SGD(steps=1), Adam(steps=1), FedRCL(steps=1), GaussNewton()])
def test_rules_without_memory(rule: LocalRule) -> None:
    assert not rule.remembers
    assert not rule.tells
    assert rule.outcome(THETA, THETA, 1, 0.1, {}, {}) == ({}, {})
    assert rule.start(THETA) == {}
    assert rule.server({}, [{}, {}], 2) == {}


def test_what_rules_need_and_keep() -> None:
    flags = {
        kind: (kind.side_by_side, kind.needs_curvature, kind.remembers, kind.tells)
        for kind in (SGD, Adam, Scaffold, Moon, FedRCL, GaussNewton)
    }
    assert flags == {
        SGD: (True, False, False, ()),
        Adam: (True, False, False, ()),
        Scaffold: (True, False, True, ("change",)),
        Moon: (False, False, True, ()),
        FedRCL: (False, False, False, ()),
        GaussNewton: (True, True, False, ()),
    }


@dataclass(frozen=True)
class Steady(LocalRule):
    """Each client's second round goes on as its first one; all are pushed by what the server says."""

    remembers: ClassVar[bool] = True
    tells: ClassVar[tuple[str, ...]] = ("first",)

    push: float = 1.0

    def train(self, work: LocalWork) -> list[Tensor]:
        assert (work.lr, list(work.steps), work.gradients, work.sketches) == (1.0, [1] * len(work.clients), None, [])
        mean = work.shared["push"]
        return [memory.get("step", torch.full_like(work.theta, self.push)) + mean for memory in work.memories]

    def outcome(
        self, theta: Tensor, delta: Tensor, steps: int, lr: float, memory: Memory, shared: Memory
    ) -> tuple[Memory, Memory]:
        return {"step": delta}, {"first": delta}

    def start(self, theta: Tensor) -> dict[str, Tensor]:
        return {"push": torch.zeros_like(theta)}

    def server(self, shared: Memory, messages: Sequence[Memory], clients: int) -> dict[str, Tensor]:
        return {"push": shared["push"] + sum(message["first"][:1] for message in messages) / clients}


def test_a_rule_that_writes_everything_itself() -> None:
    rule, site = Steady(push=2.0), Site(alike(0), 0)
    shared = rule.start(THETA)
    first, other = site.work((1, 2), Order(1, THETA, rule, shared=shared))
    assert first.update.delta.tolist() == other.update.delta.tolist() == [2, 2]
    assert first.memory["step"].tolist() == [2, 2]
    assert first.message["first"].tolist() == [2, 2]
    shared = rule.server(shared, [first.message, other.message], 4)
    assert shared["push"].tolist() == [1, 1]
    again, new = site.work((1, 3), Order(2, THETA, rule, shared=shared, memories={1: {"step": THETA}}))
    assert again.update.delta.tolist() == (THETA + 1).tolist()
    assert new.update.delta.tolist() == [3, 3]


class Secretive(SGD):
    def outcome(
        self, theta: Tensor, delta: Tensor, steps: int, lr: float, memory: Memory, shared: Memory
    ) -> tuple[Memory, Memory]:
        return {"own": delta}, {}


class Talkative(SGD):
    def outcome(
        self, theta: Tensor, delta: Tensor, steps: int, lr: float, memory: Memory, shared: Memory
    ) -> tuple[Memory, Memory]:
        return {}, {"own": delta}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Secretive, r"Secretive\.outcome returned own to keep: say `remembers: ClassVar\[bool\] = True`"),
        (Talkative, r"Talkative\.outcome tells \('own',\): say `tells: ClassVar\[tuple\[str, \.\.\.\]\] = \('own',\)`"),
    ],
)
def test_what_a_rule_does_not_announce_is_refused(kind: type[SGD], reason: str) -> None:
    with pytest.raises(FipaError, match=reason):
        Site(alike(0), 0).work((0,), Order(1, THETA, kind(steps=1)))


class Few(SGD):
    def train(self, work: LocalWork) -> Tensor:
        return super().train(work)[1:]


def test_a_rule_that_forgets_a_client_is_named() -> None:
    with pytest.raises(FipaError, match=r"Few\.train must return updates of shape 2 x 2, got \[\(2,\)\]"):
        Site(alike(0), 0).work((0, 1), Order(1, THETA, Few(steps=1)))


@dataclass(frozen=True)
class Half(SGD):
    """Corrects the gradients of those who have a memory."""

    def correction(self, theta: Tensor, memory: Memory, shared: Memory) -> Tensor | None:
        return memory.get("extra")


def test_corrections_of_some_clients_only() -> None:
    extra = torch.tensor([0.5, -1.0], dtype=DOUBLE)
    order = Order(1, THETA, Half(lr=0.1, steps=3), memories={1: {"extra": extra}})
    hand = numbers(alike)
    for m, reply in enumerate(Site(alike(0), 0).work((0, 1, 2), order)):
        expected = hand[m].sgd(THETA.numpy(), 0.1, 3, extra.numpy() if m == 1 else 0.0)
        torch.testing.assert_close(reply.update.delta, torch.from_numpy(expected), rtol=1e-9, atol=1e-12)


def test_an_order_without_a_rule() -> None:
    with pytest.raises(FipaError, match="local rule is missing"):
        Site(alike(0), 0).work((0,), Order(1, THETA))


def test_the_floor_of_an_order_is_the_damping_of_gauss_newton_clients() -> None:
    curve, site = numbers(alike)[2], Site(alike(0), 0)
    (reply,) = site.work((2,), Order(1, THETA, GaussNewton(), floor=0.3))
    expected = -torch.linalg.solve(
        torch.from_numpy(curve.curvature) + 0.3 * torch.eye(2, dtype=DOUBLE),
        torch.from_numpy(curve.gradient(THETA.numpy())),
    )
    torch.testing.assert_close(reply.update.delta, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(FipaError, match="leave theirs out"):
        site.work((2,), Order(1, THETA, GaussNewton(damping=0.3), floor=0.3))
