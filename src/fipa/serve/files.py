"""Files that others write: whether they are where they seem to be, and what may come of reading odd ones."""

from __future__ import annotations

import os
from pathlib import Path

from fipa.errors import FipaError

# What is raised by content that nobody expected, as numbers where there should be lists; a FipaError is a ValueError.
ODD = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


def told(error: Exception) -> str:
    """An error in words; those of odd content do not say by themselves what happened."""
    if isinstance(error, FipaError | OSError):
        return str(error)
    return f"its files cannot be understood: {type(error).__name__}: {error}"


def inside(root: Path, path: Path) -> bool:
    """Whether a file is really below the folder, wherever links lead."""
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # the latter for links in a circle
        return False


def stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """What tells a file from the one that was there before."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
