"""Problems by the name that an experiment calls them, and problems from a user's own Python file."""

from __future__ import annotations

from collections.abc import Callable

from fipa.errors import FipaError
from fipa.federation.problem import Problem
from fipa.problems.burgers import burgers
from fipa.problems.elliptic import elliptic, poisson
from fipa.problems.files import drawing_from, module_from
from fipa.problems.fitting import mixture2d, sine, teacher
from fipa.problems.head import head
from fipa.problems.inverse import inverse
from fipa.problems.vision import images
from fipa.randomness import seed_for


def python(seed: int, *, file: str) -> Problem:
    """The problem that `problem(seed)` in a Python file returns.

    Parameters
    ----------
    file
        The Python file; relative to the experiment's own.
    """
    with drawing_from(seed_for(seed, "problem")):
        make = getattr(module_from(file), "problem", None)
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
    "head": head,
    "python": python,
    "given": given,
}
