r"""What clients in a shared basis say, as vectors whose sums are all that the server needs.

On the first trip a client adds its gradient and its loss, and its gradient again with random signs: sums of these widen
the basis, and no column of it is one client's gradient. On the second trip it adds its matrix in the basis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fipa.curvature.basis import pack, unpack
from fipa.flower.secure.messages import SecureAggregationError
from fipa.randomness import generator_for

WORST = 1e3  # a loss that rises by more, or by so many times its size, rises by that: sums have no infinity


@dataclass(frozen=True, eq=False)
class Gradients:
    """The clients' means.

    Attributes
    ----------
    update, directions
        That of their updates, and those with random signs.
    loss, num_examples
        That of their losses, and all their examples.
    """

    update: Tensor
    directions: tuple[Tensor, ...]
    loss: float
    num_examples: int


def signs_for(seed: int, round_number: int, client: int, count: int) -> Tensor:
    """A client's signs in a round, 1 or -1: everybody can know them.

    Examples
    --------
    >>> signs_for(0, 1, 2, 4).abs().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    generator = generator_for(seed, "signs", round_number, client)
    return 2.0 * torch.randint(2, (count,), generator=generator).double() - 1.0


def gradients_length(parameters: int, signs: int) -> int:
    """Length of the vector for p parameters and n sums with signs: p (n + 1) + 2."""
    return parameters * (signs + 1) + 2


def from_gradient(update: Tensor, loss: float, examples: int, signs: Tensor) -> NDArray[np.float64]:
    """The update as it is and with each of the signs, the loss and 1, all times the number of examples."""
    rows = torch.cat([signs.new_ones(1), signs])[:, None] * update.detach().double()
    return torch.cat([rows.reshape(-1), signs.new_tensor([loss, 1.0])]).mul_(examples).numpy()


def to_gradients(total: NDArray[np.float64], parameters: int, dtype: torch.dtype) -> Gradients:
    """The clients' means, from the sum of their vectors."""
    means, examples = _means(total)
    rows = torch.from_numpy(means[:-1]).reshape(-1, parameters).to(dtype)
    return Gradients(rows[0], tuple(rows[1:]), float(means[-1]), examples)


def matrix_length(columns: int) -> int:
    """Length of the vector for a basis of k columns: k (k + 1) / 2 + 1."""
    return columns * (columns + 1) // 2 + 1


def from_matrix(matrix: Tensor, examples: int) -> NDArray[np.float64]:
    """One half of the matrix and 1, times the number of examples."""
    half = pack(matrix.detach().double())
    return torch.cat([half, half.new_ones(1)]).mul_(examples).numpy()


def to_matrix(total: NDArray[np.float64], columns: int, dtype: torch.dtype) -> Tensor:
    """The clients' mean matrix, from the sum of their vectors."""
    return unpack(torch.from_numpy(_means(total)[0]), columns).to(dtype)


def from_loss(before: float, after: float, examples: int) -> NDArray[np.float64]:
    """The rise of a client's loss times its number of examples; infinity is a large number here."""
    worst = WORST * max(1.0, abs(before))
    return np.array([examples * (min(after - before, worst) if math.isfinite(after) else worst)])


def _means(total: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """All but the last entry, which is the number of examples, over this number."""
    examples = round(float(total[-1]))
    if examples < 1 or examples != total[-1]:
        raise SecureAggregationError(f"the sum says {total[-1]} examples in all: a client sent something else")
    return total[:-1] / examples, examples
