"""What is compiled in advance is what networks need later."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.func import grad, vmap

pytest.importorskip("numba")

from fipa.kernels import loops, tanh_loops
from fipa.kernels.__main__ import compile_loops
from fipa.kernels.small_cnn import View
from fipa.kernels.tanh_network import TanhNetwork
from kernels.cases import images, network, small


def compiled(module: ModuleType = loops) -> dict[str, int]:
    """How many forms there are of each loop."""
    return {name: len(loop.signatures) for name, loop in vars(module).items() if hasattr(loop, "signatures")}


@pytest.mark.parametrize("pooled", [[True], [False, True], [True, True], [True, True, False]])
@pytest.mark.parametrize("shape", [(3, 12, 12), (1, 8, 8)])
def test_nothing_is_left_to_compile(pooled: list[bool], shape: tuple[int, int, int]) -> None:
    compile_loops()
    before = compiled()
    assert all(before[name] for name in ("forward", "gradients", "backward", "convolve_rows"))  # which call the others
    net, flat = small(network([3] * len(pooled), pooled, shape))
    assert net is not None
    x, y = images(5, shape)
    net.gradient(flat, View.of(x), y)
    net.factors(flat, x, None, lambda logits, _: logits[:, :, None])
    assert compiled() == before


def test_nothing_is_left_to_compile_for_tanh_networks() -> None:
    compile_loops()
    before = compiled(tanh_loops)
    assert all(before[name] for name in ("forward", "backward"))
    net, x = TanhNetwork([2, 5, 4, 1]), torch.rand(3, 4, 9, 2, dtype=torch.float64)
    flat = torch.rand(3, 15 + 24 + 5, dtype=torch.float64)
    vmap(grad(lambda theta, x: net.jets(theta, x, 2).sum()))(flat, x)
    assert compiled(tanh_loops) == before
