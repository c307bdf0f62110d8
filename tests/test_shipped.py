"""The shipped experiments without what runs them: outlines, and settings that were worked out before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fipa import shipped
from fipa.config.load import load


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_outlines_are_of_the_experiments() -> None:
    for name in shipped.names():
        outline, experiment = shipped.outline(name), load(name)[1]
        assert (outline["title"], outline["seeds"]) == (experiment.title, list(experiment.seeds))
        rounds = [(arm["name"], arm.get("rounds", outline["rounds"])) for arm in outline["arms"]]
        assert rounds == [(arm.name, arm.rounds or experiment.rounds) for arm in experiment.arms]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The experiments that are worked out from now on."""
    found: list[str] = []

    def worked_out(name: str) -> dict[str, Any]:
        found.append(name)
        return {"title": name}

    monkeypatch.setattr(shipped, "worked_out", worked_out)
    return found


def test_settings_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    assert shipped.settings("demo") == shipped.settings("demo") == {"title": "demo"}
    assert shipped.settings("digits") == {"title": "digits"}
    assert asked == ["demo", "digits"]


def test_a_change_of_the_package_works_them_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path)
    shipped.settings("demo")
    (tmp_path / "rules.py").write_text("DAMPING = 1\n")
    shipped.settings("demo")
    assert asked == ["demo", "demo"]


def test_what_is_broken_or_cannot_be_kept_is_worked_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    shipped.settings("demo")
    (file,) = home.rglob("demo.json")
    file.write_text("{")
    assert shipped.settings("demo") == {"title": "demo"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file, and no folder
    assert shipped.settings("demo") == {"title": "demo"}
    assert asked == ["demo"] * 3


def test_what_is_kept_is_what_is_told() -> None:
    first = shipped.settings("demo")
    assert first == shipped.worked_out("demo") == shipped.settings("demo")
