"""Compile the loops for this processor before anything needs them, which takes a while: `python -m fipa.kernels`.

Otherwise the first run that trains a small CNN or a tanh network does so, and every process that starts meanwhile does
it once more.
"""

from __future__ import annotations

import sys

import torch

from fipa.kernels.small_cnn import COMPILED, SmallCNN, View
from fipa.kernels.tanh_network import TanhNetwork
from fipa.layout import Layout
from fipa.models import cnn

NETWORKS = ([4], [4, 8], [4, 8, 8])  # channels: the outer loops are compiled for each number of convolutions


def compile_loops() -> None:
    """Run every loop once; numba keeps what it compiles beside their source, or in the user's cache."""
    x, y = torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.long)
    for channels in NETWORKS:
        model = cnn(channels, 8, image=(3, 16), generator=torch.Generator().manual_seed(0))
        layout = Layout.of(dict(model.named_parameters()))
        small, flat = SmallCNN.of(model, layout), torch.zeros(layout.numel)
        assert small is not None
        small.gradient(flat, View.of(x), y)
        small.factors(flat, x, None, lambda logits, _: logits[:, :, None])
    flat = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    TanhNetwork((1, 2, 1)).jets(flat, torch.zeros(1, 2, 1, dtype=torch.float64), 0).sum().backward()


if __name__ == "__main__":
    if not COMPILED:
        sys.exit("the loops are compiled by numba: pip install 'fipa[fast]'")
    compile_loops()
