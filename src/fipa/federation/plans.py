"""What a client is asked to tell about its curvature."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fipa.aggregation.additive import AdditiveFIPA
from fipa.aggregation.diagonal import DiagonalFisher
from fipa.aggregation.fipa import FIPA, CompletedFIPA
from fipa.aggregation.foof import FOOF
from fipa.aggregation.private import PrivateAdditiveFIPA
from fipa.aggregation.rule import Rule
from fipa.curvature.additive import AdditiveStatistics, additive_statistics
from fipa.curvature.covariance import InputCovariance, input_covariance
from fipa.curvature.diagonal import DiagonalCurvature, diagonal_fisher
from fipa.curvature.rank import Rank, RelativeThreshold
from fipa.curvature.routes import Route
from fipa.curvature.sketch import Sketch, Solver, sketch
from fipa.curvature.terms import LossName
from fipa.errors import FipaError, RankWarning
from fipa.layout import Layout


class Source(Protocol):
    """Whose curvature it is: a `Client`, or any other data with a loss."""

    @property
    def tensors(self) -> Any:
        """The data, as `fipa.sketch` takes them."""

    @property
    def loss(self) -> LossName:
        """On these data."""

    @property
    def num_examples(self) -> int:
        """Their weight."""


@dataclass(frozen=True)
class SketchPlan:
    """Eigenpairs, as for `fipa.sketch`."""

    rank: Rank = 20
    solver: Solver = "auto"
    route: Route = "auto"
    oversampling: int = 10
    iterations: int = 4
    max_examples: int | None = None
    sampled_labels: int | None = None

    def compute(self, model: nn.Module, layout: Layout, client: Source, seed: int) -> Sketch:
        """The client's sketch at the model's present parameters."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)  # no news in a round: the record shows the rank
            return sketch(
                model, client.tensors, client.loss, self.rank, params=layout.names, route=self.route,
                solver=self.solver, oversampling=self.oversampling, iterations=self.iterations,
                max_examples=self.max_examples, sampled_labels=self.sampled_labels, seed=seed,
            )  # fmt: skip


@dataclass(frozen=True)
class AdditivePlan:
    """Sums with a random test matrix of `width` columns, as for `fipa.additive_statistics`."""

    width: int = 40
    max_examples: int | None = None
    sampled_labels: int | None = None

    def compute(
        self, model: nn.Module, layout: Layout, client: Source, seed: int, delta: Tensor, test_seed: int
    ) -> AdditiveStatistics:
        """The client's statistics at the model's present parameters."""
        return additive_statistics(
            model, client.tensors, client.loss, delta=delta, width=self.width, test_seed=test_seed,
            num_examples=client.num_examples, params=layout.names, max_examples=self.max_examples,
            sampled_labels=self.sampled_labels, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True)
class DiagonalPlan:
    """The diagonal, as for `fipa.diagonal_fisher`."""

    max_examples: int | None = None
    sampled_labels: int | None = None

    def compute(self, model: nn.Module, layout: Layout, client: Source, seed: int) -> DiagonalCurvature:
        """The client's diagonal at the model's present parameters."""
        return diagonal_fisher(
            model, client.tensors, client.loss, params=layout.names, max_examples=self.max_examples,
            sampled_labels=self.sampled_labels, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True)
class CovariancePlan:
    """Layer-wise input covariances, as for `fipa.input_covariance`."""

    def compute(self, model: nn.Module, layout: Layout, client: Source, seed: int) -> InputCovariance:
        """The client's covariances at the model's present parameters."""
        data = client.tensors
        inputs = torch.cat([r.inputs[0] for r in data]) if client.loss == "least_squares" else data
        return input_covariance(model, inputs, params=layout.names, seed=seed)


Plan = SketchPlan | AdditivePlan | DiagonalPlan | CovariancePlan
_PLANS: dict[type, Plan] = {
    AdditiveFIPA: AdditivePlan(),
    PrivateAdditiveFIPA: AdditivePlan(), DiagonalFisher: DiagonalPlan(), FOOF: CovariancePlan(), FIPA: SketchPlan(),
    CompletedFIPA: SketchPlan(),
}  # fmt: skip


def plan_for(rule: Rule) -> Plan | None:
    """What a rule needs to know of the clients' curvature, with default settings; None for nothing."""
    inner: Rule | None = getattr(rule, "inner", None)
    own = next((plan for kind, plan in _PLANS.items() if isinstance(rule, kind)), None)
    return own if own is not None or inner is None else plan_for(inner)


@dataclass(frozen=True)
class AdaptiveRank:
    r"""Paper's adaptive rank: keep $\lambda_i \ge t_m \lambda_1$, $t_m = C / (k (|g_m| + |g|))$ within [0, 0.99].

    $g_m$ is the client's gradient at the broadcast model, $g = \sum_m g_m$, k the round. Gradients are those of the
    loss, a mean over the examples; with `sums` they are summed over the examples, as in the published code.
    """

    constant: float = 1.0
    max_rank: int | None = None
    sums: bool = False

    def __post_init__(self) -> None:
        if not self.constant > 0 or (self.max_rank is not None and self.max_rank < 1):
            raise FipaError("adaptive rank: constant must be positive, max_rank at least 1")

    def choose(
        self, round_number: int, own: float, total: float, examples: int = 1
    ) -> tuple[RelativeThreshold, str | None]:
        """The threshold, and what had to be clamped."""
        size = round_number * (own + total) * (examples if self.sums else 1)
        raw = self.constant / size if size > 0 else math.inf
        share = min(raw, 0.99)
        note = f"rank threshold {raw:.3g} clamped to 0.99" if share != raw else None
        return RelativeThreshold(share, self.max_rank), note


@dataclass(frozen=True)
class AdaptiveSteps:
    r"""Paper's adaptive local steps: $\tau_m = \lceil \log(C / (k |g_m|)) / \log(1 - \eta \lambda_{min}) \rceil$.

    Clamped to [1, `most`]; $\lambda_{min}$ is the smallest eigenvalue that the sketch keeps, $\eta$ the learning rate.
    With `sums`, gradient and eigenvalue are sums over the examples instead of means, as in the published code.
    """

    constant: float = 0.1
    most: int = 200
    sums: bool = False

    def __post_init__(self) -> None:
        if not self.constant > 0 or self.most < 1:
            raise FipaError("adaptive steps: constant must be positive, most at least 1")

    def choose(
        self, round_number: int, own: float, lr: float, smallest: float, examples: int = 1
    ) -> tuple[int, str | None]:
        """The number of steps, and what had to be clamped."""
        own, smallest = (value * (examples if self.sums else 1) for value in (own, smallest))
        wanted, shrink = self.constant / (round_number * own) if own > 0 else math.inf, 1 - lr * smallest
        if wanted >= 1:
            return 1, f"gradient norm {own:.3g} already within {self.constant:g} / k: 1 local step"
        if shrink <= 0:
            return 1, f"lr x smallest kept eigenvalue = {lr * smallest:.3g} is not below 1: 1 local step"
        steps = math.log(wanted) / math.log(shrink) if shrink < 1 else math.inf
        if steps > self.most:
            return self.most, f"local steps {steps:.3g} clamped to {self.most}"
        return max(1, math.ceil(steps)), None
