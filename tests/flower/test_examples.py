"""The example apps, on a grid in this process; the quickstart before and after the diff in docs/how-to/flower.md."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fipa.flower.local import LocalGrid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = set(sys.modules)
    yield monkeypatch
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("quickstart", "vision", "fitting"):
            del sys.modules[name]


def play(folder: Path, nodes: int, path: pytest.MonkeyPatch, **changes: Any) -> LocalGrid:
    """Run an app with the settings of its pyproject.toml."""
    path.syspath_prepend(str(folder))
    flwr = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
    config = flwr["config"] | {name.replace("_", "-"): value for name, value in changes.items()}
    server, client = (_component(flwr["components"][kind]) for kind in ("serverapp", "clientapp"))
    grid = LocalGrid(client, nodes, run_config=config)
    server(grid, Context(1, 1, {}, RecordDict(), config))
    return grid


def _component(reference: str) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["flower-fitting", "flower-vision", "flower-quickstart", "flower-digits"])
def test_flwr_takes_the_apps(name: str, tmp_path: Path, path: pytest.MonkeyPatch) -> None:
    """What `flwr run` looks at before it starts anything."""
    from flwr.cli.config_migration import migrate
    from flwr.cli.config_utils import load_and_validate

    path.setenv("FLWR_HOME", str(tmp_path / "home"))
    folder = tmp_path / "app"
    shutil.copytree(EXAMPLES / name, folder)
    migrate(str(folder), [], ignore_legacy_usage=True)
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert config["tool"]["flwr"]["app"]["components"]
    assert not warnings


@pytest.mark.long
def test_fitting(path: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "theta.safetensors"
    play(EXAMPLES / "flower-fitting", 2, path, rounds=2, output=str(file))
    assert file.exists()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fipa", "fedavg", "additive", "secure"])
def test_vision(strategy: str, path: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    play(EXAMPLES / "flower-vision", 4, path, strategy=strategy, rounds=3, warmup_rounds=2)
    accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+) %", capsys.readouterr().out)]
    assert len(accuracies) == 4
    assert accuracies[-1] > accuracies[0]


def the_diff() -> str:
    text = (ROOT / "docs" / "how-to" / "flower.md").read_text("utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", text, flags=re.S)
    return diff


@pytest.mark.long
def test_quickstart_becomes_fipa_with_ten_changed_lines(
    path: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "app"
    shutil.copytree(EXAMPLES / "flower-quickstart", folder)
    play(folder, 3, path)
    before = capsys.readouterr().out
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]
    changed = [line for line in the_diff().splitlines() if re.match(r"[+-](?![+-]{2})", line)]
    assert len(changed) <= 10
    subprocess.run(["git", "apply", "-p1", "-"], input=the_diff().encode(), cwd=folder, check=True)
    assert "FIPA(" in (folder / "quickstart" / "server_app.py").read_text("utf-8")
    play(folder, 3, path)
    after = capsys.readouterr().out
    assert "accuracy by round" in before
    assert "accuracy by round" in after
    assert before != after
