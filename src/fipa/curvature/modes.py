"""Look at a model without disturbing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, then give every submodule its own mode back.

    Curvature is a property of the function that is deployed: dropout off, BatchNorm on running statistics. Attention is
    computed from plain operations inside, as its fused kernels lack the derivatives that we take.
    """
    modes = [(module, module.training) for module in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in modes:
            module.training = training
