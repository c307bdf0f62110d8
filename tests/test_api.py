"""Experiments from Python."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation.cases import alike
from tiny import FIT, OWN_PROBLEM, TWO_ARMS, numbers, write
from tiny import fipa as command

import fipa
from fipa.errors import CALLED, EXTRAS, missing
from fipa.federation.record import NUMBERS

quietly = partial(fipa.run, quiet=True)
LOCAL = {"name": "sgd", "lr": 0.1, "steps": 2}
SINGLY = {"engine.group": 1}  # several clients at once are traced first, which takes longer than these rounds


def misfit(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x)[:, 0] - y


def error(model: torch.nn.Module) -> torch.Tensor:
    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    return misfit(model, x, x[:, 0] ** 2).square().mean()


def problem(seed: int) -> fipa.Problem:
    generator = torch.Generator().manual_seed(seed)
    model = fipa.models.mlp([1, 4, 1], generator=generator)
    x = torch.rand(2, 10, 1, generator=generator, dtype=torch.float64)
    return fipa.Problem(model, [fipa.Residual(misfit, part, part[:, 0] ** 2) for part in x], error)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> fipa.Results:
    """Two arms on two seeds; B is evaluated every second round."""
    arms = {
        "A": {"rule": fipa.FedAvg(), "local": LOCAL, "rounds": 3},
        "B": {"rule": fipa.FIPA(damping=0.1), "local": {"name": "gauss-newton"}, "evaluate_every": 2, "average": 0},
    }
    return quietly(
        problem,
        arms=arms,
        seeds=[3, 5],
        set={"rounds": 4, **SINGLY},
        out=tmp_path_factory.mktemp("api") / "run",
    )


@pytest.mark.long
def test_numbers_are_arrays(done: fipa.Results) -> None:
    assert (done.arms, done.seeds) == (("A", "B"), (3, 5))
    assert done.metric("A").shape == (2, 3)
    assert np.isnan(done.metric("B")).tolist() == [[True, False, True, False]] * 2
    assert done.series("averaged_metric", "A").shape == (2, 3)
    assert np.isnan(done.series("averaged_metric", "B")).all()
    assert (done.series("uplink_bytes", "B") > 0).all()
    assert done.status("A") == {3: "finished", 5: "finished"}
    for seed, row in zip(done.seeds, done.metric("B"), strict=True):
        assert problem(seed).evaluate(done.theta("B", seed)) == row[-1]


def test_what_is_not_there_is_named(done: fipa.Results) -> None:
    with pytest.raises(fipa.FipaError, match="no arm 'C': choose one of A, B"):
        done.metric("C")
    with pytest.raises(fipa.FipaError, match="no series 'accuracy': choose one of metric, averaged_metric"):
        done.series("accuracy", "A")
    with pytest.raises(fipa.FipaError, match="no arm 'A' on seed 4"):
        done.theta("A", 4)


def test_a_small_table(done: fipa.Results) -> None:
    head, columns, a, b = repr(done).splitlines()
    assert str(done.directory) in head
    assert columns.split() == ["arm", "rounds", "test", "error,", "median", "averaged", "status"]
    assert a.split()[:2] == ["A", "3"]
    assert b.split()[-2:] == ["-", "finished"]


@pytest.mark.long
def test_a_report_is_written_when_asked_for(done: fipa.Results) -> None:
    assert not (done.directory / "report.html").exists()
    page = done.report()
    assert page == done.directory / "report.html"
    assert page.read_text("utf-8").count("mean of the last 10 models") > 0
    assert list((done.directory / "figures").glob("*.png"))
    again = fipa.Results.load(done.directory)
    assert np.array_equal(again.metric("A"), done.metric("A"))
    written = command("report", done.directory)  # the problem is gone, the results are not
    assert written.code == 0, written.err
    stopped = command("resume", done.directory)
    assert stopped.code == 2
    assert "made in Python" in stopped.err


def test_a_row_per_arm_seed_and_round(done: fipa.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fipa.FipaError, match="pip install pandas"):
        done.frame()
    frame: Any = types.SimpleNamespace(from_records=lambda rows: rows)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=frame))
    rows = done.frame()
    assert len(rows) == 2 * (3 + 4)
    assert {*NUMBERS, "arm", "seed", "round", "accepted"} == set(rows[0])
    assert [(row["arm"], row["seed"], row["round"]) for row in rows[:4]] == [
        ("A", 3, 1), ("A", 3, 2), ("A", 3, 3), ("A", 5, 1),
    ]  # fmt: skip
    assert [row["metric"] for row in rows[:3]] == done.metric("A")[0].tolist()


@pytest.mark.long
def test_a_shipped_experiment_and_a_file_are_what_the_command_makes_of_them(tmp_path: Path) -> None:
    file = write(tmp_path, TWO_ARMS)
    assert command("run", file, "--out", tmp_path / "command", "--quiet", "--rounds", 3, "--seeds", "1").code == 0
    found = quietly(file, rounds=3, seeds=1, out=tmp_path / "python")
    assert numbers(found.directory) == numbers(tmp_path / "command")
    demo = quietly("demo", arms=["FIPA controlled"], rounds=1, set=[*FIT, "engine.group=1"], out=tmp_path / "demo")
    assert demo.arms == ("FIPA controlled",)
    own = quietly(write(tmp_path, OWN_PROBLEM, "own.py"), rounds=1, set=SINGLY, out=tmp_path / "own")
    assert own.arms == ("FedAvg", "FIPA", "FIPA, Gauss-Newton clients")


@pytest.mark.parametrize(
    ("key", "rule", "remedy"),
    [
        ("rule", lambda cohort, state: None, "fipa.register_rule"),
        ("inner", fipa.Sketch, "fipa.register_rule"),
        ("local", type("Mine", (fipa.SGD,), {})(lr=0.1, steps=1), "fipa.register_local_rule"),
    ],
)
def test_rules_without_a_name_say_how_to_give_them_one(key: str, rule: Any, remedy: str) -> None:
    with pytest.raises(fipa.FipaError, match=f"^{key} = .*this one has none: .*{remedy}"):
        fipa.run(problem, rounds=1, quiet=True, arms={"A": {"rule": fipa.FedAvg(), key: rule}})


def test_other_arms_in_the_place_of_an_experiments(tmp_path: Path) -> None:
    momentum = {"rule": fipa.FedAvgM(momentum=0.5, inner=fipa.FIPA(damping=0.1)), "local": LOCAL}
    found = quietly("demo", arms={"mine": momentum}, rounds=1, set=FIT, out=tmp_path / "run")
    (arm,) = found.content["config"]["arms"]
    assert (arm["rule"]["momentum"], arm["inner"]["name"], arm["inner"]["damping"]) == (0.5, "fipa", 0.1)
    assert found.content["control"] is None


def test_a_problem_itself_stays_as_it_is(tmp_path: Path) -> None:
    mine = problem(0)
    before = mine.theta().clone()
    found = quietly(mine, arms=["FedAvg"], seeds=range(2), rounds=2, out=tmp_path / "run")
    assert torch.equal(mine.theta(), before)
    assert found.seeds == (0, 1)
    assert not torch.equal(found.theta("FedAvg"), before)
    assert found.content["arms"]["FedAvg"]["0"]["initial_metric"] == mine.evaluate(before)


@pytest.mark.long
def test_workers_take_problems_that_can_be_sent(tmp_path: Path) -> None:
    one, two = (quietly(alike, arms=["FIPA"], rounds=2, set=SINGLY, workers=n, out=tmp_path / str(n)) for n in (1, 2))
    assert np.array_equal(one.metric("FIPA"), two.metric("FIPA"))


@pytest.mark.parametrize(
    ("what", "more", "message"),
    [
        ("no-such", {}, "there is no experiment 'no-such'"),
        (3, {}, "takes a name, a path, a fipa.Problem or a function of the seed, not 3"),
        (lambda seed: 3, {}, "must return a fipa.Problem for a seed, got int"),
        (problem, {"arms": ["FedAvg", "X"]}, "no arm 'X': choose one of FedAvg, FIPA"),
        (problem, {"arms": {"a": {"rule": fipa.FedAvg()}}}, r"fipa.run: arms.* needs a rule and a local rule"),
        (problem, {"arms": {"a": {"rule": fipa.FedAvg(), "local": LOCAL, "rund": 1}}}, "rund"),
        (problem, {"set": ["bogus=1"]}, "--set bogus=1: bogus: unknown key"),
    ],
)
def test_mistakes_are_named(what: Any, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(fipa.FipaError, match=message):
        quietly(what, out=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_a_directory_is_not_overwritten(done: fipa.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fipa.FipaError, match="already holds a run"):
        quietly(problem, out=done.directory)
    monkeypatch.chdir(tmp_path)
    brief = partial(quietly, problem, arms=["FedAvg"], set=SINGLY)
    names = [brief(rounds=1).directory for _ in range(2)]
    assert names == [Path("runs/problem"), Path("runs/problem-2")]
    assert brief(rounds=2, out=names[0], force=True).metric("FedAvg").shape == (1, 2)


def test_data_are_looked_for_there_only_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIPA_DATA", "before")
    seen = []

    def make(seed: int) -> fipa.Problem:
        seen.append(os.environ["FIPA_DATA"])
        return problem(seed)

    quietly(make, arms=["FedAvg"], rounds=1, set=SINGLY, data=tmp_path, out=tmp_path / "run")
    assert set(seen) == {str(tmp_path)}
    assert os.environ["FIPA_DATA"] == "before"


# --- what is not installed ---


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


SKETCH = """\
import torch
fipa.sketch(torch.nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(3, 1)), loss="mse", rank=1)
for name in ("torch._dynamo", "numba"): print(name in sys.modules)
import torch._dynamo
print(type(torch._dynamo).__name__, torch.func.grad(lambda x: x * x)(torch.tensor(3.0)).item())
"""


@pytest.mark.long
def test_importing_fipa_needs_no_extra() -> None:
    code = "import sys\nfor name in {}: sys.modules[name] = None\nimport fipa\ntry: fipa.run('demo')\n"
    code += "except fipa.FipaError as error: print(error)\n"
    code += SKETCH
    done = python(code.format([*EXTRAS["cli"], *EXTRAS["flower"], "pandas"]))
    assert (done.returncode, done.stderr) == (0, "")
    needs, compiler, numba, after = done.stdout.splitlines()
    assert needs.startswith("fipa.run needs ")
    assert needs.endswith(": pip install 'fipa[cli]'")
    assert (compiler, numba) == ("False", "False")  # which take long to import, and are not used here
    assert after == "module 6.0"


WITHOUT = """\
import sys
import fipa
for module in {modules}:
    for name in [name for name in sys.modules if name.startswith("fipa.")]:
        del sys.modules[name]
    before, sys.modules[module] = sys.modules.get(module), None
    sys.argv = ["fipa", "report", "nowhere"]
    try:
        from fipa.cli import entry
        entry()
    except (SystemExit, ImportError) as error:
        print(type(error).__name__, error)
    if before is None:
        del sys.modules[module]
    else:
        sys.modules[module] = before
"""


@pytest.mark.long
def test_the_command_names_an_extra_only_if_it_is_missing() -> None:
    done = python(WITHOUT.format(modules=["plotly", "pydantic", "fipa.report.words"]))
    assert (done.returncode, done.stderr) == (0, "")
    plotly, pydantic, ours = done.stdout.splitlines()
    assert plotly == "SystemExit the command line needs plotly: pip install 'fipa[cli]'"
    assert pydantic == "SystemExit the command line needs pydantic: pip install 'fipa[cli]'"
    assert ours.startswith("ModuleNotFoundError")


def test_a_module_that_lacks_a_name_is_no_missing_extra() -> None:
    assert missing(ImportError("cannot import name 'x' from 'typer'", name="typer"), "cli") is None
    assert missing(ModuleNotFoundError(name="numpy"), "cli") is None
    assert missing(ModuleNotFoundError(name="rich.console"), "cli") == "needs rich: pip install 'fipa[cli]'"


def test_extras_are_those_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for extra, modules in EXTRAS.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"{extra} = ["))
        packages = [CALLED.get(module, module).replace("_", "-") for module in modules]
        assert all(f'"{package}>=' in line.replace("_", "-") for package in packages), extra
        assert line.count(">=") == len(modules)
