"""What this machine is: its processor, the cores that we may use, and its memory."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from pathlib import Path

TRIM, MMAP = -1, -3  # glibc's numbers of what `mallopt` sets
OWN, SPARE = 32 * 2**20, 512 * 2**20  # bytes: smaller blocks are kept, and so much of them
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks the system for pages of 2 MiB for tensors that are as large
SHARED_MEMORY = Path("/dev/shm")  # a folder that Linux keeps in memory


def processor() -> str:
    """Its name where the system tells, as Linux does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


def cores() -> int:
    """Those that this process may use, which in a container may be few of many."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> dict[str, int]:
    """Bytes of memory in all, and those that are available where the system tells; nothing where it tells neither."""
    path = Path("/proc/meminfo")
    if path.exists():
        kib = {line.partition(":")[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
        keys = {"total": "MemTotal", "available": "MemAvailable"}
        return {key: kib[name] * 1024 for key, name in keys.items() if name in kib}
    names = getattr(os, "sysconf_names", {})
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return {"total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    return {}


def keep_memory() -> bool:
    """Let this process keep memory that it frees for the next time; whether its C library can (glibc).

    Torch asks for the memory of every activation anew. By default glibc gives blocks of megabytes back to the system
    and gets them again page by page, each filled with zeros: for networks like CNN-207k that takes as long as a part of
    the training. Tensors of 2 MiB and more come in huge pages, so that a shared basis is not filled with zeros in
    thousands of small ones. Only for processes that are ours: it holds for all that runs in them, and cannot be taken
    back.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return False
    os.environ.setdefault(HUGE_PAGES, "1")  # torch reads it when it makes its first tensor
    return bool(libc.mallopt(MMAP, OWN) and libc.mallopt(TRIM, SPARE))


def folder_in_memory() -> Path | None:
    """A folder whose files never reach a disk, where the system has one that we may write to."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None


def room_in_memory(folder: Path) -> int:
    """Bytes that may go into a folder in memory: what is free there, and what the machine can spare."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return 0
    return min(free, memory().get("available", 0))
