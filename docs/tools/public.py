"""The public names, and which of them the reference lacks."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

MODULES = ("fipa", "fipa.flower", "fipa.pde", "fipa.data", "fipa.models", "fipa.privacy")


def names() -> Iterator[tuple[str, object]]:
    """Every public name with its path, and what it stands for; modules are listed by themselves."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in _public(module):
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                yield f"{module_name}.{name}", thing


def _public(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    here = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    return [name for name in here if not name.startswith("_")]


def problems(folder: Path) -> Iterator[str]:
    """Why the reference in `folder` is not complete."""
    text = "\n".join(page.read_text("utf-8") for page in sorted(folder.glob("*.md")))
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for path, thing in names():
        if path not in shown:
            yield f"{path} is public, but no page of the reference shows it"
        if callable(thing) and not (inspect.getdoc(thing) or "").strip():
            yield f"{path} is public, but has no docstring"
        if inspect.isclass(thing):
            yield from _members(path, thing)
    known = {path for path, _ in names()}
    for extra in sorted(shown - known):
        if importlib.util.find_spec(extra.rpartition(".")[0]) is None:
            yield f"the reference shows {extra}, which does not exist"


def _members(path: str, kind: type) -> Iterator[str]:
    """Methods and properties of our own without a docstring, their base classes' included."""
    for name, member in vars(kind).items():
        ours = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
        if ours and not name.startswith("_") and not (inspect.getdoc(getattr(kind, name)) or "").strip():
            yield f"{path}.{name} is public, but has no docstring"
