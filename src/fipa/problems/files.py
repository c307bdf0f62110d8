"""Python files of the user's own, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fipa.errors import FipaError


def module_from(file: str) -> ModuleType:
    """The module that a file holds; it may import its neighbours."""
    path = Path(file)
    if not path.is_file():
        raise FipaError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(f"fipa_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FipaError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
