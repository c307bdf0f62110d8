"""Experiments give the same parameters, to the last bit, whoever carries the messages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from flwr.serverapp.strategy import Result
from torch import Tensor

import fipa
from fipa.config.load import load
from fipa.errors import FipaError
from fipa.federation.parameters import load_theta
from fipa.federation.record import RoundRecord
from fipa.flower.copies import folder
from fipa.flower.experiment import client_app, run
from fipa.flower.local import LocalGrid
from fipa.flower.request import Request
from fipa.runner import Run

DEMO = ["engine.group=1", "rounds=3", "problem.samples=50"]
BRIEF = [*DEMO, "defaults.local={name='adam', lr=1e-4, steps=20}"]
DIGITS = ["engine.group=1", "rounds=2", "warmup.rounds=2", "problem.clients=4", "problem.samples=40"]
SOME = ["arms.*.participation.count=2", "arms.*.participation.kind=uniform", "warmup.participation.count=2",
        "warmup.participation.kind=uniform"]  # fmt: skip
HEAD = ["arms.FIPA controlled.params=9.*"]
FEW = "arms.FIPA shared basis.rule.columns=6"
TRAIN = ["arms.FIPA shared basis.local={name='sgd', lr=0.1, epochs=1, batch=16}",
         "arms.FIPA shared basis.rule.damping=0.1", "arms.FIPA shared basis.trust_region=false"]  # fmt: skip
# with numbers of steps that the clients choose, not only the most
ADAPTIVE = ["engine.group=1", "rounds=3", "problem.samples=50", "defaults.local={name='adam', lr=0.005, steps=60}",
            "arms.FIPA adaptive (paper).adaptive_steps={constant=30, most=60, sums=true}"]  # fmt: skip
PDE = ["engine.group=1", "rounds=2", "problem.points={interior=20, test=16}", "problem.hidden=[8]"]


def engine(name: str, arm: str, overrides: list[str], folder: Path) -> tuple[Tensor, list[RoundRecord]]:
    """The arm as `fipa run` computes it, after its warm-up: the parameters, and what was recorded."""
    results = fipa.run(name, arms=[arm], seeds=0, set=overrides, out=folder / "run", quiet=True)
    saved = Run.open(results.directory).folder(arm, 0).load()
    assert saved is not None
    return saved.state.theta, saved.records


ARMS = {
    "paper's rule": ("demo", "FIPA (paper's rule)", BRIEF, 2),
    "falling damping": ("demo", "FIPA completed", BRIEF, 2),
    "step control": ("demo", "FIPA controlled", DEMO, 2),
    "best step of a round": ("digits", "FIPA controlled", DIGITS, 4),
    "head only": ("digits", "FIPA controlled", [*DIGITS, *HEAD], 4),
    "scaffold": ("digits", "SCAFFOLD", [*DIGITS, "rounds=3", *SOME], 4),
    "moon": ("digits", "MOON", [*DIGITS, "rounds=3", *SOME], 4),
    "sums": ("digits", "FIPA additive", DIGITS, 4),
    "a rule with a state": ("digits", "FedAdam", [*DIGITS, *SOME], 4),
    "shared basis, some of them": ("digits", "FIPA shared basis", [*DIGITS, "rounds=4", *SOME], 4),
    "shared basis that turns": ("digits", "FIPA shared basis", [*DIGITS, "rounds=3", FEW], 4),
    "shared basis, clients that train": ("digits", "FIPA shared basis", [*DIGITS, *TRAIN], 4),
    "adaptive": ("fit-adaptive", "FIPA adaptive (paper)", ADAPTIVE, 2),
    "acceleration": ("poisson-1d", "FIPA accelerated, low rank", PDE, 2),
    "corrections": ("poisson-1d", "FIPA corrected, low rank", [*PDE, "arms.FIPA corrected, low rank.rounds=3"], 2),
}


@pytest.mark.long
@pytest.mark.parametrize("case", ARMS)
def test_engine_and_flower_agree_to_the_last_bit(case: str, tmp_path: Path) -> None:
    name, arm, overrides, clients = ARMS[case]
    theta, result = run(LocalGrid(client_app(), clients), name, arm, overrides, output=tmp_path / "theta.safetensors")
    expected, records = engine(name, arm, overrides, tmp_path)
    assert torch.equal(theta, expected)
    assert torch.equal(theta, load_theta(tmp_path / "theta.safetensors"))
    for record in records:  # the same story, and the same bill
        told = result.train_metrics_clientapp[record.round]
        assert told["loss"] == record.loss
        assert (told["trials"], told["trips"], told["messages"]) == (record.trials, record.trips, record.messages)
        assert told["uplink-bytes"] == record.uplink_bytes
        if case != "head only":  # the frozen part goes down once
            assert told["downlink-bytes"] == record.downlink_bytes
        assert result.evaluate_metrics_serverapp[record.round]["metric"] == record.metric


def test_a_frozen_part_is_sent_once_and_only_if_it_is_not_there(tmp_path: Path) -> None:
    name, arm, overrides, clients = ARMS["head only"]
    frames: list[tuple[int, int]] = []

    def watch(message: Message, k: int) -> int:
        if "frame" in message.content:
            frames.append((Request.of(message.content).round_number, k))
        return 0

    grid = LocalGrid(client_app(), clients, watch)
    run(grid, name, arm, overrides)
    assert frames == [(3, 0), (3, 1), (3, 2), (3, 3)]  # the first round after the warm-up


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.long
@pytest.mark.parametrize("case", ["best step of a round", "scaffold", "adaptive", "shared basis that turns"])
def test_a_server_killed_within_a_round_resumes_to_the_same_bits(case: str, tmp_path: Path) -> None:
    """Its clients have trained, and remember the round that never was."""
    name, arm, overrides, clients = ARMS[case]
    expected, _ = run(LocalGrid(client_app(), clients), name, arm, overrides)
    last = max(load(name, overrides)[1].warmup.rounds if case != "adaptive" else 0, 0) + 2
    lives = [0]

    def kill(message: Message, k: int) -> int:
        if "fipa" in message.content and "request" in message.content["fipa"] and lives[0] == 0:
            request = Request.of(message.content)
            judged = {"best step of a round": "losses", "shared basis that turns": "curvatures"}.get(case, "work")
            if request.round_number == last and request.method == judged and k > 0:
                raise Killed
        return 0

    grid = LocalGrid(client_app(), clients, kill)
    with pytest.raises(Killed):
        run(grid, name, arm, overrides, checkpoint=tmp_path / "state.pt")
    lives[0] = 1
    theta, _ = run(grid, name, arm, overrides, checkpoint=tmp_path / "state.pt")
    assert torch.equal(theta, expected)


@cache
def undamaged() -> tuple[Tensor, Result]:
    name, arm, overrides, clients = ARMS["shared basis that turns"]
    return run(LocalGrid(client_app(), clients), name, arm, overrides)


@pytest.mark.parametrize("kind", ["bases", "models"])
@pytest.mark.parametrize("damage", ["lost", "spoilt"])
def test_a_copy_that_is_lost_or_spoilt_heals_itself(damage: str, kind: str) -> None:
    """Of the basis, or of the model that a client was sent on the first trip."""
    name, arm, overrides, clients = ARMS["shared basis that turns"]
    place = folder() / kind
    expected, before = undamaged()
    done: list[Path] = []

    def harm(message: Message, k: int) -> int:
        request = Request.of(message.content) if "fipa" in message.content else None
        if request is not None and request.method == "curvatures" and request.round_number == 4 and not done:
            mark = request.model if kind == "models" else request.curve["from"]
            files = [path for path in place.iterdir() if f"-{k}-{mark}" in path.name]
            done.extend(files)
            for path in files:
                path.unlink() if damage == "lost" else path.write_bytes(path.read_bytes()[:-1] + b"x")
        return 0

    for path in folder().glob("*/*"):
        path.unlink()
    theta, result = run(LocalGrid(client_app(), clients, harm), name, arm, overrides)
    assert len(done) == 1
    assert torch.equal(theta, expected)
    told, usual = (one.train_metrics_clientapp[4]["downlink-bytes"] for one in (result, before))
    assert told > usual  # all columns and the model, once more


@pytest.mark.parametrize(
    ("name", "arm", "reason"),
    [
        ("demo", "FIPA", "there is no arm 'FIPA'"),
        ("fit-gauss-newton", "centralised GN", "it has no clients"),
        ("stragglers", None, "its faults are simulated"),
    ],
)
def test_arms_that_have_no_meaning_on_flower(name: str, arm: str | None, reason: str) -> None:
    if arm is None:
        arm = next(a.name for a in load(name)[1].arms if a.faults.late)
    with pytest.raises(FipaError, match=reason):
        run(LocalGrid(client_app(), 2), name, arm)


def test_draws_by_example_counts_have_no_meaning_on_flower() -> None:
    weighted = ["arms.*.participation.kind=weighted", "arms.*.participation.count=1"]
    with pytest.raises(FipaError, match="drawn by their examples"):
        run(LocalGrid(client_app(), 2), "demo", "FIPA completed", weighted)
