"""A client's data and the loss on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fipa.curvature.terms import LossName, Residual
from fipa.errors import FipaError


@dataclass(frozen=True, eq=False)
class Client:
    r"""What one client holds.

    Parameters
    ----------
    data
        `fipa.Residual`s for `loss="least_squares"`, otherwise the tensors (x, y).
    loss
        $\frac12$ mean of squares for `"mse"` and `"least_squares"`, so that the curvature which clients sketch is the
        Gauss-Newton matrix of the very loss they train; the mean for `"cross_entropy"`.
    num_examples
        $N_m$; by default the number of examples in the data (of all residuals together).
    """

    data: tuple[Any, ...]
    loss: LossName = "least_squares"
    num_examples: int = 0

    def __post_init__(self) -> None:
        if self.loss not in ("least_squares", "mse", "cross_entropy"):
            raise FipaError(f'unknown loss {self.loss!r}: use "least_squares", "mse" or "cross_entropy"')
        if self.loss == "least_squares":
            lengths = [len(residual.inputs[0]) for residual in self.data if isinstance(residual, Residual)]
            if not lengths or len(lengths) != len(self.data):
                raise FipaError('a client with loss="least_squares" takes a tuple of fipa.Residual as data')
            count = sum(lengths)
        else:
            if len(self.data) != 2 or not all(isinstance(t, Tensor) for t in self.data):
                raise FipaError(f'a client with loss="{self.loss}" takes the tensors (x, y) as data')
            x, y = self.data
            if len(x) != len(y) or len(x) == 0:
                raise FipaError(f"x and y must share a first axis of at least 1, got {len(x)} and {len(y)}")
            count = len(x)
        if self.num_examples < 0:
            raise FipaError(f"num_examples must be positive, got {self.num_examples}")
        object.__setattr__(self, "num_examples", self.num_examples or count)

    @classmethod
    def of(cls, data: Client | Residual | Sequence[Any], loss: LossName = "least_squares") -> Client:
        """A client from whatever users give: a client, a residual, several, or (x, y)."""
        if isinstance(data, Client):
            return data
        return cls((data,) if isinstance(data, Residual) else tuple(data), loss)


def pooled(clients: Sequence[Client]) -> Client:
    """One client that holds the data of all: the centralised reference.

    The loss is the federation's, each client's mean weighted by its share of the examples.
    """
    if len({client.loss for client in clients}) != 1:
        raise FipaError("clients with different losses cannot be pooled")
    total = sum(client.num_examples for client in clients)
    if clients[0].loss != "least_squares":
        if len({client.num_examples / len(client.data[0]) for client in clients}) > 1:
            raise FipaError("num_examples that are not the data's cannot be pooled: give fipa.Residual weights instead")
        xs, ys = zip(*(client.data for client in clients), strict=True)
        return Client((torch.cat(xs), torch.cat(ys)), clients[0].loss, total)
    residuals = [
        Residual(r.function, *r.inputs, weight=r.weight * (client.num_examples / total))
        for client in clients
        for r in client.data
    ]
    return Client(tuple(residuals), "least_squares", total)
