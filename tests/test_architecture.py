"""Imports point down the floors of the house that docs/architecture.md shows."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fipa"


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/tools"))
    return importlib.import_module("house")


def imports():
    """Who imports whom, by floor: every import statement, also those within functions, but for those of types only."""
    ours = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        tree = ast.parse(file.read_text("utf-8"))
        guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        typing = {id(inner) for guard in guards for inner in ast.walk(guard)}
        for node in ast.walk(tree):
            if own == "__init__" or id(node) in typing:
                continue
            for name in imported(node):
                if name != own and name in ours:
                    yield own, name, f"{file.relative_to(ROOT)}:{node.lineno}"


def imported(node):
    if isinstance(node, ast.ImportFrom) and node.module == "fipa":
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name.split(".")[1] for name in names if name.startswith("fipa.")]


def test_imports_point_down(house):
    wrong = [f"{where}: {own} imports {name}" for own, name, where in imports() if not allowed(house, own, name)]
    assert not wrong, "\n".join(wrong)


def allowed(house, own, name):
    if any({own, name} == set(pair) for pair in house.APART):
        return False
    return (own, name) in house.EXCEPT or house.floor_of(own) <= house.floor_of(name)


def test_every_room_exists(house):
    for _, names in house.FLOORS:
        for name in names:
            assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists(), name


def test_the_rule_finds_what_it_forbids(house):
    assert allowed(house, "federation", "aggregation")
    assert not allowed(house, "aggregation", "federation")
    assert not allowed(house, "aggregation", "clients")
    assert allowed(house, "a_new_way_in", "federation")
    assert not allowed(house, "federation", "a_new_way_in")
    assert imported(ast.parse("from fipa.curvature.sketch import Sketch").body[0]) == ["curvature"]
    assert imported(ast.parse("from fipa import models").body[0]) == ["models"]


def test_pictures_are_what_the_script_draws(house):
    assert (ROOT / "docs/house.svg").read_text("utf-8") == house.house(), "run `python docs/tools/house.py`"
    assert (ROOT / "docs/round.svg").read_text("utf-8") == house.flow(), "run `python docs/tools/house.py`"
