"""Python files of users: run again for every problem, and all the same known by one set of classes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from tiny import OWN_PROBLEM, write

from fipa.aggregation.registry import RULES
from fipa.errors import FipaError
from fipa.problems.files import module_from, registered
from fipa.problems.registry import python

RULE = """\
from dataclasses import dataclass

import torch

import fipa

DRAWN = torch.rand(1).item()


@dataclass(frozen=True)
class Own(fipa.FedAvg):
    share: float = 0.5


fipa.register_rule("own", Own)
"""


def test_a_file_is_run_once_for_what_it_registers_and_again_when_it_has_changed(tmp_path: Path) -> None:
    file = write(tmp_path, RULE, "own.py")
    first = registered(str(file))
    assert registered(str(file)) is first
    assert RULES["own"] is first.Own
    write(tmp_path, RULE.replace("0.5", "0.25"), "own.py")
    assert registered(str(file)) is not first
    assert RULES["own"]().share == 0.25


def test_a_problem_that_is_made_again_leaves_the_classes_as_they_are(tmp_path: Path) -> None:
    """Workers know a class by its module: an object of an older one could not be sent to them."""
    file = write(tmp_path, RULE + OWN_PROBLEM, "own.py")
    first = registered(str(file))
    rule = RULES["own"](share=0.1)
    python(3, file=str(file))
    assert RULES["own"] is first.Own
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    one, two = (registered(str(write(tmp_path / name, f"HERE = {name!r}\n", "own.py"))) for name in ("a", "b"))
    assert (one.HERE, two.HERE) == ("a", "b")
    assert one.__name__ != two.__name__


def test_what_a_file_draws_is_its_own_business(tmp_path: Path) -> None:
    file = write(tmp_path, RULE, "own.py")
    before = torch.random.get_rng_state()
    drawn = registered(str(file)).DRAWN
    assert torch.equal(torch.random.get_rng_state(), before)
    write(tmp_path, RULE + "\n# changed\n", "own.py")
    torch.rand(3)
    assert drawn == registered(str(file)).DRAWN


def test_no_file(tmp_path: Path) -> None:
    for run in (registered, module_from):
        with pytest.raises(FipaError, match=r"gone\.py: no such file"):
            run(str(tmp_path / "gone.py"))
