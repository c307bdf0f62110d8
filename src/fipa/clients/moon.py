"""MOON: local training that stays near the broadcast model's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fipa.clients.contrastive import moon
from fipa.clients.descent import Extra
from fipa.clients.features import FeatureRule
from fipa.clients.rule import Memory
from fipa.errors import FipaError


@dataclass(frozen=True)
class Moon(FeatureRule):
    r"""MOON (Li et al., CVPR 2021): features near to the broadcast model's and far from the client's last model's.

    A client keeps its model as it was after local training; in its first round the broadcast one stands for it.

    Parameters
    ----------
    weight
        $\mu$.
    temperature
        T of `fipa.clients.contrastive.moon`.
    levels
        By default the input of the last linear layer.
    """

    remembers: ClassVar[bool] = True

    weight: float = 1.0
    temperature: float = 0.5

    def default_levels(self, model: nn.Module) -> tuple[str, ...]:  # noqa: D102
        linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise FipaError("Moon: the model has no linear layer: name the module whose input to use in levels")
        return (linear[-1],)

    def extra(  # noqa: D102
        self, features_at: Callable[[Tensor, Tensor], Sequence[Tensor]], theta: Tensor, memory: Memory
    ) -> Extra:
        previous = memory.get("model", theta)

        def loss(features: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
            triples = zip(features, features_at(theta, x), features_at(previous, x), strict=True)
            losses = [moon(own, near, far, self.temperature) for own, near, far in triples]
            return self.weight * sum(losses[1:], losses[0]) / len(losses)

        return loss

    def outcome(  # noqa: D102
        self, theta: Tensor, delta: Tensor, steps: int, lr: float, memory: Memory, shared: Memory
    ) -> tuple[Memory, Memory]:
        return {"model": theta + delta}, {}
