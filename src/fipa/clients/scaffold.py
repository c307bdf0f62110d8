"""SCAFFOLD: local training with control variates, which each client and the server remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fipa.clients.descent import Descent, Optimizer, PlainSGD
from fipa.clients.rule import Memory


@dataclass(frozen=True)
class Scaffold(Descent):
    r"""SGD along $g_m - c_m + c$, with control variates that estimate each client's and the mean gradient.

    Karimireddy et al. (2020), option II: after $\tau$ steps, $c_m^+ = c_m - c - \Delta\theta_m / (\tau\eta)$, and the
    server moves c by the mean change of all clients' variates. All begin at zero.
    """

    remembers: ClassVar[bool] = True
    tells: ClassVar[tuple[str, ...]] = ("change",)

    lr: float = 1e-2

    def optimizer(self, thetas: Tensor, lr: float) -> Optimizer:  # noqa: D102
        return PlainSGD(thetas, lr, weight_decay=self.weight_decay)

    def correction(self, theta: Tensor, memory: Memory, shared: Memory) -> Tensor:  # noqa: D102
        return _variate(shared, theta) - _variate(memory, theta)

    def outcome(  # noqa: D102
        self, theta: Tensor, delta: Tensor, steps: int, lr: float, memory: Memory, shared: Memory
    ) -> tuple[Memory, Memory]:
        change = -_variate(shared, theta) - delta / (steps * lr)
        return {"variate": _variate(memory, theta) + change}, {"change": change}

    def start(self, theta: Tensor) -> dict[str, Tensor]:  # noqa: D102
        return {"variate": torch.zeros_like(theta)}

    def server(self, shared: Memory, messages: Sequence[Memory], clients: int) -> dict[str, Tensor]:  # noqa: D102
        variate = shared.get("variate")
        for message in messages:  # one after the other: the order of a sum decides its last bits
            change = message["change"]
            variate = (torch.zeros_like(change) if variate is None else variate) + (1 / clients) * change
        return {} if variate is None else {"variate": variate}


def _variate(memory: Memory, theta: Tensor) -> Tensor:
    return memory["variate"] if "variate" in memory else torch.zeros_like(theta)
