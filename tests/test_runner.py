"""Runs in their directories: what is written, and that a run that was stopped anywhere ends as if it had not been."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import (
    ONE_ARM,
    OWN_PROBLEM,
    TWO_ARMS,
    fipa,
    group,
    numbers,
    process,
    results,
    rounds_on_disk,
    wait_until,
    write,
)

from fipa.config.load import load, validate
from fipa.config.schema import dump
from fipa.errors import FipaError
from fipa.federation.record import SERIES, RoundRecord
from fipa.federation.storage import RunFolder
from fipa.problems.registry import python
from fipa.runner import Run, fresh_directory

pytestmark = pytest.mark.long  # whole experiments

# all that a round may hand to the next: damping, variates, moments, late answers with every kind of curvature, stages
EVERYTHING = """\
rounds = 4
seeds = [0, 1]
control = "scaffold"
reference = "centralised"

[problem]
name = "sine"
edges = [0.0, 0.2, 0.5, 0.7, 1.0]
samples = 20
hidden = [4]
grid = 16

[engine]
group = 1

[defaults]
local = { name = "sgd", lr = 0.1, steps = 3, batch = 7 }
sketch = { rank = 5 }
faults = { late = 0.4, max_delay = 2 }

[[arms]]
name = "centralised"
rule = { name = "fipa" }
local = { name = "gauss-newton" }
sketch = { rank = "full" }
faults = {}
centralised = true

[[arms]]
name = "FIPA"
rule = { name = "fipa", damping = 0.1 }
local = { name = "gauss-newton" }

[[arms]]
name = "scaffold"
rule = { name = "fedavg" }
local = { name = "scaffold", lr = 0.1, steps = 5 }
faults = { drop = 0.3 }

[[arms]]
name = "fedadam"
rule = { name = "fedadam" }
inner = { name = "completed-fipa", damping = 0.1 }

[[arms]]
name = "diagonal"
rule = { name = "diagonal-fisher", damping = 0.1 }

[[arms]]
name = "foof"
rule = { name = "foof", damping = 0.1 }
participation = { kind = "uniform", count = 3 }

[[arms]]
name = "warm-up"
rule = { name = "completed-fipa", damping = 0.1 }
faults = { drop = 0.2 }

[[arms.stages]]
rounds = 2
rule = { name = "fedavgm" }

[[arms.stages]]
lr_scale = 0.5
damping_decay = 0.9
step_control = { adapt = "step", initial = 0.25 }
"""
ROUNDS = 7 * 2 * 4


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("experiment"), EVERYTHING)


@pytest.fixture(scope="module")
def whole(experiment: Path) -> Path:
    """A run that nothing happened to."""
    done = fipa("run", experiment, "--out", experiment.parent / "whole", "--quiet", report=True)
    assert (done.code, done.out, done.err) == (0, "", "")
    return experiment.parent / "whole"


# --- stopped, and resumed ---


def after(rounds: int, number: signal.Signals) -> str:
    """Code for a process that signals its whole group, as a terminal does, shortly after its so many-th round.

    It does so itself: who watches from outside may be kept waiting by a busy machine until all rounds are over.
    """
    return f"""if True:
        import os, threading
        from fipa.federation.storage import RunFolder
        save, left = RunFolder.save, [{rounds}]
        def counted(*arguments):
            save(*arguments)
            left[0] -= 1
            if left[0] == 0:
                threading.Timer(0.005, os.killpg, (os.getpgrp(), {int(number)})).start()
        RunFolder.save = counted
    """


def test_resumes_after_kill_9_to_the_same_bits(experiment: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for command, more in ((["run", experiment, "--out", out], 3), (["resume", out], 37)):
        before = rounds_on_disk(out)
        with process(*command, before=after(more, signal.SIGKILL)) as running:
            assert running.wait() == -signal.SIGKILL
        assert before + more - 1 <= rounds_on_disk(out) < ROUNDS  # the last line may have been without its checkpoint
        assert not (out / "results.json").exists()
    done = fipa("resume", out)
    assert done.code == 0
    assert "resumes after round" in done.out
    assert numbers(out) == numbers(whole)
    assert (out / "views.json").read_text() == (whole / "views.json").read_text()


def test_ctrl_c_stops_all_workers_and_two_workers_give_the_same_bits_as_one(
    experiment: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arms = [part for arm in ("FIPA", "fedadam", "diagonal", "warm-up") for part in ("--arm", arm)]
    code = after(10, signal.SIGINT)
    with process("run", experiment, "--out", out, "--workers", 2, *arms, before=code) as running:
        wait_until(lambda: len(group(running.pid)) >= 3 or running.poll() is not None)  # they take seconds to start
        _, err = running.communicate(timeout=300)
        assert running.returncode == 130
        assert f"fipa resume {out}" in " ".join(err.split())
        assert "Traceback" not in err
        wait_until(lambda: group(running.pid) == [])
    done = sum(len(curves["metric"]) for seeds in results(out)["arms"].values() for curves in seeds.values())
    assert 9 <= done <= rounds_on_disk(out) < 32  # the last line of history may be without its checkpoint
    write(out, (out / "run.json").read_text("utf-8").replace('"workers": 2', '"workers": 1'), "run.json")
    assert fipa("resume", out, "--quiet").code == 0
    check_same(out, whole)


class Stop(BaseException):
    """Not an error that anything catches."""


@pytest.fixture(scope="module")
def four_rounds(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("four")
    file = write(directory, TWO_ARMS.replace("rounds = 2", 'rounds = 4\nreference = "B"'))
    whole = Run.new(directory / "whole", "e", "", load(str(file))[1])
    whole.start()
    whole.execute(Nobody())
    return whole


@pytest.mark.parametrize("point", ["history", "thetas", "checkpoint"])
@pytest.mark.parametrize("round_number", [1, 2, 4])
def test_resumes_from_every_point_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_rounds: Run, point: str, round_number: int
) -> None:
    """A round is three files; stop after the first, the second, and before the third is in place."""
    run = replace(four_rounds, directory=tmp_path / "run")
    run.start()
    save = RunFolder.save

    def torn(self: RunFolder, state: Any, record: Any, *more: Any) -> None:
        if state.round_number < round_number:
            save(self, state, record, *more)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with self.history.open("a") as history:
            history.write(json.dumps({"round": round_number}) + "\n" if point != "history" else '{"round": 1, "me')
        if point != "history":
            with self.thetas.open("ab") as thetas:
                thetas.write(bytes(8 * 13 if point == "checkpoint" else 5))
        if point == "checkpoint":
            self.checkpoint.with_suffix(".part").write_bytes(b"PK")
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", torn)
        with pytest.raises(Stop):
            run.execute(Nobody())
    Run.open(tmp_path / "run").execute(Nobody())
    assert numbers(tmp_path / "run") == numbers(four_rounds.directory)


class Nobody:
    """Watches nothing."""

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None: ...

    def round(self, arm: str, seed: int, record: RoundRecord) -> None: ...

    def end(self, arm: str, seed: int, status: str) -> None: ...


def test_resuming_a_finished_run_changes_nothing(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)

    def content() -> dict[str, bytes]:
        return {
            str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("*") if p.suffix in (".json", ".jsonl", ".pt")
        }

    before = content()
    assert len(before) > 2 * 7 * 2
    assert fipa("resume", copy, "--quiet").code == 0
    assert content() == before


def test_an_arm_does_not_depend_on_the_others(experiment: Path, whole: Path, tmp_path: Path) -> None:
    arguments = ("--seeds", "1", "--arm", "fedadam")
    assert fipa("run", experiment, "--out", tmp_path / "run", "--quiet", *arguments).code == 0
    check_same(tmp_path / "run", whole)


def check_same(part: Path, whole: Path) -> None:
    """Some arms on some seeds, without the reference that gaps are measured from."""
    found, expected = numbers(part)["arms"], numbers(whole)["arms"]
    assert found
    for arm, seeds in found.items():
        for seed, curves in seeds.items():
            assert curves == {key: value for key, value in expected[arm][seed].items() if key != "gap"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no run"), ('{"format": "other"}', "format 'other'"), ("[]", "format"), ("{", "run.json")],
)
def test_resume_refuses_what_is_no_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    done = fipa("resume", tmp_path)
    assert done.code == 2
    assert message in done.err
    assert str(tmp_path) in "".join(done.err.split())


def test_broken_checkpoint_says_what_to_delete(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert fipa("run", write(tmp_path, ONE_ARM), "--out", out, "--quiet").code == 0
    (checkpoint,) = out.glob("arms/*/*/checkpoint.pt")
    checkpoint.write_bytes(b"garbage")
    done = fipa("resume", out)
    assert done.code == 2
    assert f"delete {checkpoint.parent}" in " ".join(done.err.split())
    checkpoint.unlink()
    assert fipa("resume", out, "--quiet").code == 0


# --- what is written ---


def test_results_have_one_entry_per_round(whole: Path) -> None:
    content = results(whole)
    assert list(content["arms"]) == [arm["name"] for arm in content["config"]["arms"]]
    assert content["metric"] == {"name": "test MSE", "goal": "min", "scale": "log"}
    assert (content["control"], content["reference"]) == ("scaffold", "centralised")
    for arm, seeds in content["arms"].items():
        assert list(seeds) == ["0", "1"]
        for curves in seeds.values():
            assert curves["status"] == "finished"
            assert {key: len(curves[key]) for key in SERIES} == dict.fromkeys(SERIES, 4)
            assert all(value > 0 for value in curves["metric"] + curves["averaged_metric"] + curves["seconds"])
            assert curves["averaged_metric"][0] == curves["metric"][0]
            assert curves["initial_metric"] > 0
            assert all(event.keys() == {"round", "client", "text"} for event in curves["events"])
            assert ("gap" in curves) == (arm != "centralised")
            if arm != "centralised":
                assert len(curves["gap"]) == 4


def test_arms_differ_and_did_what_they_are_called(whole: Path) -> None:
    arms = {name: seeds["0"] for name, seeds in results(whole)["arms"].items()}
    assert len({curves["metric"][-1] for curves in arms.values()}) == len(arms)
    assert len({curves["initial_metric"] for curves in arms.values()}) == 1
    assert arms["centralised"]["clients"] == [[0]] * 4
    assert max(map(len, arms["foof"]["local_steps"])) <= 3
    assert any("used with weight" in event["text"] for event in arms["FIPA"]["events"])
    assert any("dropped out" in event["text"] for event in arms["scaffold"]["events"])
    assert all(rank == 5 for ranks in arms["FIPA"]["ranks"] for rank in ranks)
    assert {"1", "2", "4"} == set(arms["FIPA"]["spectra"])  # not 3: neither the last nor worth it
    assert arms["warm-up"]["rank"][:2] == [0, 0]
    assert all(rank > 0 for rank in arms["warm-up"]["rank"][2:])
    assert arms["warm-up"]["step"][2] <= 0.25


def test_gap_is_the_distance_to_the_reference(tmp_path: Path) -> None:
    text = TWO_ARMS.replace("rounds = 2", 'rounds = 2\nreference = "B"')
    assert fipa("run", write(tmp_path, text), "--out", tmp_path / "run", "--quiet").code == 0
    a, b = (np.fromfile(p).reshape(2, 13) for p in sorted((tmp_path / "run").glob("arms/*/*/thetas.bin")))
    expected = [float(np.linalg.norm(a[k] - b[k]) / np.linalg.norm(b[k])) for k in range(2)]
    assert results(tmp_path / "run")["arms"]["A"]["0"]["gap"] == pytest.approx(expected)
    assert expected[0] > 0


def test_files_of_a_run(whole: Path) -> None:
    found = {path.name for path in whole.iterdir()}
    assert {"run.json", "results.json", "views.json", "report.html", "figures", "arms"} <= found
    assert not list(whole.rglob("*.part"))
    assert any((whole / "figures").iterdir())
    view = json.loads((whole / "views.json").read_text())["curves"]
    assert len(view["x"]) == len(view["target"]) == 16
    assert view["regions"] == [[0.0, 0.2], [0.2, 0.5], [0.5, 0.7], [0.7, 1.0]]
    assert {name: len(fit) for name, fit in view["arms"].items()} == dict.fromkeys(results(whole)["arms"], 16)


def test_run_json_is_the_whole_experiment(experiment: Path, whole: Path) -> None:
    content = json.loads((whole / "run.json").read_text())
    assert content["name"] == "e"
    assert content["command"].startswith(f"fipa run {experiment} --out ")
    assert dump(validate(content["config"])) == content["config"] == results(whole)["config"]
    assert Run.open(whole).experiment == validate(content["config"])


def test_new_finds_a_wrong_problem_before_anything_is_written(tmp_path: Path) -> None:
    experiment = load(str(write(tmp_path, ONE_ARM)), ["problem.edges=[1.0, 0.0]"])[1]
    with pytest.raises(FipaError, match="edges"):
        Run.new(tmp_path / "run", "e", "", experiment)
    assert not (tmp_path / "run").exists()


def test_fresh_directories_do_not_exist(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        directory = fresh_directory(tmp_path, "e")
        directory.mkdir()
        names.append(directory.name)
    assert names == ["e", "e-2", "e-3"]


def test_late_answers_of_one_stage_do_not_break_the_next(tmp_path: Path) -> None:
    """FedAvg's clients send no sketch, and some answer only when FIPA's stage has begun."""
    text = (
        ONE_ARM.replace("rounds = 2", "rounds = 6")
        + """
faults = { late = 0.5, max_delay = 3 }
stages = [{ rounds = 3 }, { rule = { name = "completed-fipa", damping = 0.1 } }]
"""
    )
    done = fipa("run", write(tmp_path, text), "--out", tmp_path / "run", "--quiet")
    assert (done.code, done.err) == (0, "")
    curves = results(tmp_path / "run")["arms"]["A"]["0"]
    assert any(event["round"] <= 3 and "will be late" in event["text"] for event in curves["events"])
    assert len(curves["metric"]) == 6


# --- divergence ---

DIVERGES = TWO_ARMS.replace("rounds = 2", "rounds = 4").replace("lr = 0.1, steps = 2", "lr = 1e30, steps = 2")


def test_a_diverged_arm_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    done = fipa("run", write(tmp_path, DIVERGES), "--out", tmp_path / "run")
    assert done.code == 3
    assert "diverged" in done.err
    arms = results(tmp_path / "run")["arms"]
    bad, good = arms["A"]["0"], arms["B"]["0"]
    assert (bad["status"], good["status"]) == ("diverged", "finished")
    last = len(bad["metric"])
    assert last <= 4
    assert bad["metric"][-1] is None
    assert all(value is not None for value in bad["metric"][:-1])
    (event,) = (e for e in bad["events"] if "diverged" in e["text"])
    assert event["round"] == last
    assert len(good["metric"]) == 4
    assert {len(bad[key]) for key in SERIES} == {last}
    before = numbers(tmp_path / "run")
    assert fipa("resume", tmp_path / "run", "--quiet").code == 3
    assert numbers(tmp_path / "run") == before


def test_divergence_in_the_first_round_leaves_the_initial_model(tmp_path: Path) -> None:
    text = DIVERGES.replace("lr = 1e30, steps = 2", "lr = 1e160, steps = 1")
    done = fipa("run", write(tmp_path, text), "--out", tmp_path / "run")
    assert done.code == 3
    curves = results(tmp_path / "run")["arms"]
    assert curves["A"]["0"]["metric"] == [None]
    assert curves["A"]["0"]["initial_metric"] == curves["B"]["0"]["initial_metric"]
    assert any(line.startswith("A, seed 0: diverged") for line in done.out.splitlines())
    fits = json.loads((tmp_path / "run" / "views.json").read_text())["curves"]["arms"]
    assert None not in fits["A"]


def test_curvature_that_overflows_is_divergence_too(tmp_path: Path) -> None:
    """Finite parameters whose sketch is not: the arm has diverged, the rest goes on."""
    text = DIVERGES.replace('rule = { name = "fedavg" }', 'rule = { name = "completed-fipa" }\nstep_control = false')
    file = write(tmp_path, text.replace("lr = 1e30, steps = 2", "lr = 1e150, steps = 1"))
    done = fipa("run", file, "--out", tmp_path / "run", "--quiet")
    assert done.code in (0, 3), done.err
    assert results(tmp_path / "run")["arms"]["B"]["0"]["status"] == "finished"


# --- several at once, and files that change ---


def test_a_directory_is_run_by_one_process_only(four_rounds: Run) -> None:
    with four_rounds._lock(), pytest.raises(FipaError, match="being run by another process"):
        Run.open(four_rounds.directory).execute(Nobody())


def test_the_lock_of_a_killed_process_is_free(four_rounds: Run) -> None:
    code = f"from fipa.runner import Run\nfrom pathlib import Path\nwith Run.open(Path({str(four_rounds.directory)!r}))"
    code += "._lock(): print('locked', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FipaError, match="being run by another process"), four_rounds._lock():
            pass
        holder.kill()
    with four_rounds._lock():
        pass


def test_summary_csv_has_the_last_average(whole: Path) -> None:
    lines = (whole / "summary.csv").read_text().splitlines()
    assert lines[0].endswith(",last_averaged")
    first = results(whole)["arms"]["centralised"]["0"]
    assert lines[1].split(",")[-1] == str(first["averaged_metric"][-1])


def test_summary_csv_has_the_traffic_of_both_ways(whole: Path) -> None:
    with (whole / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        record = results(whole)["arms"][row["arm"]][row["seed"]]
        for key in ("uplink_bytes", "downlink_bytes", "trips"):
            assert int(row[key]) == sum(record[key])
    assert any(int(row["downlink_bytes"]) for row in rows)


def test_resume_refuses_a_problem_that_has_changed(tmp_path: Path) -> None:
    file = write(tmp_path, OWN_PROBLEM, "own.py")
    assert fipa("run", file, "--out", tmp_path / "run", "--quiet", "--rounds", 1).code == 0
    assert fipa("resume", tmp_path / "run", "--quiet").code == 0
    write(tmp_path, OWN_PROBLEM + "\n# changed\n", "own.py")
    done = fipa("resume", tmp_path / "run", "--quiet")
    assert done.code == 2
    assert "own.py has changed since this run began" in " ".join(done.err.split())


def test_a_problem_may_draw_from_the_global_generators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every process must see the same problem all the same."""
    drawn = "import random\n\nimport numpy as np\n" + OWN_PROBLEM.replace(
        "def problem(seed):\n",
        "def problem(seed):\n    print(torch.rand(()).item(), np.random.rand(), random.random())\n",
    )
    file = write(tmp_path, drawn, "own.py")
    code = f"import torch; from fipa.problems.registry import python; torch.rand(3); python(0, file={str(file)!r})"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    python(0, file=str(file))
    assert capsys.readouterr().out == there != ""
