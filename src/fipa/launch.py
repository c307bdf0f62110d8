"""What `fipa run` and `fipa.run` share: which experiment, into which directory, and the report in the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fipa.config.load import for_given_problem, load
from fipa.config.schema import Experiment, dump, resolved
from fipa.errors import FipaError, instead_of
from fipa.federation.executor import ProblemFactory
from fipa.runner import Run, fresh_directory, remove

Arms = Sequence[str] | Mapping[str, Mapping[str, Any]]


def choose(
    name: str | None,
    *,
    overrides: Sequence[str] = (),
    arms: Arms | None = None,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    workers: int | None = None,
) -> tuple[str, Experiment]:
    """Label and content of an experiment by name or path; None for a problem that is given.

    `arms` are the names of some of its arms, or others in their place.
    """
    changes = list(overrides)
    if rounds is not None:
        changes += [f"rounds={rounds}", f"arms.*.rounds={rounds}"]
    if seeds is not None:
        changes.append(f"seeds={list(seeds)}")
    if workers is not None:
        changes.append(f"engine.workers={workers}")
    new = arms if isinstance(arms, Mapping) else None
    label, experiment = ("problem", for_given_problem(changes, new)) if name is None else load(name, changes, new)
    if not arms or new is not None:
        return label, experiment
    known = [arm.name for arm in experiment.arms]
    unknown = [arm for arm in arms if arm not in known]
    if unknown:
        raise FipaError(f"there is no arm {unknown[0]!r}: {instead_of(unknown[0], known)}")
    left: dict[str, Any] = {"arms": tuple(arm for arm in experiment.arms if arm.name in arms)}
    left |= {key: None for key in ("control", "reference") if getattr(experiment, key) not in arms}
    return label, experiment.model_copy(update=left)


def complete(label: str, experiment: Experiment) -> dict[str, Any]:
    """All settings of an experiment as plain data that is input again, also those that its problem decides."""
    if experiment.problem.name not in ("images", "head"):  # these need no data to be shown
        experiment = Run.new(Path(), label, "", experiment).experiment
    return dump(resolved(experiment, least_squares=False))


def begin(
    label: str,
    experiment: Experiment,
    command: str,
    *,
    directory: Path | None = None,
    force: bool = False,
    warmup: Path | None = None,
    given: ProblemFactory | None = None,
) -> Run:
    """A run that is ready to be executed, in a fresh directory under runs/ by default."""
    directory = directory or fresh_directory(Path("runs"), label)
    job = Run.new(directory, label, command, experiment, given)
    if warmup is not None:
        job.adoptable(warmup)
    if (directory / "run.json").exists():
        if not force:
            raise FipaError(f"{directory} already holds a run: `fipa resume {directory}`, another --out, or --force")
        remove(directory)
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FipaError(f"{directory} exists and is not a run of ours: choose another --out")
    job.start()
    if warmup is not None:
        job.adopt(warmup)
    return job


def refresh(directory: Path) -> None:
    """Write the results of a run again: one that was killed has not written them."""
    if (directory / "run.json").exists():
        job = Run.open(directory)
        if job.experiment.problem.name != "given":  # that cannot be made again
            job.write_results()


def write_report(directory: Path) -> Path:
    """Figures, and the page, whose path is returned."""
    from fipa.report.figures import write_figures  # with matplotlib, which `fipa.run` does without
    from fipa.report.page import write_page

    write_figures(directory, directory / "figures")
    return write_page([directory], directory / "report.html")


@contextmanager
def data_in(root: Path | None) -> Iterator[None]:
    """Look for image sets there; also in worker processes, which inherit the environment."""
    before = os.environ.get("FIPA_DATA")
    if root is not None:
        os.environ["FIPA_DATA"] = str(root.resolve())
    try:
        yield
    finally:
        if root is not None:
            del os.environ["FIPA_DATA"]
            if before is not None:
                os.environ["FIPA_DATA"] = before
