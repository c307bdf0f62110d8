"""What an experiment may say, and how it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from fipa.aggregation.registry import RULES
from fipa.aggregation.rule import needs_of
from fipa.config.kinds import ProblemSpec, Strict, settings_of
from fipa.config.lines import Path
from fipa.config.sketch import keys_of
from fipa.config.stages import ArmSpec, WarmupSpec, resolved_arm
from fipa.errors import instead_of
from fipa.federation.arm import GROUP, Arm
from fipa.federation.problem import Problem
from fipa.problems.files import registered
from fipa.problems.registry import PROBLEMS
from fipa.spill import MEMORY_LIMIT


class EngineSpec(Strict):
    """How to compute: speed, and the last bits by `threads`, `group`, `trace` and `memory_limit`.

    Attributes
    ----------
    workers
        Number of processes that share the clients.
    threads
        Threads of each process.
    group
        Most clients that are trained side by side.
    trace
        Also trace the gradient of a client that is trained alone, for fitting and equations with 50 local steps or
        more: faster, if model and residuals depend on nothing that changes but parameters and data.
    memory_limit
        Bytes of a round's updates that the server holds in memory; those beyond are in temporary files.
    """

    workers: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] = 1
    group: Annotated[int, Field(ge=1)] = GROUP
    trace: bool = False
    memory_limit: Annotated[int, Field(ge=0)] = MEMORY_LIMIT


class Experiment(Strict):
    """A whole experiment.

    Attributes
    ----------
    title
        Heading of the report.
    description
        Text below the heading.
    rounds
        Rounds of every arm that does not say otherwise.
    seeds
        Seeds to run; each is a whole federation of its own.
    control
        The arm that others are compared with, seed by seed.
    reference
        The arm whose parameters others are compared with, round by round.
    figure
        Layout of the figures.
    files
        Python files that are run first: they register rules of your own, which the experiment then names.
    problem
        What is to be solved: a table with its `name` and settings.
    engine
        How to compute: processes, threads, clients side by side.
    warmup
        An arm that is run once per seed, and whose last model is where all others start.
    arms
        Ways to solve the problem, which are compared.
    """

    title: str = ""
    description: str = ""
    rounds: Annotated[int, Field(ge=1)] = 30
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    control: str | None = None
    reference: str | None = None
    figure: Literal["fit1d", "adaptive", "gauss-newton", "fit2d", "pde1d", "pde2d", "refine", "ablation", "generic"] = (
        "generic"
    )
    files: tuple[str, ...] = ()
    problem: ProblemSpec
    engine: EngineSpec = EngineSpec()
    warmup: WarmupSpec | None = None
    arms: tuple[ArmSpec, ...]

    def mistakes(self) -> Iterator[tuple[Path, str]]:
        """What only shows when everything is known: key and reason."""
        if not self.arms:
            yield ("arms",), "needs at least one arm"
        if not self.seeds:
            yield ("seeds",), "needs at least one seed"
        if len(set(self.seeds)) < len(self.seeds):
            yield ("seeds",), "a seed occurs twice"
        names = [arm.name for arm in self.arms]
        for i, name in enumerate(names):
            if name in names[:i]:
                yield ("arms", i, "name"), f"two arms are called {name!r}"
        for i, arm in enumerate(self.arms):
            if arm.start and self.warmup is None:
                yield ("arms", i, "start"), "there is no [warmup] to start from"
            elif arm.start and self.warmup and arm.start > self.warmup.rounds:
                yield ("arms", i, "start"), f"the warm-up has only {self.warmup.rounds} rounds"
        for key in ("start", "params"):
            if self.warmup is not None and getattr(self.warmup, key) is not None:
                yield ("warmup", key), f"{key} is for arms, not for the warm-up"
        if self.warmup is not None and self.warmup.name in names:
            yield ("warmup", "name"), f"an arm is called {self.warmup.name!r}, too"
        for key in ("control", "reference"):
            name = getattr(self, key)
            if name is not None and name not in names:
                yield (key,), f"there is no arm {name!r}: {instead_of(name, names)}"

    def factory(self, given: Callable[[int], Problem] | None = None) -> Callable[[int], Problem]:
        """Makes the problem of a seed, or leaves that to what is given; can be sent to other processes."""
        make = given or partial(PROBLEMS[self.problem.name], **settings_of(self.problem))
        own = (*self.files, *((self.problem.file,) if self.problem.name == "python" else ()))
        return partial(_made, own, make) if own else make

    def build(self, least_squares: bool) -> list[Arm]:
        """The arms as the engine takes them; those that do not say otherwise start where the warm-up ends."""
        end = self.warmup.rounds if self.warmup is not None else 0
        built = [arm.build(self.rounds, self.engine.group, least_squares) for arm in self.arms]
        built = [dataclasses.replace(arm, **self._engine) for arm in built]
        return [
            dataclasses.replace(arm, after=end) if spec.start is None else arm
            for arm, spec in zip(built, self.arms, strict=True)
        ]

    def build_warmup(self, least_squares: bool) -> Arm | None:
        """The warm-up as an arm."""
        if self.warmup is None:
            return None
        arm = self.warmup.build(0, self.engine.group, least_squares)
        return dataclasses.replace(arm, remembers=True, **self._engine)

    @property
    def _engine(self) -> dict[str, Any]:
        return {"memory_limit": self.engine.memory_limit, "trace": self.engine.trace}


def _made(files: tuple[str, ...], make: Callable[[int], Problem], seed: int) -> Problem:
    """The problem of a seed, where the user's own files have run before."""
    for file in files:
        registered(file)
    return make(seed)


def resolved(experiment: Experiment, least_squares: bool) -> Experiment:
    """The same experiment with every default said, also the one that depends on the problem."""
    arms = tuple(resolved_arm(arm, experiment.rounds, least_squares) for arm in experiment.arms)
    change: dict[str, Any] = {"arms": arms}
    if experiment.warmup is not None:
        change["warmup"] = resolved_arm(experiment.warmup, experiment.rounds, least_squares)
    return experiment.model_copy(update=change)


def dump(experiment: Experiment) -> dict[str, Any]:
    """As plain data, with defaults: valid input again."""
    content = _plain(experiment.model_dump(mode="json", exclude_none=True))
    for arm, table in zip(experiment.arms, content["arms"], strict=True):
        rule: Any = arm.rule
        if not arm.stages and "sketch" in table:  # what the rule does not use may have come with [defaults]
            takes = keys_of(needs_of(RULES[(arm.inner or rule).name]))
            used = {key: value for key, value in table.pop("sketch").items() if key in takes}
            table |= {"sketch": used} if used else {}
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
