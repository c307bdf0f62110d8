"""Processes of other programs: started, watched, and killed with all that they have started in turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fipa.errors import FipaError

PROGRAMS = Path(sys.executable).parent  # not resolved: the python of a virtual environment is a link
MARK = "FIPA_DEPLOYMENT"  # in the environment of every process that is started here, and so of all that they start
PATIENCE = 120.0  # seconds for what takes two or three on an idle machine


class Processes:
    """Processes with a name each, their logs in a folder; all that they start in turn is found again by a mark.

    Process groups alone would not do: Flower starts some of its helpers in sessions of their own.

    Parameters
    ----------
    folder
        The folder to run in; its path is also the mark.
    logs
        The folder for the logs.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        self.logs = logs
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        local = ",".join(filter(None, [os.environ.get("NO_PROXY"), "localhost", "127.0.0.1"]))
        self._environment = os.environ | {
            "PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)]),
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": local,
            "no_proxy": local,
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",  # seconds; by default every message waits for up to one
        }

    def start(self, name: str, *command: str) -> None:
        """Start a process that writes its log to NAME.log, after what is there."""
        self.check_idle(name)
        with (self.logs / f"{name}.log").open("ab") as log:
            self._started[name] = subprocess.Popen(command, stdout=log, stderr=log, **self._how(name))

    def check_idle(self, name: str) -> None:
        """An error if a process of this name runs."""
        if name in self._started and self._started[name].poll() is None:
            raise FipaError(f"{name} is running already: kill it first")

    def output(self, name: str, command: Sequence[str], timeout: float) -> str:
        """Run a command to its end, and return what it prints; an error if it fails, or lasts too long."""
        try:
            done = subprocess.run(command, capture_output=True, timeout=timeout, **self._how("command"))
            out, err, trouble = done.stdout, done.stderr, done.returncode and f"failed with code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            out, err, trouble = late.stdout or b"", late.stderr or b"", f"did not end within {timeout:g} s"
        if trouble:
            raise FipaError(f"{name} {trouble}; its last lines:\n{end_of((out + err).decode(errors='replace'))}")
        return out.decode(errors="replace")

    def log(self, name: str) -> str:
        """What a process has logged so far."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def until(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a process is ready; an error with the end of its log if it ends instead, or takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            code = self._started[name].poll()
            if code is not None or time.monotonic() > deadline:
                what = f"is not ready after {PATIENCE:g} s" if code is None else f"has ended with code {code}"
                raise FipaError(f"{name} {what}; the end of its log:\n{end_of(self.log(name))}")
            time.sleep(0.05)

    def exit_code(self, name: str, timeout: float) -> int | None:
        """What a process has ended with; None if it still runs after `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._started[name].wait(timeout)
        return None

    def kill(self, name: str = "") -> None:
        """Kill the process of this name, or all, and whatever they have started; return when none is left."""
        groups = [process for key, process in self._started.items() if name in ("", key)]
        deadline = time.monotonic() + PATIENCE
        while True:
            running = [process.pid for process in groups if process.poll() is None]
            marked = _marked(f"{MARK}={self.folder}/{name}", whole=bool(name))
            if not running and not marked:
                return
            if time.monotonic() > deadline:
                raise FipaError(f"processes {sorted({*running, *marked})} do not end: end them by hand")
            for pid in running:  # not yet waited for, so that the number still is this group's
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            for pid in marked:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _how(self, name: str) -> dict[str, Any]:
        return {
            "stdin": subprocess.DEVNULL,
            "cwd": self.folder,
            "env": self._environment | {MARK: f"{self.folder}/{name}"},
            "start_new_session": True,  # Ctrl-C is for us, who then stop them
        }


def _marked(mark: str, whole: bool) -> list[int]:
    """Processes with this mark in the environment they were started with; or one that begins with it, if not whole."""
    wanted = b"\0" + mark.encode() + (b"\0" if whole else b"")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # of another user, or gone meanwhile
                if wanted in b"\0" + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def end_of(text: str, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(text.rstrip().splitlines()[-lines:])
