"""A whole experiment: every arm on every seed, into a directory, and on from where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from fipa.config.load import validate
from fipa.config.schema import Experiment, dump, resolved
from fipa.errors import Diverged, FipaError
from fipa.federation.arm import Arm
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor, ProblemFactory, Scope
from fipa.federation.parameters import save_theta
from fipa.federation.problem import Problem
from fipa.federation.record import RoundRecord, event
from fipa.federation.storage import RunFolder, write_json
from fipa.folders import ERROR, LOCK, arm_folder, warmup_folder
from fipa.layout import parameters_of
from fipa.report.files import FORMAT
from fipa.results_files import metric_of, write_results, write_views

PATIENCE = 0.5  # seconds to wait for the lock: those who only look whether it is held take it for a moment


class Watcher(Protocol):
    """Is told how a run proceeds."""

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None:
        """An arm starts on a seed, or resumes after `done` rounds of `total`; `after` of them are its warm-up's."""

    def round(self, arm: str, seed: int, record: RoundRecord) -> None:
        """A round is over and safe on disk."""

    def end(self, arm: str, seed: int, status: str) -> None:
        """The arm is done with this seed."""


@dataclass(frozen=True)
class Run:
    """An experiment in its directory.

    given
        Makes the problem of a seed where that is not for the settings to say.
    metric
        What the problem's metric is called, and which way it should go: for those who watch.
    """

    directory: Path
    name: str
    command: str
    experiment: Experiment
    given: ProblemFactory | None = None
    metric: Mapping[str, str] | None = None

    @classmethod
    def new(
        cls, directory: Path, name: str, command: str, experiment: Experiment, given: ProblemFactory | None = None
    ) -> Run:
        """A run that is yet to start; a problem that cannot be built is found here, before anything is written."""
        problem = experiment.factory(given)(experiment.seeds[0])
        counts = [client.num_examples for client in problem.clients]
        for arm in (*experiment.arms, *([experiment.warmup] if experiment.warmup is not None else [])):
            arm.participation.select(counts[:1] if arm.centralised else counts, 0, 1)
            parameters_of(problem.model, arm.params)
        found = resolved(experiment, problem.least_squares)
        return cls(directory, name, command, found, given, metric_of(problem))

    def factory(self) -> ProblemFactory:
        """Makes the problem of a seed."""
        return self.experiment.factory(self.given)

    def start(self) -> None:
        """Write down what is to be run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT, "name": self.name, "command": self.command, "config": dump(self.experiment),
            "metric": self.metric, "sources": self._sources(),
        }  # fmt: skip
        write_json(self.directory / "run.json", content)

    @classmethod
    def open(cls, directory: Path) -> Run:
        """What `start` wrote."""
        path = directory / "run.json"
        if not path.is_file():
            raise FipaError(f"{directory} holds no run: there is no run.json in it")
        try:
            content = json.loads(path.read_text("utf-8"))
            found = content["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise FipaError(f"{path} is not a run of ours: it names no format") from error
        if found != FORMAT:
            raise FipaError(f"{path} has format {found!r}, this version reads {FORMAT!r}")
        for file, digest in content.get("sources", {}).items():
            if _digest(file) != digest:
                raise FipaError(f"{file} has changed since this run began: put it back, or start a new run")
        return cls(directory, content["name"], content["command"], validate(content["config"], str(path)))

    def _sources(self) -> dict[str, str]:
        """What the run depends on besides its settings: the user's own files, by their digest."""
        named = [getattr(self.experiment.problem, key, None) for key in ("file", "backbone")]
        digests = {file: _digest(file) for file in (*self.experiment.files, *named) if file is not None}
        return {file: digest for file, digest in digests.items() if digest is not None}

    def folder(self, arm: str, seed: int) -> RunFolder:
        """Where an arm's rounds on a seed are kept."""
        warmup = self.experiment.warmup
        if warmup is not None and arm == warmup.name:
            return RunFolder(warmup_folder(self.directory, seed))
        place = [a.name for a in self.experiment.arms].index(arm)
        path = arm_folder(self.directory, place, arm, seed)
        start = self.experiment.arms[place].start
        after = start if start is not None else warmup.rounds if warmup is not None else 0
        return RunFolder(path, self.experiment.reference is not None, after)

    def adopt(self, other: Path) -> None:
        """Take the warm-up from another run of the same problem, instead of running it again."""
        for source, target in self.adoptable(other):
            shutil.copytree(source, target)

    def adoptable(self, other: Path) -> list[tuple[Path, Path]]:
        """The folders that `adopt` copies, from where to where; an error if that warm-up is not this run's."""
        theirs, warmup, ours = Run.open(other), self.experiment.warmup, self.experiment
        if warmup is None:
            raise FipaError(f"{self.name} has no warm-up that could be taken from {other}")
        if other.resolve() == self.directory.resolve():
            raise FipaError(f"{other} is the run itself: use `fipa resume {other}`, or choose another --out")
        wanted, offered = dump(ours), dump(theirs.experiment)
        for key in ("problem", "warmup"):
            if wanted[key] != offered.get(key):
                raise FipaError(f"{other} has another [{key}] than this run: its warm-up would not be the same")
        if any(
            getattr(ours.engine, key) != getattr(theirs.experiment.engine, key) for key in ("threads", "group", "trace")
        ):
            raise FipaError(f"{other} has another [engine] than this run: its warm-up would not be the same")
        folders = []
        for seed in ours.seeds:
            source, target = (run.folder(warmup.name, seed) for run in (theirs, self))
            if not source.path.is_dir():
                raise FipaError(f"{other} has no warm-up of seed {seed}: choose others with --seeds")
            for k in self.starts():
                if not source.start(k).is_file():
                    raise FipaError(
                        f"{source.path} has no parameters after round {k}: it has not come so far, or none of its arms "
                        "starts there"
                    )
            folders.append((source.path, target.path))
        return folders

    def starts(self) -> set[int]:
        """The rounds of the warm-up that arms start from."""
        arms = self.experiment.build(True) if self.experiment.warmup is not None else []
        return {arm.after for arm in arms if arm.after}

    def execute(self, watcher: Watcher) -> dict[str, Any]:
        """Run what is left to run; write and return the results."""
        engine = self.experiment.engine
        making = Executor(self.factory(), engine.workers, engine.threads)
        with self._lock(), self._reason(), making as executor:
            problem = executor.site(Scope(self.experiment.seeds[0])).problem
            try:
                for arm, seed in self._pairs(problem):
                    self._execute(arm, seed, executor, watcher)
            finally:
                results = self.write_results(problem)
            write_views(self, executor.site(Scope(self.experiment.seeds[0])).problem)
        return results

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Two processes in one directory would spoil it. The system drops the lock of a process that dies."""
        lock = FileLock(self.directory / LOCK, timeout=PATIENCE)
        try:
            lock.acquire()
        except Timeout as error:
            raise FipaError(f"{self.directory} is being run by another process") from error
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _reason(self) -> Iterator[None]:
        """Leave the reason on disk if the run breaks: those who watch cannot see the terminal."""
        path = self.directory / ERROR
        path.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            name = "" if isinstance(error, FipaError) else f"{type(error).__name__}: "
            with suppress(OSError):
                path.write_text(f"{name}{error}\n", "utf-8")
            raise

    def _pairs(self, problem: Problem) -> Iterator[tuple[Arm, int]]:
        arms, seeds = self.experiment.build(problem.least_squares), self.experiment.seeds
        warmup = self.experiment.build_warmup(problem.least_squares)
        if warmup is None or not self.starts():
            yield from ((arm, seed) for arm in arms for seed in seeds)
            return
        for seed in seeds:
            yield warmup, seed
            folder = self.folder(warmup.name, seed)
            for arm in arms:
                yield replace(arm, start=str(folder.start(arm.after)) if arm.after else None), seed

    def _execute(self, arm: Arm, seed: int, executor: Executor, watcher: Watcher) -> None:
        folder = self.folder(arm.name, seed)
        federation = Federation(arm, seed, executor)
        warmup = self.experiment.warmup
        starts = self.starts() if warmup is not None and arm.name == warmup.name else set()
        end = max(starts, default=arm.last)  # a warm-up goes as far as arms start from it
        start, status = federation.start(), "running"
        saved = folder.load(repair=True)
        if saved is not None:
            start, status = saved.state, saved.status
        watcher.begin(arm.name, seed, start.round_number, end, arm.after)
        last, initial = start, federation.site.problem.evaluate(federation.site.initial)
        try:
            for state, record in federation.rounds(start, end) if status == "running" else ():
                k = state.round_number
                if record.metric is not None and not math.isfinite(record.metric):
                    raise Diverged(f"round {k}: the {federation.site.problem.name} is {record.metric}")
                if k < end and not _worth_a_spectrum(k - arm.after):
                    record = replace(record, spectra={})
                status = "finished" if k == end else "running"
                if k in starts:
                    folder.path.mkdir(parents=True, exist_ok=True)
                    save_theta(folder.start(k), state.theta, state.seen)
                folder.save(state, record, status, initial)
                watcher.round(arm.name, seed, record)
                last = state
        except Diverged as error:
            status = "diverged"
            folder.save(replace(last, round_number=last.round_number + 1), _divergence(last, error), status, initial)
        watcher.end(arm.name, seed, status)
        if starts and status == "diverged":
            raise FipaError(f"the warm-up diverged on seed {seed}, see {folder.history}: choose a smaller lr for it")

    def write_results(self, problem: Problem | None = None) -> dict[str, Any]:
        """Put all that is on disk into results.json."""
        return write_results(self, problem or self.factory()(self.experiment.seeds[0]))


def _digest(file: str) -> str | None:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).is_file() else None


def _divergence(last: State, error: Diverged) -> RoundRecord:
    """The round that failed: without a metric, and with the reason. The last finite model stands."""
    k = last.round_number + 1
    return RoundRecord(k, trials=1, events=(event(k, None, f"diverged: {error}"),))


def _worth_a_spectrum(round_number: int) -> bool:
    """Rounds 1, 2, 5, 10, 20, 50, ...: enough to see how spectra change."""
    return str(round_number).rstrip("0") in ("1", "2", "5")


def remove(directory: Path) -> None:
    """Delete what a run writes, and nothing that others have put beside it."""
    try:
        ours = str(json.loads((directory / "run.json").read_text("utf-8"))["format"]).startswith("fipa-results")
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise FipaError(f"{directory / 'run.json'} is not a run of ours: choose another --out")
    for name in ("arms", "figures", "tensorboard", "warmup"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("run.json", "results.json", "views.json", "summary.csv", "report.html", ERROR, LOCK):
        (directory / name).unlink(missing_ok=True)


def fresh_directory(parent: Path, name: str) -> Path:
    """`parent/name`, or with a number where that is taken."""
    candidates: Sequence[Path] = [parent / name, *(parent / f"{name}-{i}" for i in range(2, 10_000))]
    return next(path for path in candidates if not path.exists())
