"""Runs that are safe, seen and resumed: alarms, checkpoints, results for the report, and servers that are killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Error, Message
from torch import nn

import fipa
from fipa.errors import FipaError
from fipa.federation.checkpoint import load_state
from fipa.federation.coordinator import State
from fipa.federation.record import RoundRecord
from fipa.flower import FIPA
from fipa.flower.journal import Journal, row
from fipa.flower.local import FIRST, LocalGrid
from flower.cases import app, initial, network, same, tensors

QUIET = {"fraction_evaluate": 0.0}
FIXED = {"examples": 20, **QUIET}  # no choice depends on the clock


class Killed(BaseException):
    """In the place of kill -9: nothing catches it."""


class Deadly(LocalGrid):
    """The server dies when it sends or looks for its so-many-th message."""

    def __init__(self, *args: Any, after: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.left = after

    def _tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def push_messages(self, messages: Any) -> Any:
        self._tick()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        self._tick()
        return super().pull_messages(message_ids)


def frozen() -> nn.Module:
    model = network()
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.long
def test_a_killed_server_ends_with_the_same_parameters(tmp_path: Path) -> None:
    """In the middle of rounds, of trials, and before the first round is done; with clients that freeze something."""
    whole = FIPA(**FIXED).start(LocalGrid(app(frozen), 3), initial(frozen), 8)
    rng, file, deaths = random.Random(0), tmp_path / "run.pt", 0
    while True:
        try:
            grid = Deadly(app(frozen), 3, after=rng.randint(3, 25))
            result = FIPA(**FIXED, checkpoint=file).start(grid, initial(frozen), 8)
            break
        except Killed:
            deaths += 1
    assert deaths > 2
    assert same(result.arrays, whole.arrays)
    assert not same(result.arrays, initial(frozen))
    assert list(result.train_metrics_clientapp) == list(range(1, 9))


# kills itself so many seconds after a round: who watches from outside may come late on a busy machine
SERVER = """
import os, signal, sys, threading, time
sys.path[:0] = sys.argv[3:5]
import torch
from fipa.flower import FIPA
from fipa.flower.local import LocalGrid
from flower.cases import app, initial
torch.set_num_threads(1)
def kill():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.001)
    time.sleep(float(sys.argv[5]))
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
FIPA(examples=20, fraction_evaluate=0.0, checkpoint=sys.argv[1]).start(LocalGrid(app(), 3), initial(), 12)
open(sys.argv[2], "w").close()
"""


@pytest.mark.long
def test_kill_minus_nine(tmp_path: Path) -> None:
    """A server as a process of its own, killed at a random moment of twelve rounds; another goes on from its files."""
    state, end, rng = tmp_path / "run.pt", tmp_path / "end", random.Random(0)
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", SERVER, str(state), str(end), str(tests.parent / "src"), str(tests)]
    killed = subprocess.run([*command, str(rng.uniform(0.0, 0.1))], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not end.exists()
    assert load_state(state)[0].round_number >= 1
    found = FIPA(**FIXED, checkpoint=state).start(LocalGrid(app(), 3), initial(), 12)
    assert same(found.arrays, FIPA(**FIXED).start(LocalGrid(app(), 3), initial(), 12).arrays)


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    strategy = FIPA(**FIXED, checkpoint=file, keep=2)
    strategy.start(LocalGrid(app(), 3), initial(), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-4.pt", "run-5.pt", "run-best.pt", "run.pt"]
    best = load_state(tmp_path / "run-best.pt")
    losses = [record.loss_after for record in strategy.records]
    assert best is not None
    assert losses[best[0].round_number - 1] == min(loss for loss in losses if loss is not None)


def test_damping_may_change_on_resume_and_what_must_not_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    FIPA(fipa.CompletedFIPA(1.0), control=True, checkpoint=file, **FIXED).start(LocalGrid(app(), 2), initial(), 2)
    with pytest.raises(FipaError, match=r"rule of stage 0 = CompletedFIPA, now it is FedAvg.* all else may"):
        FIPA(fipa.FedAvg(), checkpoint=file, **QUIET).start(LocalGrid(app(), 2), initial(), 3)
    other = FIPA(fipa.CompletedFIPA(9.0), control=True, checkpoint=file, precision="int8", **FIXED)
    other.start(LocalGrid(app(), 2), initial(), 3)
    assert other.records[-1].damping is not None
    assert other.records[-1].damping >= 9.0
    assert [record.round for record in other.records] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"0.weight": torch.zeros(6, 4)}, r"'0.weight' was of shape \[5, 4\], now it is of shape \[6, 4\]"),
        ({"3.weight": torch.zeros(1)}, "'3.weight' was not there, now it is of shape"),
    ],
)
def test_another_architecture_than_the_checkpoints(arrays: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    FIPA(**FIXED, checkpoint=file).start(LocalGrid(app(), 2), initial(), 1)
    changed = ArrayRecord({**tensors(initial()), **arrays})
    with pytest.raises(FipaError, match=words):
        FIPA(**FIXED, checkpoint=file).start(LocalGrid(app(), 2), changed, 2)


def test_no_step_raises_the_loss_even_with_a_wild_learning_rate() -> None:
    """Updates that would ruin the model: the loss never rises, clients are slowed, and the model stays finite."""
    strategy = FIPA(**FIXED)
    wild = LocalGrid(app(lambda: Wild()), 3)
    result = strategy.start(wild, initial(Wild), 6)
    assert all(record.loss_after <= record.loss for record in strategy.records)  # type: ignore[operator]
    assert result.train_metrics_clientapp[6]["lr-scale"] < 1
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(result.arrays).values())
    assert strategy.records[-1].loss_after < strategy.records[0].loss  # type: ignore[operator]


class Wild(nn.Module):
    """Outputs a hundred times too large: the learning rate is a thousand times so."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 30 * self.layer(x)


def test_a_judge_that_sees_nan_is_heard() -> None:
    """Client 1 answers NaN for whatever is proposed: no step is taken, though the others would gain."""

    class Nan(LocalGrid):
        def _answer(self, message: Message, node: int) -> Message:
            reply = super()._answer(message, node)
            if (
                node == 101
                and message.metadata.message_type == "evaluate"
                and not same(message.content["arrays"], initial())
            ):
                next(iter(reply.content.metric_records.values()))["eval_loss"] = float("nan")
            return reply

    result = FIPA(**FIXED).start(Nan(app(), 3), initial(), 1)
    assert same(result.arrays, initial())


def test_alarms() -> None:
    journal, state = Journal(), State(torch.zeros(1))
    for k, (loss, length) in enumerate([(1.0, 0.1), (0.9, 0.1), (0.8, 0.1), (1.3, 5.0)], start=1):
        journal.keep(RoundRecord(k, loss=loss, step_length=length, trials=1), state)
    texts = [event["text"] for event in journal.events]
    assert [text[:18] for text in texts] == ["alarm: the clients", "alarm: a step of l"]
    assert [journal.metrics["train_metrics_clientapp"][k]["alarms"] for k in (1, 2, 3, 4)] == [0, 0, 0, 2]


def test_the_table_of_a_round() -> None:
    events = ({"round": 3, "client": 1, "text": "node 5 did not answer in time (work)"},)
    record = RoundRecord(3, loss=2.0, loss_after=1.5, trials=2, step_length=0.25, events=events, uplink_bytes=2**20)
    assert row(record).split() == ["3", "0", "0", "1", "0", "2", "1.5", "2", "0.25", "1.00", "0.00", "0", "0.0"]


@pytest.mark.long
def test_results_for_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    settings = {"output": folder, "checkpoint": tmp_path / "run.pt", "examples": 20}
    FIPA(**settings).start(LocalGrid(app(), 3), initial(), 2)
    FIPA(**settings).start(LocalGrid(app(), 3), initial(), 4)  # resumed: the page shows all rounds
    results = fipa.Results.load(folder)
    assert results.metric("FIPA").shape == (1, 4)
    assert results.series("loss_after", "FIPA")[0, 3] <= results.series("loss", "FIPA")[0, 0]
    assert results.content["metric"] == {"name": "accuracy", "goal": "max", "scale": "linear"}
    page = results.report().read_text("utf-8")
    assert "accuracy" in page
    assert json.loads((folder / "results.json").read_text("utf-8"))["arms"]["FIPA"]["0"]["status"] == "finished"


class Mortal(LocalGrid):
    """Node 1 dies with its first order, and with its first judgement."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.died: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for name, message in zip(ids, messages, strict=True):
            kind = message.metadata.message_type
            if message.metadata.dst_node_id == FIRST + 1 and "config" in message.content and kind not in self.died:
                self.died.add(kind)
                self._waiting[name] = 0, Message(Error(5, "node unavailable"), reply_to=message)
        return ids


@pytest.mark.parametrize(("quorum", "waits"), [(1.0, True), (0.5, False)])
def test_a_node_that_dies_is_asked_anew_if_there_is_no_quorum_without_it(quorum: float, waits: bool) -> None:
    grid, strategy = Mortal(app(), 3), FIPA(quorum=quorum, **FIXED)
    result = strategy.start(grid, initial(), 3)
    assert len(grid.died) == 2
    assert same(result.arrays, FIPA(**FIXED).start(LocalGrid(app(), 3), initial(), 3).arrays) == waits
    assert any("node unavailable" in event["text"] for event in strategy.events) != waits


def test_after_a_round_without_a_step_clients_learn_slower_and_the_whole_step_is_tried_again() -> None:
    losses = iter([1.0, *[2.0] * 4, 0.5])
    strategy = FIPA(validate=lambda arrays: next(losses), **FIXED)
    strategy.start(LocalGrid(app(), 2), initial(), 2)
    first, second = strategy.records
    assert (first.accepted, first.trials, first.step) == (False, 4, pytest.approx(1 / 27))
    assert (second.accepted, second.trials, second.step) == (True, 1, 1.0)
