"""`fipa.run`: an experiment from Python."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fipa.errors import FipaError, missing
from fipa.federation.problem import Problem
from fipa.results import Results


def run(
    experiment: str | Path | Problem | Callable[[int], Problem],
    *,
    arms: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    rounds: int | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    out: str | Path | None = None,
    force: bool = False,
    workers: int | None = None,
    data: str | Path | None = None,
    warmup: str | Path | None = None,
    quiet: bool = False,
) -> Results:
    """Run every arm on every seed, as the command `fipa run` does, and return what was measured.

    Parameters
    ----------
    experiment
        The name of a shipped experiment, the path of a .toml or .py file, a problem, or a function that makes the
        problem of a seed. A problem itself is the same on every seed, but for what clients draw.
    arms
        Names of the arms to run. Or other arms in their place, by name: each says what an arm of a TOML file may say,
        and rules may be objects, as in `{"mine": {"rule": fipa.FIPA(), "local": {"name": "gauss-newton"}}}`.
    seeds, rounds
        Instead of the experiment's.
    set
        Other settings: `{"problem.samples": 100, "arms.*.average": 5}`, or as the command line has them.
    out, force
        The directory to write to; a new one under `runs/` by default, as with the command. `force` replaces a run.
    workers
        Processes. With more than one, a problem and all that it holds must be picklable.
    data
        The folder with the image sets.
    warmup
        A run from which to take the warm-up.
    quiet
        Print no progress.

    Notes
    -----
    An arm that diverges is no error: see `Results.status`. A run that was stopped resumes with `fipa resume DIR`,
    unless its problem was made in Python.
    """
    given, name = _factory(experiment), None
    if given is None:
        name = str(experiment)
    try:
        from rich.console import Console

        from fipa import launch
        from fipa.progress import Log, Progress, Watchers
    except ImportError as error:
        if (remedy := missing(error, "cli")) is None:
            raise
        raise FipaError(f"fipa.run {remedy}") from error
    changes = [f"{key}={_toml(value)}" for key, value in set.items()] if isinstance(set, Mapping) else list(set)
    chosen = None if seeds is None else [seeds] if isinstance(seeds, int) else list(seeds)
    label, content = launch.choose(
        name, overrides=changes, arms=arms, seeds=chosen, rounds=rounds, workers=workers
    )  # fmt: skip
    with launch.data_in(None if data is None else Path(data)):
        job = launch.begin(
            label, content, f"fipa.run({label!r})" if given is None else "fipa.run(a problem made in Python)",
            directory=None if out is None else Path(out), force=force,
            warmup=None if warmup is None else Path(warmup), given=given,
        )  # fmt: skip
        console = Console()
        watching = [] if quiet else [Progress(console, job.experiment) if console.is_terminal else Log(console)]
        with Watchers(watching) as watchers:
            job.execute(watchers)
    return Results.load(job.directory)


def _factory(experiment: Any) -> Callable[[int], Problem] | None:
    """What makes the problem of a seed; None if the experiment is called by its name."""
    if isinstance(experiment, str | Path):
        return None
    if isinstance(experiment, Problem):
        return partial(_copied, experiment)
    if callable(experiment):
        return partial(_made, experiment)
    raise FipaError(f"fipa.run takes a name, a path, a fipa.Problem or a function of the seed, not {experiment!r}")


def _copied(problem: Problem, seed: int) -> Problem:
    """With a model of its own, so that the caller's stays as it is."""
    fresh = copy.copy(problem)
    fresh.model = copy.deepcopy(problem.model)
    return fresh


def _made(make: Callable[[int], Problem], seed: int) -> Problem:
    made = make(seed)
    if not isinstance(made, Problem):
        raise FipaError(f"{make} must return a fipa.Problem for a seed, got {type(made).__name__}")
    return made


def _toml(value: Any) -> str:
    """A value as --set takes it.

    Examples
    --------
    >>> _toml({"rank": 5, "solver": "krylov", "edges": [0.0, True]})
    '{rank = 5, solver = "krylov", edges = [0.0, true]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
