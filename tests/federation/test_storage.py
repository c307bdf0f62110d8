"""Runs that were stopped at any point resume as if they had not been."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from federation.cases import DOUBLE, alike, comparable, run, stage
from fipa import FIPA, AdditiveFIPA, ClientUpdate, DiagonalFisher, FedAdam, FedAvg, FedAvgM, FipaError, Layout, Sketch
from fipa.clients.descent import SGD, Adam
from fipa.clients.scaffold import Scaffold
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.diagonal import DiagonalPlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.coordinator import State
from fipa.federation.messages import Late
from fipa.federation.participation import Faults, Participation
from fipa.federation.record import RoundRecord
from fipa.federation.storage import RunFolder, finite, write_json

FAULTS = Faults(drop=0.1, late=0.5, max_delay=3)
ADAM = Adam(lr=0.1, epochs=1, batch=3)
ARMS = {
    "momentum": Arm("a", (stage(FedAvgM(0.8), ADAM, 6),), Participation("weighted", 3), FAULTS, group=1),
    "adaptive server": Arm("a", (stage(FedAdam(0.1), ADAM, 4),)),  # side by side
    "scaffold": Arm(
        "a", (stage(FedAvg(), Scaffold(lr=0.2, steps=2), 6),), Participation("uniform", 2), FAULTS, group=1
    ),
    "control": Arm(
        "a",
        (
            stage(FIPA(0.1), SGD(lr=9.0, steps=1), 3, SketchPlan(rank=1), control=StepControl()),
            stage(FIPA(0.5), SGD(lr=0.1, steps=1), 3, SketchPlan(rank=2), control=StepControl()),
        ),
        faults=FAULTS,
        group=1,
    ),
    "diagonal": Arm("a", (stage(DiagonalFisher(0.1), ADAM, 4, DiagonalPlan()),), faults=FAULTS, group=1),
    "additive": Arm("a", (stage(AdditiveFIPA(0.1), ADAM, 3, AdditivePlan(width=4)),), group=1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ARMS)
def test_interrupted_run_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    """After every round, through the files; momentum, variates, control and late answers included."""
    arm = ARMS[name]
    whole = run(arm, alike, seed=3)
    if name in ("momentum", "scaffold", "control", "diagonal"):
        assert any(state.late for state, _ in whole[:-1])
    if name == "control":
        assert len({state.control_value for state, _ in whole}) > 2
    for stop in range(1, arm.last):
        folder = RunFolder(tmp_path / str(stop))
        for state, record in whole[:stop]:
            folder.save(state, RoundRecord.of(record), "running", 0.5)
        loaded, history, status, initial = RunFolder(tmp_path / str(stop)).load()
        assert (status, initial) == ("running", 0.5)
        kept = [record.plain() for record in history]
        assert kept == json.loads(json.dumps(finite([record for _, record in whole[:stop]])))
        rest = run(arm, alike, seed=3, state=loaded)
        assert len(rest) == arm.last - stop
        for (state, record), (expected, reference) in zip(rest, whole[stop:], strict=True):
            assert torch.equal(state.theta, expected.theta)
            assert comparable(record) == comparable(reference)
            assert state.control_value == expected.control_value
            assert all(torch.equal(state.rule_state[key], t) for key, t in expected.rule_state.items())
            assert state.shared.keys() == expected.shared.keys()
            assert all(torch.equal(state.shared[key], t) for key, t in expected.shared.items())
            assert state.memories.keys() == expected.memories.keys()
            for client, memory in expected.memories.items():
                assert all(torch.equal(state.memories[client][key], t) for key, t in memory.items())
            assert [(late.sent, late.arrives) for late in state.late] == [
                (late.sent, late.arrives) for late in expected.late
            ]
            assert [theta.tolist() for theta in state.recent] == [theta.tolist() for theta in expected.recent]


def state_at(k: int) -> State:
    return State(torch.full((3,), float(k), dtype=DOUBLE), k)


def filled(path: Path, rounds: int, keep_thetas: bool = False) -> RunFolder:
    folder = RunFolder(path, keep_thetas)
    for k in range(1, rounds + 1):
        folder.save(state_at(k), RoundRecord(k, metric=k / 7), "running")
    return folder


def test_nothing_there(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "deep" / "folder").load() is None


def test_everything_of_a_state_comes_back(tmp_path: Path) -> None:
    layout = Layout(("weight",), ((3,),))
    sketch = Sketch(torch.eye(3, dtype=DOUBLE)[:, :2], torch.ones(2, dtype=DOUBLE), layout, "mse", 4, 2.0)
    late = Late(ClientUpdate(torch.ones(3, dtype=DOUBLE), 4, sketch, 7, 0.5), 1, 3)
    state = State(
        torch.arange(3.0), 1, {"momentum": torch.ones(3)}, 0.25, {"variate": torch.zeros(3)},
        {4: {"variate": torch.ones(3)}}, (late,), {"running_mean": torch.ones(2)}, (torch.zeros(3), torch.ones(3)),
    )  # fmt: skip
    folder = RunFolder(tmp_path)
    folder.save(state, RoundRecord(1), "finished")
    found, history, status, initial = folder.load()
    assert (history, status, initial) == ([RoundRecord(1)], "finished", None)
    assert torch.equal(found.theta, state.theta)
    assert (found.round_number, found.control_value) == (1, 0.25)
    assert torch.equal(found.rule_state["momentum"], torch.ones(3))
    assert found.memories[4]["variate"].tolist() == [1, 1, 1]
    assert found.shared["variate"].tolist() == [0, 0, 0]
    assert found.buffers["running_mean"].tolist() == [1, 1]
    assert [theta.tolist() for theta in found.recent] == [[0.0] * 3, [1.0] * 3]
    (again,) = found.late
    assert (again.sent, again.arrives) == (1, 3)
    assert (again.update.num_examples, again.update.client_id, again.update.weight) == (4, 7, 0.5)
    assert torch.equal(again.update.sketch.eigenvectors, sketch.eigenvectors)
    assert again.update.sketch.layout == layout
    assert (again.update.sketch.loss, again.update.sketch.num_examples, again.update.sketch.trace) == ("mse", 4, 2.0)


@pytest.mark.parametrize("torn", ['{"round": 4, "met', '{"round": 4}\n', '{"round": 4}\n{"round": 5}\n{"ro'])
def test_lines_after_the_checkpoint_are_cut_off(torn: str, tmp_path: Path) -> None:
    """A run that was killed between the history and the checkpoint."""
    folder = filled(tmp_path, 3)
    with folder.history.open("a") as file:
        file.write(torn)
    whole = folder.history.read_text()
    for repair in (False, True):  # one who reads does not touch what another may be writing
        assert folder.history.read_text() == whole
        state, history, *_ = folder.load(repair)
        assert state.round_number == 3
        assert [record.round for record in history] == [1, 2, 3]
    folder.save(state_at(4), RoundRecord(4), "running")
    _, history, *_ = folder.load()
    assert [record.round for record in history] == [1, 2, 3, 4]


def test_killed_in_the_first_round(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, keep_thetas=True)
    folder.history.write_text('{"round": 1}\n')
    folder.thetas.write_bytes(b"12345678")
    assert folder.load() is None
    assert folder.history.exists()
    assert folder.load(repair=True) is None
    assert not folder.history.exists()
    assert not folder.thetas.exists()


def test_killed_while_writing_the_checkpoint(tmp_path: Path) -> None:
    """What was being written does not count."""
    folder = filled(tmp_path, 2)
    folder.checkpoint.with_suffix(".part").write_bytes(folder.checkpoint.read_bytes()[:50])
    state, history, *_ = folder.load()
    assert (state.round_number, len(history)) == (2, 2)
    folder.save(state_at(3), RoundRecord(3), "running")
    assert folder.load()[0].round_number == 3


@pytest.mark.parametrize("lines", [0, 2])
def test_missing_lines(lines: int, tmp_path: Path) -> None:
    folder = filled(tmp_path, 3)
    folder.history.write_text("".join(folder.history.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(FipaError, match=f"history.jsonl has {lines} rounds, its checkpoint 3: delete"):
        folder.load()
    folder.history.unlink()
    with pytest.raises(FipaError, match="has 0 rounds"):
        folder.load()


def test_broken_line_before_the_checkpoint(tmp_path: Path) -> None:
    """Cannot come from a kill, but from a full disk or a curious editor."""
    folder = filled(tmp_path, 3)
    whole = folder.history.read_text().splitlines(keepends=True)
    folder.history.write_text("".join([whole[0], '{"round": 2, "met\n', whole[2]]))
    with pytest.raises(FipaError, match=r"history\.jsonl"):
        folder.load()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut off", "half"])
def test_unreadable_checkpoint(content: bytes | str, tmp_path: Path) -> None:
    folder = filled(tmp_path, 2)
    whole = folder.checkpoint.read_bytes()
    folder.checkpoint.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(FipaError, match=r"checkpoint\.pt cannot be read: delete .* to run this arm again"):
        folder.load()


class Evil:
    """Leaves a trace if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_checkpoints_cannot_run_code(how: str, tmp_path: Path) -> None:
    folder, trace = filled(tmp_path, 1), tmp_path / "trace"
    content = {"state": {"theta": Evil(trace)}, "status": "running"}
    if how == "torch":
        torch.save(content, folder.checkpoint)
    else:
        folder.checkpoint.write_bytes(pickle.dumps(content))
    with pytest.raises(FipaError, match="cannot be read"):
        folder.load()
    assert not trace.exists()


def test_classes_that_are_not_on_the_list(tmp_path: Path) -> None:
    """Not even harmless ones of our own."""
    folder = filled(tmp_path, 1)
    torch.save({"state": {"theta": StepControl()}, "status": "running"}, folder.checkpoint)
    with pytest.raises(FipaError, match="cannot be read"):
        folder.load()


def test_thetas_are_kept_round_by_round(tmp_path: Path) -> None:
    folder = filled(tmp_path, 3, keep_thetas=True)
    with folder.thetas.open("ab") as file:
        file.write(b"half a round")
    folder.load(repair=True)
    found = np.fromfile(folder.thetas, np.float64).reshape(-1, 3)
    assert found.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert not filled(tmp_path / "without", 2).thetas.exists()


@pytest.mark.parametrize("left", [None, 10])
def test_missing_thetas_are_not_made_up(left: int | None, tmp_path: Path) -> None:
    """Parameters that were lost must not come back as zeros."""
    folder = filled(tmp_path, 3, keep_thetas=True)
    if left is None:
        folder.thetas.unlink()
    else:
        folder.thetas.write_bytes(folder.thetas.read_bytes()[:left])
    with pytest.raises(FipaError, match=r"thetas\.bin"):
        folder.load()


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    nested = {
        "a": math.nan,
        "b": [math.inf, -math.inf, 1.5, (2, math.nan)],
        "c": {"d": math.nan, "e": "NaN"},
        "f": True,
    }
    expected = {"a": None, "b": [None, None, 1.5, [2, None]], "c": {"d": None, "e": "NaN"}, "f": True}
    assert finite(nested) == expected
    folder = RunFolder(tmp_path)
    folder.save(state_at(1), RoundRecord(1, metric=math.nan, damping=math.inf, spectra={"0": [math.nan]}), "running")
    line = json.loads(folder.history.read_text(), parse_constant=pytest.fail)
    assert (line["metric"], line["damping"], line["spectra"]) == (None, None, {"0": [None]})
    write_json(tmp_path / "results.json", {"é": nested})
    text = (tmp_path / "results.json").read_text("utf-8")
    assert "é" in text
    assert json.loads(text, parse_constant=pytest.fail) == {"é": expected}
    assert not list(tmp_path.glob("*.part"))


def test_killed_in_the_middle_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one stands until the new one is complete."""
    folder = filled(tmp_path, 2)

    def killed(content: object, file: BinaryIO) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr("fipa.federation.checkpoint.torch.save", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.save(state_at(3), RoundRecord(3), "running")
    state, history, *_ = folder.load()
    assert (state.round_number, [record.round for record in history]) == (2, [1, 2])
    assert (tmp_path / "checkpoint.pt.part").read_bytes() == b"half of it"


def test_history_is_written_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose round is missing from the history could not be continued."""
    folder = filled(tmp_path, 1)
    seen = []
    original = torch.save
    monkeypatch.setattr(
        "fipa.federation.checkpoint.torch.save",
        lambda *args: (seen.append(len(folder.history.read_text().splitlines())), original(*args)),
    )
    folder.save(state_at(2), RoundRecord(2), "running")
    assert seen == [2]


def test_rounds_of_a_warm_up_are_kept_elsewhere(tmp_path: Path) -> None:
    """A folder after 4 rounds: its first line is round 5, and what follows the checkpoint is cut off."""
    folder = RunFolder(tmp_path, keep_thetas=True, after=4)
    for k in (5, 6):
        folder.save(state_at(k), RoundRecord(k), "running")
    state, history, *_ = folder.load()
    assert (state.round_number, history) == (6, [RoundRecord(5), RoundRecord(6)])
    with folder.history.open("a") as file:
        file.write('{"round": 7')
    assert len(RunFolder(tmp_path, True, 4).load(repair=True)[1]) == 2
    assert folder.history.read_text().count("\n") == 2
    assert folder.thetas.stat().st_size == 2 * 3 * 8
    with pytest.raises(FipaError, match="has 2 rounds, its checkpoint 6"):
        RunFolder(tmp_path).load()
    assert folder.start(4).name == "theta-4.safetensors"


def test_history_of_older_runs_is_read(tmp_path: Path) -> None:
    """Written before there were averages, trips and messages; its checkpoint has no recent models."""
    folder = RunFolder(tmp_path)
    folder.history.write_text('{"round": 1, "metric": 0.5, "ranks": [3], "initial_metric": 2.0, "of the future": 1}\n')
    torch.save({"state": {"theta": torch.zeros(3), "round_number": 1}, "status": "finished"}, folder.checkpoint)
    assert folder.load()[1:] == ([RoundRecord(1, metric=0.5, ranks=(3,))], "finished", 2.0)
    assert folder.load().state.recent == ()


@pytest.mark.parametrize("line", ["{}", "[]", "3"])
def test_lines_that_are_no_rounds(line: str, tmp_path: Path) -> None:
    folder = filled(tmp_path, 1)
    folder.history.write_text(line + "\n")
    with pytest.raises(FipaError, match=r"history\.jsonl is damaged"):
        folder.load()
