"""Python files of the user's own, as modules: they bring problems, and register rules and curvatures."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fipa.aggregation.registry import RULES
from fipa.clients.registry import LOCAL_RULES
from fipa.curvature.registry import PLANS
from fipa.errors import FipaError

REGISTRIES: tuple[dict[str, Any], ...] = (RULES, LOCAL_RULES, PLANS)
_registered: dict[Path, tuple[str, ModuleType]] = {}  # digest of the file as it was run, and what came of it


def registered(file: str) -> ModuleType:
    """Run a file for what it registers: once in a process, unless it has changed."""
    path = Path(file).resolve()
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    if _registered.get(path, ("", None))[0] != digest or not digest:
        _registered.pop(path, None)
        with drawing_from(0):
            _registered[path] = digest, module_from(file)
    return _registered[path][1]


def module_from(file: str) -> ModuleType:
    """The module that a file holds, run anew; it may import its neighbours.

    If the file was `registered`, the classes that it registered then stay: processes know each other's objects by them.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise FipaError(f"{file}: no such file")
    name = f"fipa_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FipaError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = [dict(known) for known in REGISTRIES]
    sys.modules[name] = module  # dataclasses look for their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        if path in _registered:
            sys.modules[name] = _registered[path][1]
            for known, as_it_was in zip(REGISTRIES, before, strict=True):
                known.clear()
                known.update(as_it_was)
    return module


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Whatever a file draws from is the same in every process."""
    others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])
