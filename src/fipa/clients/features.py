"""Client rules with a loss on the network's features: MOON and FedRCL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fipa.clients.contrastive import divergence_penalty, moon, relaxed_contrastive
from fipa.clients.local_rules import SGD, Extra
from fipa.errors import FipaError


@dataclass(frozen=True)
class FeatureRule(SGD):
    """SGD on cross entropy and something of the features, which are the inputs of the modules named in `levels`."""

    levels: tuple[str, ...] = ()

    def levels_of(self, model: nn.Module) -> tuple[str, ...]:
        """Those of the rule, or the model's own."""
        known = dict(model.named_modules())
        unknown = [level for level in self.levels if level not in known]
        if unknown:
            raise FipaError(f"{type(self).__name__}: the model has no module {unknown[0]!r}; it has {', '.join(known)}")
        return self.levels or self.default_levels(model)

    @abstractmethod
    def default_levels(self, model: nn.Module) -> tuple[str, ...]:
        """Where the rule looks if it is not told."""

    @abstractmethod
    def extra(
        self, features_at: Callable[[Tensor, Tensor], Sequence[Tensor]], theta: Tensor, previous: Tensor
    ) -> Extra:
        """What is added to the loss in a round.

        Parameters
        ----------
        features_at
            `features_at(parameters, x)` gives the features of another model.
        theta, previous
            The broadcast model, and the client's own after its last round (the broadcast one if it had none).
        """


@dataclass(frozen=True)
class Moon(FeatureRule):
    r"""MOON (Li et al., CVPR 2021): features near to the broadcast model's and far from the client's last model's.

    Parameters
    ----------
    weight
        $\mu$.
    temperature
        T of `fipa.clients.contrastive.moon`.
    levels
        By default the input of the last linear layer.
    """

    weight: float = 1.0
    temperature: float = 0.5

    def default_levels(self, model: nn.Module) -> tuple[str, ...]:  # noqa: D102
        linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise FipaError("Moon: the model has no linear layer: name the module whose input to use in levels")
        return (linear[-1],)

    def extra(  # noqa: D102
        self, features_at: Callable[[Tensor, Tensor], Sequence[Tensor]], theta: Tensor, previous: Tensor
    ) -> Extra:
        def loss(features: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
            triples = zip(features, features_at(theta, x), features_at(previous, x), strict=True)
            losses = [moon(own, near, far, self.temperature) for own, near, far in triples]
            return self.weight * sum(losses[1:], losses[0]) / len(losses)

        return loss


@dataclass(frozen=True)
class FedRCL(FeatureRule):
    r"""FedRCL (Seo et al., CVPR 2024): relaxed contrastive loss and divergence penalty, averaged over the levels.

    Parameters
    ----------
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
        self, features_at: Callable[[Tensor, Tensor], Sequence[Tensor]], theta: Tensor, previous: Tensor
    ) -> Extra:
        def loss(features: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
            losses = [
                self.contrast * relaxed_contrastive(level, y, self.temperature, self.kind)
                + self.penalty * divergence_penalty(level, y, self.threshold, self.temperature, self.pairs)
                for level in features
            ]
            return sum(losses[1:], losses[0]) / len(losses)

        return loss
