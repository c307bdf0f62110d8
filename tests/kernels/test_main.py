"""What is compiled in advance is what networks need later."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from fipa.kernels import loops
from fipa.kernels.__main__ import compile_loops
from fipa.kernels.small_cnn import View
from kernels.cases import images, network, small


def compiled() -> dict[str, int]:
    """How many forms there are of each loop."""
    return {name: len(loop.signatures) for name, loop in vars(loops).items() if hasattr(loop, "signatures")}


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
