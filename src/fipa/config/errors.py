"""From pydantic's findings to sentences that name the key, its line and what is allowed."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fipa.config.kinds import MAKERS, SETTINGS, specs
from fipa.config.lines import Path, line_of
from fipa.config.schema import Experiment
from fipa.errors import FipaError, instead_of


class ConfigError(FipaError):
    """An experiment that cannot be run as written."""


def explain(error: ValidationError, source: str, text: str) -> ConfigError:
    """One sentence per finding."""
    details = error.errors()
    # a table where a switch may stand: what is wrong in the table says it all
    tables = {detail["loc"][:-2] for detail in details if len(detail["loc"]) > 1 and detail["loc"][-2] == "StepControl"}
    told = [d for d in details if not (d["loc"][-1:] == ("bool",) and d["loc"][:-1] in tables)]
    sentences = [sentence(source, text, _without_tags(d), _reason(d)) for d in told]
    return ConfigError("\n".join(dict.fromkeys(sentences)))  # what [defaults] says wrong is wrong in every arm: once


def sentence(source: str, text: str, path: Path, reason: str) -> str:
    """What is wrong, and where."""
    line = line_of(text, path)
    if path[:1] == ("arms",) and len(path) > 2:  # not said in the arm itself, but for all
        common = ("defaults", *path[2:])
        if line_of(text, path) == line_of(text, path[:2]) and line_of(text, common) != line_of(text, ("defaults",)):
            path, line = common, line_of(text, common)
    where = f"{source}, line {line}" if line else source
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return f"{where}: {key + ': ' if key else ''}{reason}"


def _reason(detail: ErrorDetails) -> str:
    context: dict[str, Any] = detail.get("ctx") or {}
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        allowed = _allowed(detail["loc"][:-1])
        return f"unknown key: {instead_of(detail['loc'][-1], allowed)}" if allowed else "unknown key"
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] in ("union_tag_invalid", "literal_error"):
        value = context.get("tag", detail["input"])
        known = re.findall("'([^']*)'", context.get("expected_tags") or context["expected"])
        known = [name for name in known if name != "given"]  # a problem that was made in Python: no file can name it
        if not known:
            return f"{value!r} is not allowed: use {context['expected']}"
        kind = _kind(detail)
        own = ", or list the Python file that registers it in `files`" if kind in ("rule", "local") else ""
        return f"there is no {CALLED.get(kind, '')}{value!r}: {instead_of(value, known)}{own}"
    if detail["type"] == "union_tag_not_found":
        kind = _kind(detail)
        return f"needs a name, one of {', '.join(MAKERS[kind])}" if kind in MAKERS else "needs a name"
    message = detail["msg"].removeprefix("Value error, ")
    return message if detail["type"] == "value_error" else f"{message}, got {detail['input']!r}"


CALLED = {"rule": "rule ", "local": "local rule ", "problem": "problem "}


def _kind(detail: ErrorDetails) -> str:
    """What kind of table is at fault, if it is told apart by its name."""
    key = str(detail["loc"][-1]) if detail["type"].startswith("union_tag") else ""
    return "rule" if key == "inner" else key


_TAGS = {"bool", "int", "float", "constrained-int", "literal['full']", *(cls.__name__ for cls in SETTINGS)}


def _without_tags(detail: ErrorDetails) -> Path:
    """The key as the TOML file has it: pydantic also names the member of a union that it tried."""
    location = detail["loc"]
    unknown = detail["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    path: list[str | int] = []
    for i, part in enumerate(location):
        above = "rule" if i and location[i - 1] == "inner" else location[i - 1] if i else None
        tag = part in _TAGS or (above in MAKERS and part in MAKERS[str(above)])
        if not tag or (unknown and i == len(location) - 1):
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
        if kind in MAKERS and part in MAKERS[kind]:
            table = specs(kind)[part]
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
    if get_origin(annotation) in (Union, types.UnionType, tuple, Sequence, Annotated):
        return next((found for part in get_args(annotation) if (found := _table_in(part)) is not None), None)
    return None
