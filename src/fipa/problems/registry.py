"""Problems by the name that an experiment calls them, and problems from a user's own Python file."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fipa.errors import FipaError
from fipa.federation.problem import Problem
from fipa.problems.burgers import burgers
from fipa.problems.elliptic import elliptic, poisson
from fipa.problems.fitting import mixture2d, sine, teacher
from fipa.problems.inverse import inverse
from fipa.problems.vision import images
from fipa.randomness import seed_for


def python(seed: int, *, file: str) -> Problem:
    """The problem that `problem(seed)` in a Python file returns."""
    path = Path(file)
    if not path.is_file():
        raise FipaError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(f"fipa_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FipaError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import its neighbours
    common = seed_for(seed, "problem")
    with torch.random.fork_rng(devices=[]):  # whatever the file draws from is the same in every process
        torch.manual_seed(common)
        random.seed(common)
        np.random.seed(common % 2**32)
        spec.loader.exec_module(module)
        make = getattr(module, "problem", None)
        if not callable(make):
            raise FipaError(f"{file} must define a function problem(seed) that returns a fipa.Problem")
        made = make(seed)
    if not isinstance(made, Problem):
        raise FipaError(f"{file}: problem(seed) must return a fipa.Problem, got {type(made).__name__}")
    return made


def given(seed: int) -> Problem:
    """A problem that was handed to `fipa.run`: there is nothing on disk to make it from."""
    raise FipaError("the problem of this run was made in Python: give it to `fipa.run` again, with force=True")


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "sine": sine,
    "mixture2d": mixture2d,
    "teacher": teacher,
    "elliptic": elliptic,
    "poisson": poisson,
    "burgers": burgers,
    "inverse": inverse,
    "images": images,
    "python": python,
    "given": given,
}
