"""Tables of the reference: they have every key, what it means, and what the code says."""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

import fipa

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(ROOT / "docs/tools"))
    return importlib.import_module("generated")


def test_every_key_has_a_meaning(generated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(generated.log, "warning", lambda text, *values: warned.append(text % values))
    for name in generated.TABLES:
        assert generated.table(name).strip(), name
    assert warned == []


def test_pages_ask_for_tables_that_exist(generated: Any) -> None:
    asked = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"<!-- generated: ([\w-]+) -->", page.read_text("utf-8"))
    }
    assert asked == set(generated.TABLES)


def test_settings_are_those_of_the_code(generated: Any) -> None:
    rules = generated.table("rules")
    part = rules.split("#### `completed-fipa`")[1].split("####")[0]
    assert "| `damping` | number | `0.0` |" in part
    assert "| `pull` | number | `1.0` |" in part
    assert "#### `shared-fipa`" in rules
    assert "| `caution` | number | `4.0` |" in generated.table("tables")
    assert "| `steps` | whole number |" in generated.table("local")
    assert "| `seeds` | list of whole numbers | `[0]` |" in generated.table("experiment")
    assert "[table](#engine)" in generated.table("experiment")


def test_a_key_without_a_meaning_is_reported(generated: Any, caplog: pytest.LogCaptureFixture) -> None:
    from dataclasses import dataclass

    @dataclass
    class Quiet:
        """Says nothing of its key."""

        key: int = 1

    handler = logging.Handler()
    told: list[str] = []
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    generated.log.addHandler(handler)
    try:
        assert "| `key` |" in generated.keys(Quiet)
    finally:
        generated.log.removeHandler(handler)
    assert told == ["Quiet.key has no description in its docstring"]


def test_exit_codes_and_commands(generated: Any) -> None:
    from fipa.cli import Exit

    codes = generated.table("exit-codes")
    assert all(f"| {code.value} |" in codes for code in Exit)
    commands = generated.table("commands")
    assert "### `fipa data get`" in commands
    assert "`--seeds`" in commands.split("### `fipa run`")[1].split("### ")[0]


@pytest.mark.long
def test_the_page_on_results_json_has_every_key(generated: Any, tmp_path: Path) -> None:
    import torch

    def misfit(model: Any, x: Any) -> Any:
        return model(x)[:, 0] - x[:, 0]

    x = torch.rand(10, 1, dtype=torch.float64)
    model = fipa.models.mlp([1, 2, 1], generator=torch.Generator().manual_seed(0))
    problem = fipa.Problem(model, [fipa.Residual(misfit, x)], metric=lambda model: misfit(model, x).square().mean())
    arms = {"one": {"rule": fipa.FedAvg(), "local": {"name": "adam", "steps": 1}}}
    fipa.run(problem, arms=arms, rounds=1, quiet=True, out=tmp_path / "run")
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    page = (ROOT / "docs/reference/results-json.md").read_text("utf-8")
    told = set(re.findall(r"`(\w+)`", page)) | set(re.findall(r"^\| `(\w+)`", generated.table("series"), re.MULTILINE))
    assert set(written) - told == set()
    assert set(written["arms"]["one"]["0"]) - told == set()
