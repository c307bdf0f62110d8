"""A client's data and the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from fipa.curvature.terms import LossName, Residual
from fipa.errors import FipaError, instead_of


@dataclass(frozen=True, eq=False)
class Client:
    r"""The data and the loss of one client.

    Parameters
    ----------
    data
        `fipa.Residual`s for `loss="least_squares"`, otherwise the tensors (x, y).
    loss
        $\frac12$ mean of squares for `"mse"` and `"least_squares"`, so that the curvature which clients sketch is the
        Gauss-Newton matrix of the very loss they train; the mean for `"cross_entropy"`.
    num_examples
        $N_m$; by default the number of examples in the data (of all residuals together).
    transform
        Makes what the model sees of the x in `data`, whenever it is needed: thousands of images are kept as bytes,
        and those of the round's clients as floating-point numbers. Row by row, without randomness.
    augment
        Varies the x of every batch in local training, with the client's generator; sketches see x as it is.
    """

    data: tuple[Any, ...]
    loss: LossName = "least_squares"
    num_examples: int = 0
    transform: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossName):
            raise FipaError(f"there is no loss {self.loss!r}: {instead_of(self.loss, get_args(LossName))}")
        if self.loss == "least_squares":
            lengths = [len(residual.inputs[0]) for residual in self.data if isinstance(residual, Residual)]
            if not lengths or len(lengths) != len(self.data):
                raise FipaError('a client with loss="least_squares" takes a tuple of fipa.Residual as data')
            if self.transform is not None or self.augment is not None:
                raise FipaError('transform and augment are for tensors (x, y), not for loss="least_squares"')
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

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The data as the model sees them."""
        if self.transform is None:
            return self.data
        x, y = self.data
        return self.transform(x), y

    @classmethod
    def of(cls, data: Client | Residual | Sequence[Any], loss: LossName = "least_squares") -> Client:
        """A client from whatever users give: a client, a residual, several, or (x, y)."""
        if isinstance(data, Client):
            return data
        return cls((data,) if isinstance(data, Residual) else tuple(data), loss)


def united(clients: Sequence[Client]) -> Client:
    """One client that holds the data of all: the centralised reference.

    The loss is the federation's, each client's mean weighted by its share of the examples.
    """
    first = clients[0]
    if any((c.loss, c.transform, c.augment) != (first.loss, first.transform, first.augment) for c in clients):
        raise FipaError("clients with different losses, transforms or augmentations cannot be put together")
    total = sum(client.num_examples for client in clients)
    if first.loss != "least_squares":
        if len({client.num_examples / len(client.data[0]) for client in clients}) > 1:
            raise FipaError("num_examples that are not the data's cannot be put together: use fipa.Residual weights")
        xs, ys = zip(*(client.data for client in clients), strict=True)
        return Client((torch.cat(xs), torch.cat(ys)), first.loss, total, first.transform, first.augment)
    residuals = [
        Residual(r.function, *r.inputs, weight=r.weight * (client.num_examples / total))
        for client in clients
        for r in client.data
    ]
    return Client(tuple(residuals), "least_squares", total)
