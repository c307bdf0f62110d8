"""Look at a model without disturbing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, then give every submodule its own mode back.

    Curvature is a property of the function that is deployed: dropout off, BatchNorm on running statistics.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
