"""How runs stand, by what is on disk and who holds the lock."""

import json
import shutil
import time

import pytest
from filelock import FileLock
from report import example as results
from tiny import ONE_ARM, fipa, write

from fipa.config.load import load
from fipa.errors import FipaError
from fipa.runner import Run
from fipa.serve import sources, views
from fipa.serve.plans import read_plan
from fipa.serve.sources import FipaRun
from fipa.serve.states import State, locked
from fipa.serve.tracks import seconds_left
from serve import example


@pytest.fixture(autouse=True)
def _restless(monkeypatch):
    """Looks at every refresh, also at runs that rest."""
    monkeypatch.setattr(sources, "REST", 0.0)


def look(path):
    found = FipaRun("run", path)
    found.refresh()
    return found


def test_a_run_that_is_over(tmp_path):
    run = look(example.finished(tmp_path))
    assert (run.state, run.note) == (State.FINISHED, "")
    told = views.line(run)
    assert (told["done"], told["total"], told["left"]) == (16, 16, "")
    assert told["metric"] == "54.00 % test accuracy (FedAvg)"
    assert told["up"] == "16"


def test_a_run_that_goes_on_holds_its_lock(tmp_path):
    example.start(tmp_path, example.config({"FedAvg": 4, "FIPA": 6}, [0, 1]))
    example.write_rounds(tmp_path, 0, "FedAvg", 0, 3)
    lock = FileLock(tmp_path / ".lock")
    with lock:
        run = look(tmp_path)
        assert run.state is State.RUNNING
        told = views.line(run)
        assert (told["done"], told["total"]) == (3, 20)
        assert told["where"] == "FedAvg, seed 0, round 3 of 4"
        assert told["metric"] == "53.00 % test accuracy"
        assert told["left"] == "34 s"  # 17 rounds of 2 s
        version = run.version
        run.refresh()
        assert run.version == version  # nothing is new
        states = {row["arm"]: row["state"] for row in views.arms(run)}
        assert states == {"FedAvg": "running", "FIPA": "waiting"}
    run.refresh()
    assert (run.state, run.version > version) == (State.STOPPED, True)
    assert run.note == f"resume with: fipa resume {tmp_path}"
    assert {row["arm"]: row["state"] for row in views.arms(run)} == {"FedAvg": "stopped", "FIPA": "waiting"}


def test_looking_at_a_lock_neither_makes_nor_keeps_it(tmp_path):
    assert locked(tmp_path / ".lock") is False
    assert list(tmp_path.iterdir()) == []
    with FileLock(tmp_path / ".lock"):
        assert locked(tmp_path / ".lock") is True
    assert locked(tmp_path / ".lock") is False
    with FileLock(tmp_path / ".lock", timeout=0):
        pass


def test_where_no_lock_tells_files_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "locked", lambda path: None)
    example.start(tmp_path, example.config({"FedAvg": 4}, [0]))
    example.write_rounds(tmp_path, 0, "FedAvg", 0, 3)
    run = look(tmp_path)
    assert run.state is State.RUNNING
    monkeypatch.setattr(time, "time", lambda: run.tracks[0].changed_at + 1000)
    run.refresh()
    assert run.state is State.STOPPED


def test_diverged_arms(tmp_path):
    example.start(tmp_path, example.config({"FedAvg": 4, "FIPA": 4}, [0]))
    example.write_rounds(tmp_path, 0, "FedAvg", 0, 4)
    example.write_rounds(tmp_path, 1, "FIPA", 0, 1, example.DIVERGED)
    run = look(tmp_path)
    assert run.state is State.DIVERGED
    told = views.line(run)
    assert (told["done"], told["total"]) == (6, 6)  # the rounds after it will not be run
    assert [row["state"] for row in views.arms(run)] == ["finished", "diverged"]


def test_a_run_that_broke_tells_why_until_it_resumes(tmp_path):
    text = ONE_ARM.replace("rounds = 2", "rounds = 3")
    run = Run.new(tmp_path / "run", "e", "", load(str(write(tmp_path, text)))[1])
    run.start()

    class Breaks:  # what it is that breaks a run does not matter
        def begin(self, *_): ...
        def round(self, *_):
            raise RuntimeError("out of <memory>")

        def end(self, *_): ...

    with pytest.raises(RuntimeError):
        run.execute(Breaks())
    seen = look(tmp_path / "run")
    assert (seen.state, seen.note) == (State.FAILED, "RuntimeError: out of <memory>")
    assert seen.header["metric"]["name"] == "test MSE"
    assert fipa("resume", tmp_path / "run", "--quiet").code == 0
    seen.refresh()
    assert (seen.state, seen.note) == (State.FINISHED, "")
    assert not (tmp_path / "run" / "error.txt").exists()
    assert seen.whole()["config_toml"]  # of results.json, which is newer than the rounds


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"format": "fipa-results-1"}', '{"format": "other"}', "\0"]
)
def test_broken_files_are_a_state(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    run = look(tmp_path)
    assert run.state is State.BROKEN
    assert "run.json" in run.note
    assert views.line(run)["state"] == "broken"
    assert views.charts([run]) == []
    example.finished(tmp_path)
    run.refresh()
    assert run.state is State.FINISHED


def test_odd_plans_are_a_state(tmp_path):
    content = example.config({"FedAvg": 4}, [0, 0])
    run = look(example.start(tmp_path, content))
    assert (run.state, run.note) == (State.BROKEN, "run.json repeats a seed")
    with pytest.raises(FipaError, match="repeats a seed"):
        run.whole()
    example.start(tmp_path, content | {"seeds": [0], "rounds": float("inf"), "arms": [{"name": "FedAvg"}]})
    run.refresh()
    assert (run.state, run.note) == (State.BROKEN, "run.json is damaged or only half written")


def test_whatever_goes_wrong_in_a_look_is_a_state(tmp_path, monkeypatch):
    run = look(example.finished(tmp_path))
    monkeypatch.setattr(run, "look", lambda: {}["absent"])
    run.refresh()
    assert (run.state, run.note) == (State.BROKEN, "its files cannot be understood: KeyError: 'absent'")


def test_what_cannot_be_shown_is_told(tmp_path):
    run = look(example.finished(tmp_path))
    run.header["metric"] = 3
    told = views.line(run)
    assert told["state"] == "broken"
    assert "cannot be understood: TypeError" in told["note"]
    assert views.arms(run) == []
    assert views.charts([run]) == []
    assert len(views.charts([run, look(tmp_path)])) == 1


def test_no_report_of_a_plan_that_is_another_one(tmp_path):
    run = look(example.finished(tmp_path))
    run.tracks = run.tracks[:1]
    with pytest.raises(FipaError, match="ask again"):
        run.whole()


def test_a_damaged_history_is_told(tmp_path):
    example.finished(tmp_path)
    example.write_rounds(tmp_path, 1, "FIPA", 1, 4, "garbage\n")
    run = look(tmp_path)
    assert run.state is State.FINISHED
    assert run.note == "01-fipa/seed-1: line 5 of history.jsonl is damaged"


def test_a_run_that_is_deleted(tmp_path):
    run = look(example.finished(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    version = run.version
    run.refresh()
    assert (run.state, run.version) == (State.DELETED, version + 1)
    run.refresh()
    assert run.version == version + 1


def test_folders_and_rounds_are_those_of_the_runner(tmp_path):
    """The plan is made of the plain file; here it is compared with what the runner itself does."""
    for name in ("warmup-ablation", "digits", "fit-sin2"):
        experiment = load(name, [])[1]
        run = Run(tmp_path / name, name, "", experiment)
        run.start()
        plan = read_plan(tmp_path / name)
        built = {arm.name: arm for arm in experiment.build(True)}
        for pair in plan.pairs:
            assert pair.history == run.folder(pair.arm, pair.seed).history
            arm = built.get(pair.arm) or experiment.build_warmup(True)
            assert (pair.after, pair.after + pair.rounds) == (arm.after, arm.last)
        assert len(plan.pairs) == len(experiment.seeds) * (len(experiment.arms) + bool(run.starts()))


def test_the_warm_up_stands_in_until_an_arm_has_begun(tmp_path):
    example.start(tmp_path, example.config({"FedAvg": 4}, [0], warmup=10), metric=None)
    example.write_warmup(tmp_path, 0, 7)
    run = look(tmp_path)
    assert list(run.results()["arms"]) == ["warm-up"]
    assert run.results()["metric"]["name"] == "test error"  # an older run, which did not say
    with pytest.raises(FipaError, match="nothing to report"):
        run.whole()
    assert not views.line(run)["report"]
    example.write_rounds(tmp_path, 0, "FedAvg", 0, 2)
    run.refresh()
    assert list(run.results()["arms"]) == ["FedAvg"]
    assert run.results()["arms"]["FedAvg"]["0"]["after"] == 10
    assert len(run.whole()["arms"]["FedAvg"]["0"]["metric"]) == 2


def test_an_older_run_says_its_metric_in_the_end(tmp_path):
    example.start(tmp_path, example.config({"FedAvg": 4}, [0]), metric=None)
    results.write(tmp_path, results.results({"FedAvg": {"0": results.record([0.5])}}))
    assert look(tmp_path).header["metric"]["name"] == "test MSE"


def test_the_time_left_counts_what_rounds_leave_out(tmp_path):
    run = look(example.start(tmp_path, example.config({"FedAvg": 4}, [0])))
    assert seconds_left(run.tracks) is None
    example.write_rounds(tmp_path, 0, "FedAvg", 0, 1)
    run.refresh()
    assert seconds_left(run.tracks, 3.0) == 18
    run._marks.clear()
    run._marks.extend([(100.0, 2.0), (110.0, 6.0)])
    assert run.overhead == 2.5
    run._marks.append((101.0, 6.0))
    assert run.overhead == 1.0


def test_run_json_of_the_runner_says_the_metric(tmp_path):
    run = Run.new(tmp_path / "run", "e", "", load(str(write(tmp_path, ONE_ARM)))[1])
    run.start()
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["metric"] == {"name": "test MSE", "goal": "min", "scale": "log"}
    assert Run.open(tmp_path / "run").name == "e"
