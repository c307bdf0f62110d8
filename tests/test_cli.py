"""The command as users type it: options, output, exit codes, and problems of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import (
    IMAGES,
    ONE_ARM,
    OWN_PROBLEM,
    TWO_ARMS,
    fipa,
    options,
    process,
    results,
    rounds_on_disk,
    small,
    wait_until,
    write,
)

from fipa.config.load import SHIPPED, load, names, tomllib


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return write(tmp_path, TWO_ARMS)


# --- list and show ---


def test_list() -> None:
    done = fipa("list")
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in names())
    content = json.loads(fipa("list", "--json").out)
    assert list(content) == names()
    assert content["fit-sin2"]["arms"][0] == "FedAvg"


@pytest.mark.parametrize("name", names())
def test_what_show_prints_is_input_again(tmp_path: Path, name: str) -> None:
    first = fipa("show", name, *options(small(name)))
    assert (first.code, first.err) == (0, "")
    again = fipa("show", write(tmp_path, first.out))
    assert again.out == first.out
    assert load(str(tmp_path / "e.toml"))[1].build(True) == load(name, small(name))[1].build(True)
    assert json.loads(fipa("show", name, *options(small(name)), "--json").out) == tomllib.loads(first.out)
    for arm in tomllib.loads(first.out)["arms"]:
        stages = arm["stages"] or [arm]
        assert all("trust_region" in stage or "step_control" in stage for stage in stages)


def test_show_leaves_out_what_an_arm_does_not_use() -> None:
    arms = {arm["name"]: arm for arm in json.loads(fipa("show", "digits", "--json").out)["arms"]}
    assert arms["FIPA completed"]["sketch"]["rank"] == 30
    assert arms["FIPA completed"]["step_control"] is False
    assert arms["FIPA shared basis"]["sketch"] == {"route": "auto"}
    assert arms["FIPA shared basis"]["trust_region"] is True
    assert "step_control" not in arms["FIPA shared basis"]
    assert "sketch" not in arms["FedAvg"]


def test_show_keeps_strings_as_they_are(tmp_path: Path) -> None:
    text = "title = '''a \"b\" \\c [red]x[/]'''\ndescription = 'π\t1'\n" + ONE_ARM
    shown = tomllib.loads(fipa("show", write(tmp_path, text)).out)
    assert shown["title"] == 'a "b" \\c [red]x[/]'
    assert shown["description"] == "π\t1"


# those that are based on another change few of its lines: config/ checks and builds all of them
ROOTS = [name for name in names() if "base" not in tomllib.loads((SHIPPED / f"{name}.toml").read_text("utf-8"))]
# one of each kind with figures and page: report/ has its own tests of them
SHOWN = {"fit-sin2", "fit-mixture2d", "pde-allen-cahn", "poisson-2d", "pde-inverse", "digits", "head-cifar100-fedrcl"}
BACKBONE = "from torch.nn import Flatten as backbone\n"  # pixels are features
# several clients at once, which others do one by one: to trace what they do takes longer than two rounds
GROUPED = {"fit-sin2", "digits"}
TRACED = {"poisson-2d"}  # of those with `engine.trace`


def test_a_root_is_of_every_kind() -> None:
    assert set(ROOTS) > SHOWN > GROUPED | TRACED


def form(settings: Any) -> Any:
    """What is left of settings if a number is one like any other, but for zero."""
    if isinstance(settings, dict):
        return tuple((key, form(value)) for key, value in sorted(settings.items()))
    if isinstance(settings, list):
        return tuple(map(form, settings))
    return bool(settings) if isinstance(settings, int | float) else settings


@cache
def of_their_own() -> dict[str, list[str]]:
    """Arms by root: those that others are held against, one of FIPA, and all of a form that no root before has.

    Before are roots of the same kind, with residuals or with images: what an arm does with these is the same.
    """
    seen: set[Any] = set()
    chosen: dict[str, list[str]] = {}
    for name in sorted(ROOTS, key=lambda name: (name not in SHOWN, name)):
        experiment = load(name)[1]
        always = {experiment.control, experiment.reference, next(a.name for a in experiment.arms if "FIPA" in a.name)}
        chosen[name] = []
        for arm in experiment.arms:
            settings = arm.model_dump(mode="json", exclude={"name", "rounds", "participation"})
            key = (experiment.problem.name in ("images", "head"), form(settings))
            if arm.name in always or key not in seen:
                chosen[name].append(arm.name)
            seen.add(key)
    return chosen


@pytest.mark.convergence
@pytest.mark.parametrize("name", ROOTS)
def test_shipped_experiments_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FIPA_DATA", str(tmp_path / "data"))  # where features are kept
    experiment = load(name)[1]
    arms = [(i, arm) for i, arm in enumerate(experiment.arms) if hasattr(arm.local, "steps")]
    if experiment.problem.name in ("images", "head"):  # as they are, all local rules included, for one epoch
        more = [f"arms.{i}.local.epochs=1" for i, _ in arms]
    else:
        more = [f"arms.{i}.local={{name='adam', steps=2}}" for i, _ in arms]
        more += [] if name.startswith(("pde-", "poisson-")) else ["problem.grid=16"]
    more += [] if name in GROUPED else ["engine.group=1"]
    more += [] if name in TRACED else ["engine.trace=false"]
    more += [] if name in SHOWN else [f"seeds=[{experiment.seeds[0]}]"]  # figures and page are of several
    chosen = of_their_own()[name]
    if experiment.problem.name == "head":
        more += [f"problem.backbone='{write(tmp_path, BACKBONE, 'backbone.py')}'"]
    settings = [*options([*small(name), *more]), *(part for arm in chosen for part in ("--arm", arm))]
    shown = name in SHOWN
    done = fipa("run", name, *settings, "--rounds", 2, "--out", tmp_path / "run", "--json", report=shown)
    assert done.code == 0, done.err
    content = results(tmp_path / "run")
    assert all(len(curves["metric"]) == 2 for seeds in content["arms"].values() for curves in seeds.values())
    assert list(content["arms"]) == list(json.loads(done.out)["summary"]) == chosen
    if shown:
        assert (tmp_path / "run" / "report.html").stat().st_size > 1000
        assert any((tmp_path / "run" / "figures").iterdir())


# --- options of run ---


def test_options_change_the_experiment(tmp_path: Path, two: Path) -> None:
    options = ["--arm", "B", "--seeds", "3,0-1", "--rounds", 3, "--set", "rounds=9", "--set", "problem.samples=10"]
    assert fipa("run", two, "--out", tmp_path / "run", "--quiet", *options).code == 0
    content = results(tmp_path / "run")
    assert {arm: list(seeds) for arm, seeds in content["arms"].items()} == {"B": ["3", "0", "1"]}
    assert all(len(curves["metric"]) == 3 for curves in content["arms"]["B"].values())
    assert content["config"]["problem"]["samples"] == 10
    assert content["config"]["seeds"] == [3, 0, 1]


def test_rounds_are_for_every_arm_and_cut_stages(tmp_path: Path) -> None:
    text = TWO_ARMS + "rounds = 7\nstages = [{ rounds = 2 }, { step_control = false }]\n"
    assert fipa("run", write(tmp_path, text), "--out", tmp_path / "run", "--quiet", "--rounds", 3).code == 0
    content = results(tmp_path / "run")
    assert {arm: len(seeds["0"]["metric"]) for arm, seeds in content["arms"].items()} == {"A": 3, "B": 3}


def test_leaving_out_the_control_leaves_none(tmp_path: Path) -> None:
    path = write(tmp_path, 'control = "A"\nreference = "A"\n' + TWO_ARMS)
    assert fipa("run", path, "--out", tmp_path / "run", "--quiet", "--arm", "B").code == 0
    content = results(tmp_path / "run")
    assert (content["control"], content["reference"]) == (None, None)
    assert "gap" not in content["arms"]["B"]["0"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--arm", "C"], "there is no arm 'C': choose one of A, B"),
        (["--arm", "b"], "there is no arm 'b': did you mean 'B'? Choose one of A, B"),
        (["--seeds", "x"], "--seeds x: write numbers and ranges"),
        (["--seeds", "0,,1"], "--seeds 0,,1"),
        (["--seeds", "-1"], "--seeds -1"),
        (["--seeds", "3-1"], "--seeds 3-1"),
        (["--seeds", "²"], "--seeds ²"),
        (["--seeds", "0-1,1"], "twice"),
        (["--rounds", "0"], "--rounds"),
        (["--rounds", "many"], "--rounds"),
        (["--workers", "0"], "--workers"),
        (["--bogus"], "--bogus"),
        (["--set", "bogus=1"], "bogus: unknown key"),
        (["--set", "arms.A.participation={kind='uniform', count=3}"], "only 2 clients"),
        (["--set", "problem.samples=-5"], "samples"),
        (["--set", "problem.grid=0"], "grid"),
        (["--set", "problem.hidden=[-1]"], "hidden"),
    ],
)
def test_wrong_options_are_usage_errors_and_write_nothing(
    tmp_path: Path, two: Path, options: list[str], reason: str
) -> None:
    done = fipa("run", two, "--out", tmp_path / "run", *options)
    assert done.code == 2
    assert reason in " ".join(done.err.replace("│", " ").split())
    assert done.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [["bogus"], ["run"], ["run", "absent"], ["show", "absent.toml"], ["report"]])
def test_wrong_commands_are_usage_errors(arguments: list[str]) -> None:
    done = fipa(*arguments)
    assert done.code == 2
    assert done.err
    assert done.out == ""


def test_square_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    """Rich takes them for markup, and arms, files and messages are full of them."""
    bare = write(tmp_path, '[problem]\nname = "sine"\n[[arms]]\nname = "A"\n', "bare.toml")
    assert "here or in [defaults]" in fipa("show", bare).err
    text = ONE_ARM.replace('"A"', '"A [paper] [/]"')
    done = fipa("run", write(tmp_path, text), "--out", tmp_path / "[run]", report=True)
    assert done.code == 0
    assert "A [paper] [/], seed 0: finished" in done.out
    assert sum("A [paper] [/]" in line for line in done.out.splitlines()) == 2  # log and table
    assert str(tmp_path / "[run]" / "report.html") in done.out
    assert "no arm 'x[bold]'" in fipa("run", write(tmp_path, text), "--arm", "x[bold]").err


def test_a_setting_of_the_defaults_can_be_changed_for_one_arm(tmp_path: Path) -> None:
    text = (
        ONE_ARM.replace("[[arms]]", "[defaults]").replace('name = "A"', "")
        + '[[arms]]\nname = "A"\n[[arms]]\nname = "B"\n'
    )
    done = fipa("show", write(tmp_path, text), "--set", "arms.B.local.steps=9", "--json")
    assert done.code == 0, done.err
    assert [arm["local"]["steps"] for arm in json.loads(done.out)["arms"]] == [2, 9]


# --- where runs are written ---


def test_a_second_run_into_the_same_directory_needs_force(tmp_path: Path, two: Path) -> None:
    out = tmp_path / "run"
    assert fipa("run", two, "--out", out, "--quiet").code == 0
    before = (out / "results.json").read_bytes()
    refused = fipa("run", two, "--out", out, "--quiet")
    assert refused.code == 2
    assert "--force" in refused.err
    assert (out / "results.json").read_bytes() == before
    assert fipa("run", two, "--out", out, "--quiet", "--force", "--arm", "B", "--rounds", 1).code == 0
    assert list(results(out)["arms"]) == ["B"]
    assert len(list((out / "arms").iterdir())) == 1


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("name", ["thesis.txt", "run.json"])
def test_what_is_not_ours_is_never_touched(tmp_path: Path, two: Path, force: list[str], name: str) -> None:
    out = tmp_path / "documents"
    out.mkdir()
    write(out, '{"of": "another program"}', name)
    write(out, "years of work", "precious.txt")
    done = fipa("run", two, "--out", out, "--quiet", *force)
    assert done.code == 2
    assert "not a run" in " ".join(done.err.split()) or "already holds a run" in done.err
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        name: '{"of": "another program"}',
        "precious.txt": "years of work",
    }


def test_force_spares_what_others_put_beside_a_run(tmp_path: Path, two: Path) -> None:
    out = tmp_path / "run"
    assert fipa("run", two, "--out", out, "--quiet").code == 0
    write(out, "years of work", "precious.txt")
    fipa("run", two, "--out", out, "--quiet", "--force")
    assert (out / "precious.txt").read_text() == "years of work"


def test_out_may_be_a_file_or_an_empty_directory(tmp_path: Path, two: Path) -> None:
    file = write(tmp_path, "text", "file")
    assert fipa("run", two, "--out", file, "--force").code == 2
    assert file.read_text() == "text"
    (tmp_path / "empty").mkdir()
    assert fipa("run", two, "--out", tmp_path / "empty", "--quiet", "--arm", "B").code == 0


def test_default_directories_are_fresh(tmp_path: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("e", "e-2"):
        done = fipa("run", two, "--arm", "B", "--rounds", 1, "--json")
        assert Path(json.loads(done.out)["directory"]) == Path("runs") / expected
        assert (Path("runs") / expected / "results.json").exists()


# --- output ---


def test_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    text = TWO_ARMS.replace("lr = 0.1", "lr = 1e60")
    done = fipa("run", write(tmp_path, text), "--out", tmp_path / "run", "--json", report=True)
    assert done.code == 3
    content = json.loads(done.out, parse_constant=pytest.fail)
    assert content["directory"] == str(tmp_path / "run")
    assert Path(content["results"]).exists()
    assert Path(content["report"]).exists()
    assert set(content["summary"]) == {"A", "B"}
    assert content["summary"]["A"]["status"] == "diverged"
    assert content["summary"]["B"]["median"] == results(tmp_path / "run")["arms"]["B"]["0"]["metric"][-1]


def test_quiet_prints_nothing(tmp_path: Path, two: Path) -> None:
    done = fipa("run", two, "--out", tmp_path / "run", "--quiet", report=True)
    assert (done.code, done.out, done.err) == (0, "", "")
    done = fipa("report", tmp_path / "run", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_plain_lines_and_a_table_when_piped(tmp_path: Path, two: Path) -> None:
    done = fipa("run", two, "--out", tmp_path / "run", report=True)
    lines = done.out.splitlines()
    assert lines[0].startswith("A, seed 0: finished at round 2, metric ")
    assert lines[1].startswith("B, seed 0: finished at round 2, metric ")
    assert lines[2].split()[:2] == ["arm", "rounds"]
    assert [line.split()[:2] for line in lines[3:5]] == [["A", "2"], ["B", "2"]]
    assert lines[5] == "averaged: the mean of the last 10 models, after the last round"
    assert f"report {tmp_path / 'run' / 'report.html'}, numbers {tmp_path / 'run' / 'results.json'}" in lines[6]
    assert "\x1b" not in done.out
    assert "\r" not in done.out


@pytest.mark.long
def test_no_report_means_numbers_only_and_it_can_be_made_later(tmp_path: Path, two: Path) -> None:
    run = tmp_path / "run"
    done = fipa("run", two, "--out", run, "--no-report", report=True)
    assert done.out.splitlines()[-1] == f"numbers {run / 'results.json'}"
    assert "report" not in json.loads(fipa("resume", run, "--no-report", "--json", report=True).out)
    assert not (run / "report.html").exists()
    assert not (run / "figures").exists()
    assert fipa("report", run).code == 0
    assert (run / "report.html").exists()
    assert any((run / "figures").iterdir())


def test_version_and_help() -> None:
    assert fipa("--version").out.strip().count(".") == 2
    assert all(word in fipa("--help").out for word in ("list", "show", "run", "resume", "report"))


# --- images ---


@pytest.mark.long
def test_warm_up_and_arms_on_images(tmp_path: Path) -> None:
    """From TOML to the report; then a second run that takes the warm-up of the first."""
    one = ["--seeds", "1"]
    done = fipa("run", write(tmp_path, IMAGES), "--out", tmp_path / "first", *one, report=True)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split(", metric")[0] for line in lines[:4]] == [
        "warm-up, seed 1: finished at round 3",
        "A, seed 1: finished at round 5",
        "B, seed 1: finished at round 5",
        "C, seed 1: finished at round 3",
    ]
    content = results(tmp_path / "first")
    assert content["metric"] == {"name": "test accuracy, %", "goal": "max", "scale": "linear"}
    assert content["config"]["problem"]["model"] == {"channels": [4, 8], "hidden": 8}
    assert content["config"]["problem"]["augment"] == {"crop": 1, "flip": False, "rotation": 0.0}
    assert (tmp_path / "first" / "report.html").exists()
    assert len(json.loads((tmp_path / "first" / "views.json").read_text())["shares"]["counts"]) == 4

    second = tmp_path / "second"
    done = fipa(
        "run", tmp_path / "e.toml", "--out", second, *one, "--warmup", tmp_path / "first", "--arm", "A", "--json"
    )
    assert (done.code, done.err) == (0, "")
    assert results(second)["arms"]["A"]["1"]["metric"] == content["arms"]["A"]["1"]["metric"]
    assert results(second)["warmup"]["seeds"] == content["warmup"]["seeds"]  # their seconds, too
    summary = json.loads(done.out)["summary"]["A"]
    assert (summary["after"], summary["median"]) == (3, content["arms"]["A"]["1"]["metric"][-1])


def test_a_warm_up_that_does_not_fit_is_a_usage_error(tmp_path: Path, two: Path) -> None:
    done = fipa("run", two, "--out", tmp_path / "run", "--warmup", tmp_path / "absent", "--quiet")
    assert done.code == 2
    assert "absent holds no run" in " ".join(done.err.split())


def test_a_missing_set_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for under --data, FIPA_DATA or ./data."""
    monkeypatch.setenv("FIPA_DATA", str(tmp_path / "nowhere"))
    path = write(tmp_path, IMAGES.replace('"digits"', '"cifar10"'))
    for more, folder in (([], "nowhere"), (["--data", tmp_path / "elsewhere"], "elsewhere")):
        done = fipa("run", path, "--out", tmp_path / "run", *more)
        assert done.code == 2
        assert "fipa data get cifar10" in " ".join(done.err.split())
        assert str(tmp_path / folder) in done.err
        assert not (tmp_path / "run").exists()
    assert os.environ["FIPA_DATA"] == str(tmp_path / "nowhere")  # changed for the run only, see test_api.py


# --- problems of users ---


@pytest.mark.long
def test_own_problem_by_file(tmp_path: Path) -> None:
    path = write(tmp_path, OWN_PROBLEM, "mine.py")
    done = fipa("run", path, "--rounds", 2, "--out", tmp_path / "run", "--quiet", report=True)
    assert (done.code, done.err) == (0, "")
    content = results(tmp_path / "run")
    assert content["experiment"] == content["title"] == "mine"
    assert content["config"]["problem"] == {"name": "python", "file": str(path)}
    assert all(len(seeds["0"]["metric"]) == 2 for seeds in content["arms"].values())
    assert not (tmp_path / "run" / "views.json").exists()
    assert (tmp_path / "run" / "report.html").exists()


def test_own_problem_by_toml_beside_it(tmp_path: Path) -> None:
    write(tmp_path, OWN_PROBLEM, "mine.py")
    text = ONE_ARM[ONE_ARM.index("[[arms]]") :] + '[problem]\nname = "python"\nfile = "mine.py"\n'
    assert fipa("run", write(tmp_path, text), "--rounds", 1, "--out", tmp_path / "run", "--quiet").code == 0
    assert len(results(tmp_path / "run")["arms"]["A"]["0"]["metric"]) == 1


def test_own_problem_may_be_any_python(tmp_path: Path) -> None:
    """A dataclass looks its module up, as pickle does."""
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
    text = head + "@dataclass\nclass Settings:\n    waves: int = 2\n\n" + OWN_PROBLEM
    done = fipa("run", write(tmp_path, text, "mine.py"), "--rounds", 1, "--out", tmp_path / "run", "--quiet")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\n", "must define a function problem(seed)"),
        ("problem = 3\n", "must define a function problem(seed)"),
        ("def problem(seed):\n    return 3\n", "must return a fipa.Problem, got int"),
        ("import fipa\n\ndef problem(seed):\n    return fipa.Problem(None, [], None)\n", "at least one client"),
    ],
)
def test_wrong_problems_are_usage_errors(tmp_path: Path, text: str, reason: str) -> None:
    done = fipa("run", write(tmp_path, text, "mine.py"), "--out", tmp_path / "run")
    assert done.code == 2
    assert reason in done.err
    assert not (tmp_path / "run").exists()


def test_a_missing_problem_file(tmp_path: Path) -> None:
    assert "no such file" in fipa("run", tmp_path / "absent.py").err
    text = ONE_ARM[ONE_ARM.index("[[arms]]") :] + '[problem]\nname = "python"\nfile = "absent.py"\n'
    done = fipa("run", write(tmp_path, text), "--out", tmp_path / "run")
    assert done.code == 2
    assert f"{tmp_path / 'absent.py'}: no such file" in done.err


@pytest.mark.long
def test_exceptions_of_users_show_their_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "def problem(seed):\n    return 1 / 0  # theirs\n", "mine.py")
    with pytest.raises(ZeroDivisionError) as stop:
        fipa("run", path, "--out", tmp_path / "run")
    capsys.readouterr()
    sys.excepthook(stop.type, stop.value, stop.tb)  # as Python calls it at the end, whoever has set it
    shown = capsys.readouterr().err
    assert "return 1 / 0  # theirs" in shown
    assert shown == "".join(traceback.format_exception(stop.value))  # Python's own way to print it


# --- a terminal, and Ctrl-C ---


@pytest.mark.long
def test_terminal_shows_round_metric_and_time_left(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    path = write(tmp_path, TWO_ARMS.replace("rounds = 2", "rounds = 12"))
    code = "from fipa.cli import entry; entry()"
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm", "COLUMNS": "120", "LINES": "30", "OMP_NUM_THREADS": "1"}
        command = ["run", str(path), "--out", str(tmp_path / "run"), "--no-report"]
        os.execv(sys.executable, [sys.executable, "-c", code, *command])
    seen = b""
    try:
        while part := os.read(terminal, 4096):
            seen += part
    except OSError:  # the terminal is closed at the end
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = seen.decode()
    assert "12/12" in text
    assert "left" in text
    assert f"{results(tmp_path / 'run')['arms']['B']['0']['metric'][-1]:.3e}" in text
    assert "\x1b[" in text
    assert "finished at round" not in text


@pytest.mark.long
def test_ctrl_c_before_the_first_round(tmp_path: Path) -> None:
    """While the user's problem is still being made, by a command that was told to ignore Ctrl-C, as CI and `&` do."""
    marker = tmp_path / "started"
    slow = f"def problem(seed):\n    import time\n    open({str(marker)!r}, 'w').close()\n    time.sleep(1000)"
    path = write(tmp_path, OWN_PROBLEM.replace("def problem(seed):", slow), "mine.py")

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with process("run", path, "--out", tmp_path / "run", preexec_fn=ignore) as running:
        wait_until(marker.exists)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "Traceback" not in out + err
    assert rounds_on_disk(tmp_path / "run") == 0
