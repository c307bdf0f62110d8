r"""How the training examples are split between clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fipa.errors import FipaError


@dataclass(frozen=True)
class BalancedDirichlet:
    r"""Equal shares with unequal classes, as in the reference.

    Client after client draws class proportions $p \sim \mathrm{Dir}(\alpha)$, then its share of the examples that are
    left, each with a chance in proportion to p of its class.
    """

    name: Literal["balanced-dirichlet"] = "balanced-dirichlet"
    alpha: float = 0.3

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise FipaError(f"partition: alpha must be positive, got {self.alpha}")

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        share, more = divmod(len(labels), clients)
        if share == 0:
            raise FipaError(f"partition: {len(labels)} examples are too few for {clients} clients")
        classes = int(labels.max()) + 1
        left = torch.ones(len(labels), dtype=torch.bool)
        parts = []
        for client in range(clients):
            chances = dirichlet(self.alpha, classes, generator)[labels] * left
            part = _draw(chances, left, share + (client < more), generator)
            left[part] = False
            parts.append(part.sort().values)
        return parts


Partition = BalancedDirichlet


def _draw(chances: Tensor, left: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw without replacement; where the wanted classes have run out, from all that is left."""
    wanted = chances.nonzero()[:, 0]
    if len(wanted) <= count:
        rest = (left & (chances == 0)).nonzero()[:, 0]
        order = torch.randperm(len(rest), generator=generator)
        return torch.cat([wanted, rest[order[: count - len(wanted)]]])
    # the `count` largest of log(chance) + Gumbel noise are a draw without replacement
    uniform = torch.rand(len(wanted), generator=generator, dtype=torch.float64).clamp_min(1e-300)
    keys = chances[wanted].log() - (-uniform.log()).log()
    return wanted[keys.topk(count).indices]


def dirichlet(alpha: float, classes: int, generator: torch.Generator) -> Tensor:
    """Proportions (classes), by way of logarithms of gamma variates, which do not vanish however small alpha is."""
    shape = torch.full((classes,), alpha + 1.0, dtype=torch.float64)
    gammas = torch._standard_gamma(shape, generator=generator)
    uniform = torch.rand(classes, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return torch.softmax(gammas.log() + uniform.log() / alpha, dim=0)
