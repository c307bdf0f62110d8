"""What the scripts in this folder share: one reader and one writer of CSVs, and the words for a spread."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fipa.report.significance import quantile

HERE = Path(__file__).parent

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The rows of a CSV, numbers as numbers and empty cells as None; none of a file that is not there."""
    if not file.exists():
        return []
    with file.open(newline="") as handle:
        return [{key: _typed(value) for key, value in row.items()} for row in csv.DictReader(handle)]


def by_arm(file: Path) -> dict[str, dict[int, Row]]:
    """The rows of a CSV by arm and seed; nothing of a file that is not there."""
    found: dict[str, dict[int, Row]] = {}
    for row in read(file):
        found.setdefault(row["arm"], {})[row["seed"]] = row
    return found


def write(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A CSV with these columns; what a row lacks stays empty."""
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation."""
    more = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{more}"


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean of paired differences, and half of its 95 % interval."""
    half = quantile(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


def _typed(value: str | None) -> Any:
    if not value:
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value
