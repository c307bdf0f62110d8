"""Additive statistics as one vector whose sum over clients is all that the server needs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fipa.curvature.additive import AdditiveStatistics
from fipa.errors import UpdateError
from fipa.flower.secure.messages import SecureAggregationError
from fipa.layout import Layout


def vector_length(parameters: int, width: int) -> int:
    """Length of the vector for p parameters and L test vectors: p (L + 2) + 1."""
    return parameters * (width + 2) + 1


def flatten(statistics: AdditiveStatistics) -> NDArray[np.float64]:
    """Products, response and update times the number of examples, then this number.

    The number is part of the vector so that it is masked too: the server learns the sum of examples only.
    """
    if statistics.num_examples < 1:
        raise UpdateError(f"statistics of {statistics.num_examples} examples: leave out clients without data")
    flaw = statistics.flaw(statistics.layout.numel)
    if flaw:
        raise UpdateError(f"this client {flaw}")
    vector = torch.ones(vector_length(statistics.layout.numel, statistics.width), dtype=torch.float64)
    tensors = [tensor.detach().reshape(-1) for tensor in statistics.tensors().values()]
    for piece, tensor in zip(vector[:-1].split([len(tensor) for tensor in tensors]), tensors, strict=True):
        piece.copy_(tensor)
    return vector.mul_(statistics.num_examples).numpy()


def unflatten(
    total: NDArray[np.float64], layout: Layout, width: int, test_seed: int, dtype: torch.dtype = torch.float32
) -> AdditiveStatistics:
    """The pooled statistics, from the sum of the clients' vectors.

    Equal to `fipa.pool` of the clients' statistics, up to the steps of the fixed point.

    Parameters
    ----------
    layout, width, test_seed
        Those that all clients of the round used.
    dtype
        The dtype of the result.
    """
    parameters = layout.numel
    if total.shape != (vector_length(parameters, width),):
        raise SecureAggregationError(
            f"the sum has shape {total.shape}, expected {vector_length(parameters, width)} entries for {parameters} "
            f"parameters and width {width}: use the same params=... and width everywhere"
        )
    examples = round(float(total[-1]))
    if examples < 1 or examples != total[-1]:
        raise SecureAggregationError(
            f"the sum says {total[-1]} examples in all: a client sent something else than flatten(statistics)"
        )

    def mean(start: int, *shape: int) -> Tensor:
        piece = total[start : start + int(np.prod(shape))] / examples
        return torch.from_numpy(piece.reshape(shape)).to(dtype)

    products = mean(0, parameters, width)
    response, delta = (mean(parameters * (width + k), parameters) for k in range(2))
    return AdditiveStatistics(products, response, delta, examples, test_seed, layout)
