"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r">>> (?!.*\+SKIP)", path.read_text("utf-8"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    """Only modules that have some are looked at: pytest's own --doctest-modules would import and parse every file."""
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
