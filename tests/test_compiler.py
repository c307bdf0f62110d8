"""The compiler of torch is there for who uses it; that nobody else imports it is in test_api.py."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext

import pytest
import torch

from fipa.compiler import NAME, Later, postpone


def test_what_stands_for_it_has_all_that_it_has() -> None:
    real, later = importlib.import_module(NAME), Later(NAME)
    assert later.config is real.config
    assert later.compiled_autograd is real.compiled_autograd
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        later.nonsense  # noqa: B018


def test_before_it_is_loaded_only_its_autograd_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module(NAME)
    off = importlib.import_module(f"{NAME}.compiled_autograd")
    monkeypatch.delitem(sys.modules, NAME)
    absent = Later(NAME).compiled_autograd
    assert absent._disable is nullcontext
    monkeypatch.setitem(sys.modules, NAME, real)
    assert absent.reset is off.reset


def test_one_that_is_loaded_stays() -> None:
    real = importlib.import_module(NAME)
    postpone()
    assert torch._dynamo is real
