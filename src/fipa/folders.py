"""Where a run keeps what in its directory: the names that those who write and those who only read share."""

from __future__ import annotations

import re
from pathlib import Path

LOCK = ".lock"  # held by the process that runs
ERROR = "error.txt"  # why a run broke; gone once it resumes
HISTORY = "history.jsonl"  # of an arm on a seed: a line per round


def arm_folder(directory: Path, place: int, arm: str, seed: int) -> Path:
    """The folder of an arm on a seed; `place` is that of the arm in the experiment.

    >>> arm_folder(Path("runs/demo"), 3, "FIPA (paper's rule)", 0).as_posix()
    'runs/demo/arms/03-fipa-paper-s-rule/seed-0'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", arm.lower()).strip("-")
    return directory / "arms" / f"{place:02d}-{slug}" / f"seed-{seed}"


def warmup_folder(directory: Path, seed: int) -> Path:
    """The folder of the warm-up on a seed."""
    return directory / "warmup" / f"seed-{seed}"
