"""From pydantic's findings to sentences that name the key, its line and what is allowed."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fipa.config.schema import SPECS, Experiment
from fipa.errors import FipaError


class ConfigError(FipaError):
    """An experiment that cannot be run as written."""


Path = tuple[str | int, ...]

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    r"""The line (from 1) of a TOML text that sets a key, or else the nearest key or table above it.

    >>> line_of('[[arms]]\nname = "a"\n[[arms]]\nrule = {name = "fipa",\n step = 2}', ("arms", 1, "rule", "step"))
    5
    """
    lines = text.splitlines()
    places = _places(lines)
    for length in range(len(path), 0, -1):
        start = places.get(tuple(path[:length]))
        if start is None:
            continue
        for part in path[length:]:  # keys of an inline table, which may run over several lines
            pattern = re.compile(rf"(?<![\w-])[\"']?{re.escape(str(part))}[\"']?\s*=")
            stops = [other for other in places.values() if other > start]
            block = range(start, min(stops, default=len(lines) + 1))
            start = next((n for n in block if pattern.search(lines[n - 1])), start) if isinstance(part, str) else start
        return start
    return None


def _places(lines: Sequence[str]) -> dict[Path, int]:
    """Where each table and each key at the start of a line stands."""
    places: dict[Path, int] = {}
    counts: dict[str, int] = {}
    table: Path = ()
    for number, line in enumerate(lines, start=1):
        header = _HEADER.match(line)
        key = _KEY.match(line)
        if header:
            names = _split(header[2])
            table = ()
            for i, name in enumerate(names):
                table = (*table, name)
                array = ".".join(map(str, table))
                if header[1] == "[[" and i == len(names) - 1:
                    counts[array] = counts.get(array, -1) + 1
                if array in counts:
                    table = (*table, counts[array])
            places.setdefault(table, number)
        elif key:
            places.setdefault((*table, *_split(key[1])), number)
    return places


def _split(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted)]


def explain(error: ValidationError, source: str, text: str) -> ConfigError:
    """One sentence per finding."""
    return ConfigError("\n".join(_sentence(detail, source, text) for detail in error.errors()))


def _sentence(detail: ErrorDetails, source: str, text: str) -> str:
    path = _without_tags(detail["loc"])
    line = line_of(text, path)
    where = f"{source}, line {line}" if line else source
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return f"{where}: {key + ': ' if key else ''}{_reason(detail, path)}"


def _reason(detail: ErrorDetails, path: Path) -> str:
    context: dict[str, Any] = detail.get("ctx") or {}
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        allowed = _allowed(detail["loc"][:-1])
        return f"unknown key; allowed are {', '.join(allowed)}" if allowed else "unknown key"
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] in ("union_tag_invalid", "literal_error"):
        value = context.get("tag", detail["input"])
        return f"{value!r} is not allowed; use {context.get('expected_tags') or context.get('expected')}"
    if detail["type"] == "union_tag_not_found":
        kind = next((part for part in reversed(path) if part in SPECS), "rule")
        return f"needs a name, one of {', '.join(SPECS[str(kind)])}"
    message = detail["msg"].removeprefix("Value error, ")
    return message if detail["type"] == "value_error" else f"{message}, got {detail['input']!r}"


def _without_tags(location: tuple[str | int, ...]) -> Path:
    """Pydantic also names the member of a union it tried; a TOML file has no such key."""
    path: list[str | int] = []
    for i, part in enumerate(location):
        above = location[i - 1] if i else None
        tag = (above in SPECS and part in SPECS[str(above)]) or (above == "inner" and part in SPECS["rule"])
        if (
            not tag
            and (isinstance(part, int) or re.fullmatch(r"[a-z_]+", part))
            and part not in ("bool", "int", "float")
        ):
            path.append(part)
    return tuple(path)


def _allowed(location: tuple[str | int, ...]) -> list[str]:
    """Keys of the table at a location."""
    table: Any = Experiment
    above = ""
    for part in location:
        if isinstance(part, int):
            continue
        kind = "rule" if above == "inner" else above
        if kind in SPECS and part in SPECS[kind]:
            table = SPECS[kind][part]
        elif isinstance(table, type) and issubclass(table, BaseModel) and part in table.model_fields:
            table = _table_in(table.model_fields[part].annotation) or table
        above = part
    if isinstance(table, type) and issubclass(table, BaseModel):
        return list(table.model_fields) + (["defaults"] if table is Experiment else [])
    return [field.name for field in dataclasses.fields(table)]


def _table_in(annotation: Any) -> Any:
    """The schema or dataclass inside `X | None`, `tuple[X, ...]` and the like."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        return next((found for part in get_args(annotation) if (found := _table_in(part)) is not None), None)
    return None
