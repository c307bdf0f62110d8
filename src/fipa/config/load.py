"""Experiments by name, from a TOML file or from a user's Python file, with overrides."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fipa.config.errors import ConfigError, explain
from fipa.config.schema import Experiment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = resources.files("fipa") / "experiments"
OWN_PROBLEM = "own-problem"  # the arms for a Python file that brings a problem only


def names() -> list[str]:
    """The experiments that come with the package."""
    found = [entry.name.removesuffix(".toml") for entry in SHIPPED.iterdir() if entry.name.endswith(".toml")]
    return sorted(name for name in found if name != OWN_PROBLEM)


def load(name_or_path: str, overrides: Iterable[str] = ()) -> tuple[str, Experiment]:
    """Name and content of an experiment.

    Parameters
    ----------
    name_or_path
        A shipped experiment, a TOML file, or a Python file with a function `problem(seed)`.
    overrides
        `"key=value"` each: a dotted key (arms by name, by number, or `*` for all) and a TOML value.
    """
    path = Path(name_or_path)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"{name_or_path}: no such file")
        source, text = f"{OWN_PROBLEM}.toml", (SHIPPED / f"{OWN_PROBLEM}.toml").read_text("utf-8")
        content = _parse(text, source)
        content |= {"title": path.stem, "problem": {"name": "python", "file": str(path.resolve())}}
    elif path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"{name_or_path}: no such file")
        source, text = str(path), path.read_text("utf-8")
        content = _parse(text, source)
        problem = content.get("problem")
        if isinstance(problem, dict) and problem.get("name") == "python" and isinstance(problem.get("file"), str):
            problem["file"] = str((path.parent / problem["file"]).resolve())
    elif name_or_path in names():
        source = f"{name_or_path}.toml"
        text = (SHIPPED / source).read_text("utf-8")
        content = _parse(text, source)
    else:
        raise ConfigError(
            f"there is no experiment {name_or_path!r}; there are {', '.join(names())}, or give a .toml or .py file"
        )
    for override in overrides:
        content = _override(content, override)
    return path.stem if path.suffix else name_or_path, validate(content, source, text)


def validate(content: dict[str, Any], source: str = "config", text: str = "") -> Experiment:
    """Check an experiment given as plain data; `[defaults]` goes into every arm that does not say otherwise."""
    content = dict(deepcopy(content))
    defaults = content.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"{source}: defaults must be a table")
    if isinstance(content.get("arms"), list):
        content["arms"] = [defaults | arm if isinstance(arm, dict) else arm for arm in content["arms"]]
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        raise explain(error, source, text) from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from error


def _override(content: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: write key=value, as in --set problem.samples=100")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    content = deepcopy(content)
    _set(content, key.strip().split("."), parsed, override)
    return content


def _set(table: Any, path: list[str], value: Any, override: str) -> None:
    first, rest = path[0], path[1:]
    if isinstance(table, list):
        chosen = [
            t for i, t in enumerate(table) if first in ("*", str(i), t.get("name") if isinstance(t, dict) else "")
        ]
        if not chosen or not rest:
            known = ", ".join(str(t.get("name")) for t in table if isinstance(t, dict))
            raise ConfigError(f"--set {override}: {first!r} is none of {known}; * means all of them")
        for entry in chosen:
            _set(entry, rest, value, override)
    elif not rest:
        table[first] = value
    elif isinstance(table.setdefault(first, {}), dict | list):
        _set(table[first], rest, value, override)
    else:
        raise ConfigError(f"--set {override}: {first} is a value, not a table")
