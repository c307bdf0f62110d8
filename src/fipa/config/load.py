"""Experiments by name, from a TOML file or from a user's Python file, with overrides."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fipa.config.arms import tables
from fipa.config.errors import ConfigError, explain, sentence
from fipa.config.schema import Experiment
from fipa.errors import FipaError, instead_of
from fipa.problems.files import registered
from fipa.shipped import OWN_PROBLEM, SHIPPED, names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(
    name_or_path: str, overrides: Iterable[str] = (), arms: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str, Experiment]:
    """Name and content of an experiment.

    Parameters
    ----------
    name_or_path
        A shipped experiment, a TOML file, or a Python file with a function `problem(seed)`, and with `arms` if it has
        arms of its own.
    overrides
        `"key=value"` each: a dotted key (arms by name, by number, or `*` for all) and a TOML value.
    arms
        In the place of the experiment's arms: see `fipa.config.arms`.
    """
    path = Path(name_or_path)
    shipped = {".py": f"{OWN_PROBLEM}.toml", "": f"{name_or_path}.toml"}.get(path.suffix)
    if path.suffix in (".py", ".toml"):
        if not path.is_file():
            raise ConfigError(f"{name_or_path}: no such file")
    elif name_or_path not in names():
        raise ConfigError(
            f"there is no experiment {name_or_path!r}: {instead_of(name_or_path, names())}, or give a .toml or .py file"
        )
    source = shipped or str(path)
    try:
        text = (SHIPPED / source if shipped else path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text: {error}") from error
    content = _based(_parse(text, source), source)
    if path.suffix == ".py":
        content |= {"title": path.stem, "problem": {"name": "python", "file": str(path.resolve())}}
        own = getattr(registered(name_or_path), "arms", None)
        if own is not None and not isinstance(own, Mapping):
            raise ConfigError(f"{name_or_path}: arms must be a dict of arms by name, as fipa.run takes them")
        arms = own if arms is None else arms
    problem: Any = content.get("problem")
    if path.suffix == ".toml":
        if isinstance(files := content.get("files"), list):
            content["files"] = [str(path.parent / file) if isinstance(file, str) else file for file in files]
        for key in ("file", "backbone"):
            named = isinstance(problem, dict) and isinstance(problem.get(key), str)
            if named and (key == "file" or problem[key].endswith(".py")):
                problem[key] = str((path.parent / problem[key]).resolve())
    experiment = _complete(_with_arms(content, arms), source, text, overrides)
    return path.stem if path.suffix else name_or_path, experiment


def for_given_problem(
    overrides: Iterable[str] = (), arms: Mapping[str, Mapping[str, Any]] | None = None, title: str = ""
) -> Experiment:
    """The experiment for a problem that was made in Python; with the arms for users' own problems by default."""
    source = f"{OWN_PROBLEM}.toml"
    content = _parse((SHIPPED / source).read_text("utf-8"), source)
    content |= {"title": title, "description": "A problem made in Python.", "problem": {"name": "given"}}
    return _complete(_with_arms(content, arms), "fipa.run", "", overrides)


def _with_arms(content: dict[str, Any], arms: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    if arms is None:
        return content
    others = {key for key in ("control", "reference") if content.get(key) not in arms}
    return {key: value for key, value in content.items() if key not in others} | {"arms": tables(arms)}


def _complete(content: dict[str, Any], source: str, text: str, overrides: Iterable[str]) -> Experiment:
    """With overrides, checked."""
    whole, changes = content, list(overrides)
    for common in (True, False):  # first in [defaults], then in what it was merged into
        for change in changes:
            if change.strip().startswith("defaults.") == common:
                content = _override(content, change)
        if common:
            content = _merged(content, source)
    if isinstance(files := content.get("files"), list):
        content["files"] = [str(Path(file).resolve()) if isinstance(file, str) else file for file in files]
    try:
        return validate(content, source, text)
    except ConfigError as error:
        if not changes:
            raise
        validate(whole, source, text)  # if the file is wrong
        sets = " ".join(f"--set {change}" for change in changes)
        raise ConfigError("\n".join(f"{sets}: {line.split(': ', 1)[1]}" for line in str(error).splitlines())) from error


def validate(content: Mapping[str, Any], source: str = "config", text: str = "") -> Experiment:
    """Check an experiment given as plain data; `text` is where to look for lines."""
    _register(content, source, text)
    whole = json.dumps(_merged(content, source), default=str)
    try:  # as JSON, since only there a list may stand for a tuple while "3" may not for a number
        experiment = Experiment.model_validate_json(whole, strict=True)
    except ValidationError as error:
        raise explain(error, source, text) from error
    mistakes = [sentence(source, text, key, reason) for key, reason in experiment.mistakes()]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return experiment


def _register(content: Mapping[str, Any], source: str, text: str) -> None:
    """Run the user's own files, whose rules the rest of the experiment may name."""
    files, problem = content.get("files"), content.get("problem")
    named: dict[tuple[str | int, ...], Any] = {}
    if isinstance(files, list):
        named = {("files", i): file for i, file in enumerate(files)}
    if isinstance(problem, Mapping) and problem.get("name") == "python":
        named["problem", "file"] = problem.get("file")
    for key, file in named.items():
        if isinstance(file, str):  # the schema finds what is none
            try:
                registered(file)
            except FipaError as error:
                raise ConfigError(sentence(source, text, key, str(error))) from error


def _merged(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`[defaults]` goes into every arm that does not say otherwise."""
    content = dict(deepcopy(content))
    defaults = content.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"{source}: defaults must be a table")
    if isinstance(content.get("warmup"), dict):
        common = {key: value for key, value in defaults.items() if key not in ("params", "start", "average")}
        content["warmup"] = deepcopy(common) | content["warmup"]
    if isinstance(content.get("arms"), list):
        content["arms"] = [deepcopy(defaults) | arm if isinstance(arm, dict) else arm for arm in content["arms"]]
    return content


def _based(content: dict[str, Any], source: str) -> dict[str, Any]:
    """With `base = "NAME"`, all that the file does not say is as in the shipped experiment of that name."""
    base = content.pop("base", None)
    if base is None:
        return content
    if base not in names():
        raise ConfigError(f"{source}: base: there is no experiment {base!r}: {instead_of(base, names())}")
    below = _based(_parse((SHIPPED / f"{base}.toml").read_text("utf-8"), f"{base}.toml"), f"{base}.toml")
    if isinstance(content.get("arms"), dict):
        content |= {"arms": _changed(below["arms"], content["arms"], source)}
    return _over(below, content)


def _changed(arms: list[dict[str, Any]], changes: dict[str, Any], source: str) -> list[dict[str, Any]]:
    """The base's arms with changes to some of them, by name: `[arms.FedAvg]` in the place of `[[arms]]`."""
    known = [arm["name"] for arm in arms]
    for name, change in changes.items():
        if name not in known:
            raise ConfigError(f"{source}: arms.{name}: the base has no such arm: {instead_of(name, known)}")
        if not isinstance(change, dict):
            raise ConfigError(f"{source}: arms.{name} must be a table")
    return [_over(arm, changes.get(arm["name"], {})) for arm in arms]


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, unless they are of another kind (`name`); all else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("name", old.get("name")) == old.get("name"):
            merged[key] = _over(old, value)
        else:
            merged[key] = value
    return merged


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from error


def _override(content: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"--set {override}: write key=value, as in --set problem.samples=100")
    try:
        found = tomllib.loads(f"value = {value}")
        parsed = found["value"] if len(found) == 1 else value
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    content = deepcopy(content)
    path = [part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", key.strip())]
    _set(content, path, parsed, override)
    return content


def _set(table: Any, path: list[str], value: Any, override: str) -> None:
    first, rest = path[0], path[1:]
    if isinstance(table, list):
        chosen = [
            t for i, t in enumerate(table) if first in ("*", str(i), t.get("name") if isinstance(t, dict) else "")
        ]
        if not chosen or not rest:
            known = [str(t.get("name", i)) for i, t in enumerate(table) if isinstance(t, dict)]
            instead = f"{instead_of(first, known)}, or * for all of them"
            raise ConfigError(f"--set {override}: there is no {first!r}: {instead}")
        for entry in chosen:
            _set(entry, rest, value, override)
    elif not rest:
        table[first] = value
    elif isinstance(table.setdefault(first, {}), dict | list):
        _set(table[first], rest, value, override)
    else:
        raise ConfigError(f"--set {override}: {first} is a value, not a table")
