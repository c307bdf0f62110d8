"""Experiments that take milliseconds, and ways to run them: in this process, or as the command that users type."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer.main

from fipa.cli import entry
from fipa.config.load import load

FIT = ["problem.samples=20", "problem.hidden=[4]"]
DIGITS = [
    *("problem.dataset=digits", "problem.clients=6", "problem.samples=10", "problem.test_samples=20"),
    "seeds=[0]",
]
PDE = ["problem.points={interior=10, boundary=3, test=20}", "problem.hidden=[4]"]

PROBLEM = """\
[problem]
name = "sine"
samples = 20
hidden = [4]
grid = 16

[engine]
group = 1  # several clients at once are traced first, which takes longer than all rounds of these
"""

ONE_ARM = f"""\
rounds = 2
{PROBLEM}
[[arms]]
name = "A"
rule = {{ name = "fedavg" }}
local = {{ name = "sgd", lr = 0.1, steps = 2 }}
"""

TWO_ARMS = f"""\
{ONE_ARM}
[[arms]]
name = "B"
rule = {{ name = "fipa" }}
local = {{ name = "gauss-newton" }}
"""

IMAGES = """\
rounds = 2
seeds = [0, 1]

[problem]
name = "images"
dataset = "digits"
model = { channels = [4, 8], hidden = 8 }
clients = 4
samples = 40
partition = { name = "iid" }
test_samples = 40
augment = { crop = 1, flip = false }

[engine]
group = 1

[defaults]
local = { name = "sgd", lr = 0.2, epochs = 2, batch = 8 }
participation = { kind = "uniform", count = 2 }

[warmup]
rounds = 3
rule = { name = "fedavg" }

[[arms]]
name = "A"
rule = { name = "fedavg" }

[[arms]]
name = "B"
rule = { name = "fipa", damping = 0.1 }
sketch = { rank = 4 }
params = "9.*"

[[arms]]
name = "C"
rule = { name = "fedavg" }
start = 1
"""

OWN_PROBLEM = """\
import torch

import fipa


def misfit(model, x, y):
    return model(x)[:, 0] - y


def problem(seed):
    generator = torch.Generator().manual_seed(seed)
    model = fipa.models.mlp([1, 4, 1], generator=generator)
    x = torch.rand(2, 10, 1, generator=generator, dtype=torch.float64)
    clients = [fipa.Residual(misfit, part, part[:, 0] ** 2) for part in x]
    return fipa.Problem(model, clients, lambda model: misfit(model, x[0], x[0, :, 0] ** 2).square().mean())
"""


@dataclass(frozen=True)
class Done:
    """What came of a command."""

    code: int
    out: str
    err: str


_command = cache(typer.main.get_command)  # made of the functions, which takes as long as many a command


def fipa(*arguments: object, report: bool = False) -> Done:
    """The command, in this process, whose way with Ctrl-C stays what it was; figures and page only where asked for."""
    out, err = io.StringIO(), io.StringIO()
    bare = ["--no-report"] if arguments[0] in ("run", "resume") and not report else []
    argv, handler = ["fipa", *map(str, arguments), *bare], signal.getsignal(signal.SIGINT)
    try:
        with (
            mock.patch.object(sys, "argv", argv),
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch.object(typer.main, "get_command", _command),
            pytest.raises(SystemExit) as stop,
        ):
            entry()
    finally:
        signal.signal(signal.SIGINT, handler)
    return Done(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def small(name: str) -> list[str]:
    """Settings that make a shipped experiment tiny, and let it do without data."""
    experiment = load(name)[1]
    if experiment.problem.name == "head":
        return DIGITS
    if experiment.problem.name == "teacher":
        return FIT[:1]
    if experiment.problem.name != "images":
        return PDE if hasattr(experiment.problem, "points") else FIT
    head = any(arm.params for arm in experiment.arms)
    starts = [f"arms.{i}.start=1" for i, arm in enumerate(experiment.arms) if arm.start]
    starts += [f"arms.{i}.participation.count=5" for i, a in enumerate(experiment.arms) if a.participation.count]
    starts += ["warmup.rounds=2"] if experiment.warmup is not None else []
    model = "{widths=[2, 4], blocks=1}" if head else "{channels=[2, 4], hidden=4}"
    return [*DIGITS, f"problem.model={model}", *starts]


def options(settings: Sequence[str]) -> list[str]:
    """For the command line."""
    return [part for setting in settings for part in ("--set", setting)]


def write(directory: Path, text: str, name: str = "e.toml") -> Path:
    path = directory / name
    path.write_text(text, "utf-8")
    return path


def results(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "results.json").read_text("utf-8"))


def numbers(directory: Path) -> dict[str, Any]:
    """All of a run's results that must not depend on when, where and how it was run."""
    content = results(directory)
    for key in ("command", "machine", "config"):
        del content[key]
    warmup = [content["warmup"]["seeds"]] if "warmup" in content else []
    for seeds in (*warmup, *content["arms"].values()):
        for curves in seeds.values():
            del curves["seconds"], curves["peak_memory_mib"]
    return content


# --- real processes ---


@contextmanager
def process(*arguments: object, before: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, of which nothing is left in the end; `before` is code to run first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(
        [sys.executable, "-c", f"{before}\nfrom fipa.cli import entry; entry()", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True, **options,
    )  # fmt: skip
    try:
        yield running
    finally:
        if group(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def group(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry_ in Path("/proc").iterdir():
        if entry_.name.isdigit():
            try:
                state, _, pgrp = (entry_ / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it has just ended
                continue
            if int(pgrp) == leader and state != "Z":
                found.append(int(entry_.name))
    return found


def rounds_on_disk(directory: Path) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in directory.glob("arms/*/*/history.jsonl"))


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)  # conditions look through all processes, or all files of a run


def wait_for_rounds(running: subprocess.Popen[str], directory: Path, rounds: int) -> None:
    """Until a run has come that far."""
    wait_until(lambda: rounds_on_disk(directory) >= rounds or running.poll() is not None)
    assert running.poll() is None, running.communicate()
