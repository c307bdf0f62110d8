"""Keeps torch's compiler out of processes that compile nothing: to import it takes longer than to import fipa.

`torch.func.grad` and `vjp` import all of `torch._dynamo` only to switch its autograd off, which cannot be on before.
That matters where processes are many and short: Flower starts one for every message.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class _Off:
    """The compiler's autograd while it is not there."""

    _disable = nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{NAME}.compiled_autograd"), name)


class Later(ModuleType):
    """Stands for the compiler until something of it is used; Python puts the real module in its place when it loads."""

    def __getattr__(self, name: str) -> Any:
        if name == "compiled_autograd" and NAME not in sys.modules:
            return _Off()
        return getattr(importlib.import_module(NAME), name)


def postpone() -> None:
    """Import torch's compiler when it is used, and not before."""
    if NAME not in sys.modules:
        vars(torch)["_dynamo"] = Later(NAME)
