"""The server's memory: replies are read one by one, kept in files beyond the limit, and give the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

import fipa
from fipa.curvature.sketch import SketchPlan
from fipa.federation.coordinator import State
from fipa.federation.messages import Order
from fipa.flower import FIPA
from fipa.flower.local import FIRST, LocalGrid
from fipa.flower.roster import FEW, collect, post
from fipa.flower.transport import FlowerTransport, Patience
from fipa.spill import in_file
from flower.cases import app, initial, same

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "safety": None, "control": False}
NODES = 2 * FEW + 3
RULES = {
    "fedavg": fipa.FedAvg(), "fipa": fipa.FIPA(), "additive": fipa.AdditiveFIPA(damping=0.1),
    "diagonal": fipa.DiagonalFisher(damping=0.1), "foof": fipa.FOOF(), "momentum": fipa.FedAvgM(),
}  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the updates that servers took were in files."""
    found: list[bool] = []
    answers = FlowerTransport._answers

    def spied(self: FlowerTransport, ask: Any, *more: Any) -> Any:
        result = answers(self, ask, *more)
        if isinstance(ask.question, Order):
            found.extend(in_file(reply.update.delta) for reply in result.values.values())
        return result

    monkeypatch.setattr("fipa.spill.SMALLEST", 1)
    monkeypatch.setattr(FlowerTransport, "_answers", spied)
    return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_same_bits_from_files(rule: Any, seen: list[bool]) -> None:
    strategies = FIPA(rule, **QUIET), FIPA(rule, memory_limit=0, **QUIET)
    results = [strategy.start(LocalGrid(app(), 4), initial(), 2) for strategy in strategies]
    assert seen == [False] * 8 + [True] * 8
    assert same(*(result.arrays for result in results))
    one, other = ([replace(record, seconds=0.0, metrics={}) for record in strategy.records] for strategy in strategies)
    assert one == other


@pytest.mark.parametrize("rule", [fipa.FIPA(damping=0.3), fipa.CompletedFIPA(damping=0.3)], ids=["paper", "completed"])
def test_sketches_beyond_the_limit_are_solved_with_in_any_order_of_arrival(rule: Any, seen: list[bool]) -> None:
    plan = SketchPlan(rank=6)
    direct = FIPA(rule, plan=plan, **QUIET).start(LocalGrid(app(), 4), initial(), 2).arrays.to_torch_state_dict()
    found = []
    for delay in (lambda message, k: 0, lambda message, k: 3 - k):  # first to last, and last to first
        result = FIPA(rule, plan=plan, memory_limit=0, **QUIET).start(LocalGrid(app(), 4, delay), initial(), 2)
        found.append(result.arrays)
    assert seen == [False] * 8 + [True] * 16
    assert same(*found)
    for name, tensor in found[0].to_torch_state_dict().items():
        torch.testing.assert_close(tensor, direct[name], rtol=1e-4, atol=1e-5)


def test_late_answers_in_files_outlive_a_killed_server(seen: list[bool], tmp_path: Path) -> None:
    """Client 2 is late in the first round; the server ends after the second, and resumes from its checkpoint."""

    def run(rounds: tuple[int, ...], limit: int, file: str) -> Any:
        def delay(message: Message, k: int) -> int | None:
            late = k == 2 and "config" in message.content
            return (1 if message.content["config"]["server-round"] == 1 else None) if late else 0

        grid = LocalGrid(app(), 3, delay)
        settings = {"deadline": 0.0, "grace": 0.0, "late": 0.5, "checkpoint": tmp_path / file, **QUIET}
        for last in rounds:
            result = FIPA(fipa.FedAvg(), memory_limit=limit, **settings).start(grid, initial(), last)
        return result.arrays

    whole = run((3,), 2**30, "whole")
    assert not any(seen)
    assert same(run((2, 3), 0, "files"), whole)
    assert any(seen)


def test_a_late_answer_in_a_file_is_saved_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fipa.federation.checkpoint import load_state, save_state
    from fipa.federation.messages import Late
    from fipa.spill import Shelf

    monkeypatch.setattr("fipa.spill.SMALLEST", 1)
    delta = torch.randn(100)
    late = Late(Shelf(0).keep(fipa.ClientUpdate(delta, 10, client_id=2)), 1, 2)
    save_state(tmp_path / "state.pt", State(torch.zeros(100), late=(late,)), status="running")
    loaded = load_state(tmp_path / "state.pt")
    assert loaded is not None
    assert torch.equal(loaded[0].late[0].update.delta, delta)


class Counted(LocalGrid):
    """Counts how many replies the server holds when it fetches more, and how many orders it makes at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: list[weakref.ref[RecordDict]] = []
        self.most = self.most_sent = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.most_sent = max(self.most_sent, sum("config" in message.content for message in messages))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.made += [weakref.ref(reply.content) for reply in replies if "update" in reply.content]
        gc.collect()
        self.most = max(self.most, sum(made() is not None for made in self.made))
        return replies


def test_a_server_holds_few_messages_at_once() -> None:
    grid = Counted(app(), NODES)
    strategy = FIPA(fipa.FedAvg(), **QUIET)
    strategy.start(grid, initial(), 2)
    assert strategy.records[-1].local_steps == (0,) * NODES
    assert 0 < grid.most <= FEW + 1  # those that were fetched together, and the one before them
    assert grid.most_sent == FEW


def test_what_comes_in_time_counts_however_long_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server reads the first reply, which takes until after the deadline, the last one comes."""
    clock = [0.0]
    monkeypatch.setattr("fipa.flower.roster.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("fipa.flower.roster.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    grid = LocalGrid(app(), 3, lambda message, k: int(k == 2))
    ids = post(grid, [Message(RecordDict(), dst_node_id=FIRST + k, message_type="query.fipa_who") for k in range(3)])
    taken = []
    for reply in collect(grid, ids, Patience(deadline=10.0, quorum=0.5, grace=0.0)):
        taken.append(reply.metadata.src_node_id - FIRST)
        clock[0] += 100.0
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("limit", [-1, 0.5, True])
def test_bad_limits(limit: Any) -> None:
    with pytest.raises(fipa.FipaError, match="memory_limit"):
        FIPA(memory_limit=limit)
