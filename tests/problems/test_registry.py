"""Problems by name, and from a user's own file."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch

from fipa import FipaError, Problem
from fipa.problems.registry import PROBLEMS, python

GOOD = """
import torch
import fipa

def residual(model, x, y):
    return model(x)[:, 0] - y

def problem(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 1)
    client = fipa.Residual(residual, torch.randn(5, 2), torch.randn(5))
    return fipa.Problem(model, [client], lambda model: 0.0, name=f"seed {seed}")
"""


@pytest.mark.parametrize("name", PROBLEMS)
def test_factories_can_be_sent_to_workers(name: str) -> None:
    factory = pickle.loads(pickle.dumps(partial(PROBLEMS[name])))
    assert factory.func is PROBLEMS[name]


def test_own_file(tmp_path: Path) -> None:
    file = tmp_path / "my-own.py"
    file.write_text(GOOD)
    made = python(4, file=str(file))
    assert isinstance(made, Problem)
    assert made.name == "seed 4"
    assert torch.equal(python(4, file=str(file)).theta(), made.theta())
    assert not torch.equal(python(5, file=str(file)).theta(), made.theta())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.py", None, "gone.py: no such file"),
        ("text.txt", "hello", "text.txt is not a Python file"),
        ("empty.py", "", r"empty.py must define a function problem\(seed\)"),
        ("number.py", "problem = 3", r"number.py must define a function problem\(seed\)"),
        ("none.py", "def problem(seed): pass", r"none.py: problem\(seed\) must return a fipa.Problem, got NoneType"),
    ],
)
def test_files_that_are_no_problem(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(FipaError, match=message):
        python(0, file=str(tmp_path / name))
