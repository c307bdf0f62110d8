"""FedRCL: local training with contrastive losses on the features of several levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fipa.clients.contrastive import divergence_penalty, relaxed_contrastive
from fipa.clients.descent import Extra
from fipa.clients.features import FeatureRule
from fipa.clients.rule import Memory
from fipa.errors import FipaError


@dataclass(frozen=True)
class FedRCL(FeatureRule):
    r"""FedRCL (Seo et al., CVPR 2024): relaxed contrastive loss and divergence penalty, averaged over the levels.

    Parameters
    ----------
    temperature, threshold
        Temperature of the similarities, and the similarity above which pairs are pushed apart.
    contrast, penalty
        Weights of the two.
    kind
        `"relaxed"`, or `"supervised"` for the plain supervised contrastive loss.
    pairs
        Which pairs the penalty acts on: see `fipa.clients.contrastive.divergence_penalty`. The published code's choice
        is `"least"`.
    levels
        By default the model's `levels`, or the inputs of all its ReLU modules.
    """

    contrast: float = 1.0
    penalty: float = 1.0
    temperature: float = 0.05
    threshold: float = 0.7
    kind: Literal["relaxed", "supervised"] = "relaxed"
    pairs: Literal["all", "least"] = "all"

    def default_levels(self, model: nn.Module) -> tuple[str, ...]:  # noqa: D102
        own = getattr(model, "levels", None)
        levels = own or [path for path, module in model.named_modules() if isinstance(module, nn.ReLU)]
        if not levels:
            raise FipaError("FedRCL: the model has no ReLU modules: name those whose inputs to use in levels")
        return tuple(levels)

    def extra(  # noqa: D102
        self, features_at: Callable[[Tensor, Tensor], Sequence[Tensor]], theta: Tensor, memory: Memory
    ) -> Extra:
        def loss(features: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
            losses = [
                self.contrast * relaxed_contrastive(level, y, self.temperature, self.kind)
                + self.penalty * divergence_penalty(level, y, self.threshold, self.temperature, self.pairs)
                for level in features
            ]
            return sum(losses[1:], losses[0]) / len(losses)

        return loss
