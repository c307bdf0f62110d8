"""How much memory processes have needed, as the system counts it. Linux only: elsewhere there is no answer."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MIB = 2**20


def reset_peak(pids: Iterable[int]) -> bool:
    """Forget earlier peaks, after giving back what this process has freed; False where the system does not let us."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_mib(pids: Iterable[int]) -> float | None:
    """The sum of the processes' peaks of resident memory since `reset_peak`; None where the system does not tell."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return None
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return round(total / MIB, 1) if total else None
