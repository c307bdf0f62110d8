"""Masked sums on a grid in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

import fipa
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.sketch import SketchPlan
from fipa.errors import FipaError
from fipa.flower import FIPA, SecureFIPA
from fipa.flower.local import LocalGrid
from flower.cases import app, initial, refusals, same, tensors

RULE = fipa.AdditiveFIPA(damping=0.1, step=0.5)
PLAN = AdditivePlan(width=12)
SETTINGS: dict[str, Any] = {"plan": PLAN, "seed": 2}


def close(a: Any, b: Any) -> None:
    for name, tensor in tensors(a).items():
        torch.testing.assert_close(tensor, tensors(b)[name], atol=2e-6, rtol=1e-5)


def test_equals_plain_additive_fipa() -> None:
    plain = FIPA(RULE, fraction_evaluate=0.0, **SETTINGS).start(LocalGrid(app(), 4), initial(), 3)
    masked = SecureFIPA(RULE, **SETTINGS).start(LocalGrid(app(), 4), initial(), 3)
    close(masked.arrays, plain.arrays)
    assert not same(masked.arrays, initial())
    assert masked.train_metrics_clientapp[1]["examples"] == sum(20 + 10 * k for k in range(4))
    assert masked.train_metrics_clientapp[1]["uplink-bytes"] == 4 * 8 * (43 * 14 + 1)
    assert "loss" not in masked.train_metrics_clientapp[1]


@pytest.mark.parametrize("phase", ["keys", "shares", "masked", "unmask"])
def test_a_client_that_leaves(phase: str) -> None:
    def gone(message: Message, k: int) -> int | None:
        return None if k == 3 and "secure" in message.content and message.content["secure"]["phase"] == phase else 0

    def absent(message: Message, k: int) -> int | None:
        return None if k == 3 and phase != "unmask" and "config" in message.content else 0

    strategy = SecureFIPA(RULE, deadline=0.0, grace=0.0, **SETTINGS)
    masked = strategy.start(LocalGrid(app(), 4, gone), initial(), 2)
    plain = FIPA(RULE, fraction_evaluate=0.0, deadline=0.0, grace=0.0, **SETTINGS).start(
        LocalGrid(app(), 4, absent), initial(), 2
    )
    close(masked.arrays, plain.arrays)
    assert masked.train_metrics_clientapp[2]["clients"] == (4 if phase == "unmask" else 3)


def test_too_few_stay() -> None:
    def gone(message: Message, k: int) -> int | None:
        return None if k >= 2 and "config" in message.content else 0

    strategy = SecureFIPA(RULE, deadline=0.0, grace=0.0, **SETTINGS)
    result = strategy.start(LocalGrid(app(), 4, gone), initial(), 1, timeout=0.2)
    assert same(result.arrays, initial())
    assert "2 clients (0, 1) answered in phase 'masked', 3 needed" in strategy.events[0]["text"]


def test_hostile_replies_are_refused() -> None:
    class Hostile(LocalGrid):
        def _answer(self, message: Message, node: int) -> Message:
            reply = super()._answer(message, node)
            if node % 10 == 3 and "secure" in message.content:
                reply = Message(RecordDict({"secure": ConfigRecord({"phase": "keys", "ids": "x"})}), reply_to=message)
            return reply

    strategy = SecureFIPA(RULE, deadline=0.0, grace=0.0, **SETTINGS)
    result = strategy.start(Hostile(app(), 4), initial(), 1)
    assert result.train_metrics_clientapp[1]["clients"] == 3
    assert len(refusals(strategy)) == 1


def test_the_server_cannot_have_a_round_twice() -> None:
    seen: list[Message] = []

    def watch(message: Message, k: int) -> int:
        seen.append(message)
        return 0

    grid = LocalGrid(app(), 3, watch)
    SecureFIPA(RULE, **SETTINGS).start(grid, initial(), 1)
    keys = next(m for m in seen if "secure" in m.content and m.content["secure"]["phase"] == "keys")
    (reply,) = grid.send_and_receive([keys])
    assert reply.has_error()
    assert "has been here before" in reply.error.reason


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_rounds": 2},
        {"late": 0.5},
        {"precision": "int8"},
        {"rule": fipa.FIPA()},
        {"plan": SketchPlan()},
        {"control": fipa.StepControl()},
        {"local": fipa.Scaffold(steps=1)},
        {"local": fipa.Moon(steps=1)},
    ],
)
def test_settings_that_need_single_clients(settings: dict[str, Any]) -> None:
    with pytest.raises(FipaError, match="SecureFIPA"):
        SecureFIPA(**settings)
