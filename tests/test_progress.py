"""What is seen of a run: lines, bars and TensorBoard."""

from __future__ import annotations

import io
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import TWO_ARMS, fipa, results, write

from fipa.config.load import load
from fipa.config.schema import Experiment
from fipa.federation.record import RoundRecord
from fipa.progress import Log, Progress, Watchers


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return load(str(write(tmp_path, TWO_ARMS)), ["rounds=10", "seeds=[0, 1]"])[1]


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, legacy_windows=False), file


def record(k: int, metric: float | None) -> RoundRecord:
    return RoundRecord(k, metric=metric)


def test_log_is_one_line_per_arm_and_seed() -> None:
    out, file = console()
    log = Log(out)
    for seed in (0, 1):
        log.begin("A", seed, 0, 2)
        log.round("A", seed, record(1, 0.5))
        log.round("A", seed, record(2, 0.25))
        log.end("A", seed, "finished")
    assert file.getvalue().splitlines() == [
        "A, seed 0: finished at round 2, metric 2.500e-01",
        "A, seed 1: finished at round 2, metric 2.500e-01",
    ]


def test_log_says_where_a_run_goes_on() -> None:
    out, file = console()
    log = Log(out)
    log.begin("A", 0, 3, 5)
    log.round("A", 0, record(4, 1.0))
    log.end("A", 0, "finished")
    assert file.getvalue().startswith("A, seed 0: resumes after round 3 of 5\nA, seed 0: finished at round 4")


def test_log_does_not_forget_an_arm_that_diverged_at_once() -> None:
    out, file = console()
    log = Log(out)
    log.begin("A", 0, 0, 5)
    log.end("A", 0, "diverged")
    assert "A, seed 0: diverged" in file.getvalue()


def test_log_does_not_break_lines() -> None:
    out, file = console()
    log = Log(out)
    log.begin("A" * 120, 0, 0, 1)
    log.round("A" * 120, 0, record(1, 1.0))
    log.end("A" * 120, 0, "finished")
    assert len(file.getvalue().splitlines()) == 1


def test_bars_show_round_metric_and_time_left(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fipa.progress.time.monotonic", lambda: now[0])
    out, file = console(terminal=True)
    with Progress(out, experiment) as bars:
        bars.begin("A", 0, 0, 10)
        for k in range(1, 5):
            now[0] += 5.0
            bars.round("A", 0, record(k, 0.125))
    last = file.getvalue().rpartition("A ")[2]
    assert "4/10" in last
    assert "1.250e-01" in last
    assert "1:20 left" in last  # 16 of 20 rounds, 5 seconds each


def test_bars_of_resumed_runs_count_only_new_rounds(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fipa.progress.time.monotonic", lambda: now[0])
    out, file = console(terminal=True)
    with Progress(out, experiment) as bars:
        bars.begin("A", 0, 10, 10)
        bars.end("A", 0, "finished")
        bars.begin("A", 1, 8, 10)
        now[0] += 7.0
        bars.round("A", 1, record(9, 1.0))
    assert "9/10" in file.getvalue()
    assert "0:07 left" in file.getvalue()


def test_rounds_of_a_warm_up_are_not_the_arms_own(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm of rounds 5 to 10, on two seeds."""
    now = [0.0]
    monkeypatch.setattr("fipa.progress.time.monotonic", lambda: now[0])
    out, file = console(terminal=True)
    with Progress(out, experiment) as bars:
        bars.begin("A", 0, 4, 10, 4)
        now[0] += 3.0
        bars.round("A", 0, record(5, 62.5))
        (task,) = bars._bars.tasks
        assert (task.total, task.completed) == (12, 1)
    last = file.getvalue().rpartition("A ")[2]
    assert "5/10" in last
    assert "62.50" in last
    assert "0:33 left" in last


def test_bars_keep_the_metric_of_the_last_evaluation(experiment: Experiment) -> None:
    out, file = console(terminal=True)
    with Progress(out, experiment) as bars:
        bars.begin("A", 0, 0, 10)
        bars.round("A", 0, record(1, 0.25))
        bars.round("A", 0, record(2, None))
    last = file.getvalue().rpartition("A ")[2]
    assert "2/10" in last
    assert "2.500e-01" in last


def test_log_of_an_arm_after_a_warm_up() -> None:
    """It resumes only if some of its own rounds were there."""
    out, file = console()
    log = Log(out)
    log.begin("A", 0, 4, 6, 4)
    assert file.getvalue() == ""
    log.begin("A", 0, 5, 6, 4)
    assert file.getvalue() == "A, seed 0: resumes after round 5 of 6\n"


def test_bars_say_what_diverged(experiment: Experiment) -> None:
    out, file = console(terminal=True)
    with Progress(out, experiment) as bars:
        bars.begin("A", 0, 0, 10)
        bars.end("A", 0, "diverged")
    assert "diverged" in file.getvalue()


def test_time_left_is_nothing_once_the_last_seed_is_done(experiment: Experiment) -> None:
    """A seed that diverged early leaves no rounds to wait for."""
    out, _ = console(terminal=True)
    with Progress(out, experiment) as bars:
        bars.begin("A", 0, 0, 10)
        bars.end("A", 0, "diverged")
        bars.begin("A", 1, 0, 10)
        for k in range(1, 11):
            bars.round("A", 1, record(k, 1.0))
        bars.end("A", 1, "finished")
        (task,) = bars._bars.tasks
        assert task.finished


def test_watchers_are_all_told_and_closed() -> None:
    told: list[Any] = []

    class Listener:
        def __enter__(self) -> None:
            told.append("open")

        def __exit__(self, *_: object) -> None:
            told.append("closed")

        def begin(self, *arguments: Any) -> None:
            told.append(arguments)

        round = end = begin

    with suppress(KeyboardInterrupt), Watchers([Listener(), Listener()]) as watchers:
        watchers.begin("A", 0, 0, 2)
        watchers.round("A", 0, record(1, 1.0))
        watchers.end("A", 0, "finished")
        raise KeyboardInterrupt
    calls = [("A", 0, 0, 2, 0), ("A", 0, record(1, 1.0)), ("A", 0, "finished")]
    assert told == [x for x in ("open", *calls, "closed") for _ in range(2)]


@pytest.mark.long
def test_tensorboard_reads_back_what_was_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    path = write(tmp_path, TWO_ARMS.replace("rounds = 2", "rounds = 3\nseeds = [0, 1]"))
    assert fipa("run", path, "--out", out, "--quiet", "--tensorboard").code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    folders = sorted(folder for folder in (out / "tensorboard").iterdir())
    assert [folder.name for folder in folders] == ["A, seed 0", "A, seed 1", "B, seed 0", "B, seed 1"]
    for folder in folders:
        events = EventAccumulator(str(folder))
        events.Reload()
        arm, seed = folder.name.split(", seed ")
        curves = results(out)["arms"][arm][seed]
        for key in ("metric", "loss", "seconds", "uplink_bytes", "rank"):
            assert [e.step for e in events.Scalars(key)] == [1, 2, 3]
            assert [e.value for e in events.Scalars(key)] == pytest.approx(curves[key], rel=1e-5)
