"""The package as it is published: built, checked, installed beside its dependencies, and used somewhere else."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

import fipa

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fipa"

USER = '''\
"""A user's own code, as strictly typed as can be."""

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fipa
from fipa import ClientUpdate, CompletedFIPA


def step(model: nn.Module, clients: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    theta = fipa.parameters_of(model)
    assert_type(theta, dict[str, Tensor])
    updates: list[ClientUpdate] = []
    for x, y in clients:
        sketch = fipa.sketch(model, (x, y), loss="cross_entropy", rank=fipa.TraceShare(0.9))
        assert_type(sketch, fipa.Sketch)
        delta = {name: torch.zeros_like(value) for name, value in theta.items()}
        updates.append(ClientUpdate(delta, num_examples=len(x), sketch=sketch))
    result = fipa.aggregate(theta, updates, rule=CompletedFIPA(damping=0.5))
    assert_type(result.theta, dict[str, Tensor])
    assert_type(result.diagnostics.shares, dict[int | str, float])
    flat = fipa.aggregate(torch.zeros(3), [ClientUpdate(torch.ones(3), 1)], rule=fipa.FedAvg(step=0.5))
    assert_type(flat.theta, Tensor)
    return result.theta


def misfit(model: nn.Module, x: Tensor) -> Tensor:
    predicted: Tensor = model(x)
    return predicted[:, 0] - x[:, 0] ** 2


def problem(seed: int) -> fipa.Problem:
    model = fipa.models.mlp([1, 4, 1], generator=torch.Generator().manual_seed(seed))
    x = torch.rand(10, 1, dtype=torch.float64)
    return fipa.Problem(model, [fipa.Residual(misfit, x)], lambda model: misfit(model, x).square().mean())


def experiment(out: Path) -> float:
    results = fipa.run(problem, arms={"mine": {"rule": fipa.FIPA(), "local": fipa.GaussNewton()}}, seeds=[0], out=out)
    assert_type(results, fipa.Results)
    return float(results.metric("mine")[0, -1])


def by_hand() -> None:
    arm = fipa.Arm("mine", (fipa.Stage(fipa.FIPA(), fipa.GaussNewton(), 3, fipa.SketchPlan(4)),))
    with fipa.Executor(problem) as executor:
        federation = fipa.Federation(arm, 0, executor)
        for state, record in federation.rounds(federation.start()):
            print(record.round, record.metric, state.theta.shape)


fipa.nonsense  # an error
'''

# strict for the user; for all else as `make lint` has it, whose cache is of use then: to check torch takes long
SETTINGS = """\
[mypy]
strict = True
disallow_untyped_calls = False
warn_return_any = False
python_version = 3.10

[mypy-user]
disallow_untyped_calls = True
warn_return_any = True
"""


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """What a program prints; `PYTHONPATH` and the repository are out of its sight."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FIPA_"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def files_of(folder: Path) -> set[str]:
    """All that belongs into the package."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder.parent).as_posix() for path in found}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it; of a copy, since to build writes files."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--no-isolation", cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with the wheel, and with the dependencies of the one that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=os.name != "nt")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    (wheel,) = dist.glob("*.whl")
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", *options, wheel, cwd=folder)
    own = Path(
        run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (own / "dependencies.pth").write_text(
        "\n".join(shared), "utf-8"
    )  # behind the wheel; .pth files in them do not count
    return programs


@pytest.mark.long
def test_all_files_are_in_the_wheel(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("fipa/")}
    assert packed == files_of(SOURCE)
    assert {"fipa/py.typed", "fipa/experiments/demo.toml"} < packed
    assert any(name.startswith("fipa/data/") and name.endswith(".npz") for name in packed)


@pytest.mark.long
def test_the_index_would_take_it(dist: Path) -> None:
    told = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *dist.iterdir(), cwd=dist)
    assert told.count("PASSED") == 2


@pytest.mark.long
def test_the_wheel_runs_the_demo_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import fipa; print(fipa.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    short = ["--rounds", "1", "--set", "problem.samples=20", "--set", "problem.hidden=[4]", "--set", "engine.group=1"]
    short += ["--set", "arms.0.local.steps=5", "--arm", "FedAvg (1000 steps)", "--arm", "FIPA controlled"]
    told = json.loads(run(installed / "fipa", "run", "demo", *short, "--json", cwd=tmp_path))
    assert set(told["summary"]) == {"FedAvg (1000 steps)", "FIPA controlled"}
    assert (tmp_path / told["report"]).stat().st_size > 10_000
    assert list((tmp_path / "runs" / "demo" / "figures").iterdir())


@pytest.mark.long
def test_types_are_there_for_users(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER, "utf-8")
    (tmp_path / "mypy.ini").write_text(SETTINGS, "utf-8")
    with suppress(OSError):  # also where `make lint` has not been run, or is at work
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "cache")
    options = ("--cache-dir", tmp_path / "cache", "--python-executable", installed / "python")
    told = run(sys.executable, "-m", "mypy", *options, "user.py", cwd=tmp_path, code=1)
    lines = told.splitlines()
    assert len(lines) == 2, told
    assert lines[0].startswith(f'user.py:{USER.count(chr(10))}: error: Module has no attribute "nonsense"')


def test_every_file_is_python_310() -> None:
    """Its syntax; that the library of Python 3.10 has what we use is for mypy to say, whose python_version is 3.10."""
    for path in SOURCE.rglob("*.py"):
        ast.parse(path.read_text("utf-8"), feature_version=(3, 10))


def test_versions_agree() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'\nversion = "{fipa.__version__}"\n' in text
    assert 'requires-python = ">=3.10"' in text
    for minor in range(10, 14):
        assert f'"Programming Language :: Python :: 3.{minor}"' in text
