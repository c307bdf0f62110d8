"""Settings of the shipped experiments, which are worked out beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fipa import shipped
from fipa.config.load import load, sources
from fipa.config.schema import dump, resolved

REMEDY = "run `python -m fipa.shipped`"


def whole(name: str) -> dict[str, Any]:
    """All settings, without making the problem, which takes long: those of the package are what their kind says."""
    experiment = load(name)[1]
    least_squares = experiment.problem.name not in ("images", "head")
    return dump(resolved(resolved(experiment, least_squares), False))


def test_settings_are_those_of_the_experiments() -> None:
    assert {file.name for file in shipped.COMPLETE.iterdir()} == {f"{name}.json" for name in shipped.names()}, REMEDY
    for name in shipped.names():
        content = json.loads((shipped.COMPLETE / f"{name}.json").read_text("utf-8"))
        assert content["settings"] | {"arms": content["arms"]} == shipped.settings(name) == whole(name), REMEDY
        assert list(shipped.settings(name)) == list(whole(name)), REMEDY  # in the same order
        assert list(content["sources"]) == sources(name), REMEDY


def test_what_is_written_is_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "complete").mkdir()
    (tmp_path / "complete" / "gone.json").write_text("{}")
    monkeypatch.setattr(shipped, "names", lambda: ["demo"])
    shipped.write(tmp_path / "complete")
    (kept,) = (tmp_path / "complete").iterdir()
    assert kept.read_text("utf-8") == (shipped.COMPLETE / "demo.json").read_text("utf-8"), REMEDY


def test_changed_experiments_are_worked_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever edits one, or the one that it is based on, sees what it says now."""
    for file in (shipped.COMPLETE / "pde-bratu.json", *(shipped.SHIPPED / name for name in sources("pde-bratu"))):
        (tmp_path / file.name).write_text(file.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    monkeypatch.setattr(shipped, "COMPLETE", tmp_path)
    monkeypatch.setattr(shipped, "worked_out", lambda name: {"title": f"{name} anew"})
    assert shipped.settings("pde-bratu")["title"] != "pde-bratu anew"
    base = tmp_path / sources("pde-bratu")[-1]
    base.write_text(base.read_text("utf-8") + "# changed\n", "utf-8")
    assert shipped.settings("pde-bratu") == {"title": "pde-bratu anew"}
    assert shipped.settings("no-such") == {"title": "no-such anew"}
