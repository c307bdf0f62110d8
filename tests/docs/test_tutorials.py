"""Tutorials do what their pages show."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("own-loop", "flower", "hospitals", "pinn", "own-rule")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
OUTPUT = re.compile(r'<div class="output".*?</div>\n*|!\[figure\]\([^)]*\)\n*', re.DOTALL)


@pytest.fixture
def tutorials(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs/tools"))
    return importlib.import_module("tutorials")


def page_of(name: str) -> str:
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text("utf-8")


def alike(one: str, other: str) -> bool:
    """The same words, and numbers that may differ as those of two machines do."""
    if NUMBER.sub("#", one).split() != NUMBER.sub("#", other).split():
        return False
    return all(near(a, b) for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True))


def near(one: str, other: str) -> bool:
    a, b = float(one), float(other)
    if "e" in one:  # an error: its order counts
        return a < 30 * b and b < 30 * a
    return abs(a - b) <= max(3, 0.25 * max(abs(a), abs(b)))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_prints_what_its_page_shows(tutorials: Any, name: str) -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = tutorials.run(name)
    finally:
        torch.set_num_threads(threads)
    page, again = page_of(name), tutorials.page(name, results)
    command = f"run `python docs/tools/tutorials.py {name}`"
    assert OUTPUT.sub("", page).split() == OUTPUT.sub("", again).split(), command
    for shown, printed in zip(tutorials.outputs(page), tutorials.outputs(again), strict=True):
        assert alike(shown, printed), f"{command}: {printed}"


def test_pages_are_complete(tutorials: Any) -> None:
    assert tutorials.NAMES == NAMES
    for name in NAMES:
        page = page_of(name)
        for figure in re.findall(r"!\[figure\]\((.*?)\)", page):
            assert (ROOT / "docs" / "tutorials" / figure).exists()
        assert len(re.findall(r"\w+", page)) < 2500  # ten minutes


def test_outputs_are_compared_with_some_tolerance() -> None:
    assert alike("accuracy 91.2 %", "accuracy 90.1 %")
    assert not alike("accuracy 91.2 %", "accuracy 60 %")
    assert not alike("accuracy 91.2 %", "loss 91.2 %")
    assert alike("error 2.0e-05", "error 8e-05")
    assert not alike("error 2.0e-05", "error 2e-02")
