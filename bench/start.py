"""What it takes to start: commands that compute nothing, and imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from bench.common import Record

COMMANDS = (["--help"], ["list"], ["show", "demo"])
IMPORTS = {
    "import fipa": "import fipa",
    "what the README's loop uses": "from fipa import ClientUpdate, CompletedFIPA, aggregate, parameters_of, sketch",
    "all public names": "from fipa import *",
}
CLOCK = "import time; start = time.process_time(); {first}; middle = time.process_time(); {then}; "
CLOCK += "print(middle - start, time.process_time() - middle)"


def start() -> Iterator[Record]:
    """Seconds of CPU: unlike wall time, they say little about what else runs here."""
    for command in COMMANDS:
        seconds = _median([_command(command) for _ in range(6)])
        yield Record(f"start: fipa {' '.join(command)}", seconds, 0.5, "s of CPU", {}, at_most=True)
    for what, code in IMPORTS.items():
        pairs = [_import("import torch", code) for _ in range(6)]
        torch, ours = (_median([pair[i] for pair in pairs]) for i in (0, 1))
        floor = 0.1 if what == "import fipa" else None
        yield Record(f"start: {what} after import torch", ours, floor, "s of CPU", {"torch_seconds": torch}, True)


def _median(seconds: list[float]) -> float:
    """Without the first, which leaves bytecode behind for the others."""
    return sorted(seconds[1:])[len(seconds[1:]) // 2]


def _command(arguments: list[str]) -> float:
    before = os.times()
    _python("-m", "fipa", *arguments)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _import(first: str, then: str) -> list[float]:
    """Both in one process: the difference between two of them would be lost in what torch's import varies by."""
    return [float(number) for number in _python("-c", CLOCK.format(first=first, then=then)).split()]


def _python(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
