"""What is seen of a run while it runs: a live bar, plain lines, or TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from typing_extensions import Self

from fipa.config.schema import Experiment
from fipa.errors import FipaError
from fipa.federation.record import NUMBERS, RoundRecord
from fipa.runner import Watcher


class Watchers(ExitStack):
    """Several watchers as one; those that are contexts are entered now and left with it."""

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        super().__init__()
        self._watchers = watchers
        for watcher in watchers:
            if isinstance(watcher, AbstractContextManager):
                self.enter_context(watcher)

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None:  # noqa: D102
        for watcher in self._watchers:
            watcher.begin(arm, seed, done, total, after)

    def round(self, arm: str, seed: int, record: RoundRecord) -> None:  # noqa: D102
        for watcher in self._watchers:
            watcher.round(arm, seed, record)

    def end(self, arm: str, seed: int, status: str) -> None:  # noqa: D102
        for watcher in self._watchers:
            watcher.end(arm, seed, status)


class Progress:
    """One bar per arm: round, metric and the time left, over all of the arm's seeds."""

    def __init__(self, console: Console, experiment: Experiment) -> None:
        first = [experiment.warmup] if experiment.warmup is not None else []
        width = max(len(arm.name) for arm in (*first, *experiment.arms))
        self._seeds = len(experiment.seeds)
        self._tasks: dict[str, TaskID] = {}
        self._clock: dict[str, tuple[float, int]] = {}
        self._bars = Bars(
            TextColumn(f"{{task.description:<{width}}}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[round]:>11}  {task.fields[metric]:>8}  {task.fields[left]}"),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None:  # noqa: D102
        if arm not in self._tasks:
            rounds = (total - after) * self._seeds
            self._tasks[arm] = self._bars.add_task(arm, total=rounds, round="", metric="", left="")
            self._clock[arm] = (time.monotonic(), 0)
        self._total, self._done = total, done
        self._bars.advance(self._tasks[arm], done - after)

    def round(self, arm: str, seed: int, record: RoundRecord) -> None:  # noqa: D102
        start, count = self._clock[arm]
        self._clock[arm] = (start, count + 1)
        self._done = record.round
        task = self._bars.tasks[self._tasks[arm]]
        pace = (time.monotonic() - start) / (count + 1)
        left = pace * max(0.0, (task.total or 0) - task.completed - 1)
        self._bars.update(
            self._tasks[arm],
            advance=1,
            round=f"{record.round}/{self._total}",
            metric=task.fields["metric"] if record.metric is None else _short(record.metric),
            left=f"{int(left) // 60}:{int(left) % 60:02d} left",
        )

    def end(self, arm: str, seed: int, status: str) -> None:  # noqa: D102
        if status == "diverged":
            self._bars.update(self._tasks[arm], advance=self._total - self._done, metric="diverged")


class Log:
    """A line at the start and at the end of each arm and seed: for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: RoundRecord | None = None

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None:  # noqa: D102
        self._last = None
        if done > after:
            text = f"{arm}, seed {seed}: resumes after round {done} of {total}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def round(self, arm: str, seed: int, record: RoundRecord) -> None:  # noqa: D102
        self._last = record

    def end(self, arm: str, seed: int, status: str) -> None:  # noqa: D102
        text = f"{arm}, seed {seed}: {status}"
        if self._last is not None:
            metric = self._last.metric
            text += f" at round {self._last.round}" + ("" if metric is None else f", metric {_short(metric)}")
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _short(metric: float) -> str:
    """Errors by their power of ten, percentages as they are read."""
    return f"{metric:.2f}" if 1 <= metric < 1000 else f"{metric:.3e}"


class TensorBoard:
    """Scalars per arm and seed, for `tensorboard --logdir`."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise FipaError("--tensorboard needs tensorboard: pip install 'fipa[tensorboard]'") from None
        self._make = SummaryWriter
        self._directory = directory
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # also on Ctrl-C, in the middle of an arm
        if self._writer is not None:
            self._writer.close()

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None:  # noqa: D102
        self._writer = self._make(str(self._directory / f"{arm}, seed {seed}"), purge_step=done + 1)

    def round(self, arm: str, seed: int, record: RoundRecord) -> None:  # noqa: D102
        for key in NUMBERS:
            if (value := getattr(record, key)) is not None:
                self._writer.add_scalar(key, value, record.round)

    def end(self, arm: str, seed: int, status: str) -> None:  # noqa: D102
        self._writer.close()
