"""How a run stands, and whether a process still works on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, files that change are the only sign of life
    fcntl = None  # type: ignore[assignment]

QUIET = 120.0  # seconds without a sign of life, where there is no lock, after which a run counts as stopped


class State(str, Enum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    DIVERGED = "diverged"  # all was run, and some arm ended in NaN or infinity
    STOPPED = "stopped"  # by hand, or killed: it can be resumed
    FAILED = "failed"  # an error, which is told
    BROKEN = "broken"  # its files cannot be read
    DELETED = "deleted"  # while it was watched


def locked(path: Path) -> bool | None:
    """Whether a process holds this lock; None where that cannot be known.

    A shared lock is taken for a moment, through a file that is open for reading only.
    """
    if fcntl is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def quiet_for(changed_at: float, rounds: Iterable[float | None]) -> bool:
    """Whether nothing was written for longer than a few of the last rounds took."""
    usual = max((seconds for seconds in rounds if seconds is not None), default=0.0)
    return time.time() - changed_at > max(QUIET, 5 * usual)
