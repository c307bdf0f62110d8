"""Local training: SGD, Adam, FedProx (their `proximal` term), SCAFFOLD and Gauss-Newton."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.clients.objective import StackedObjective
from fipa.curvature.sketch import Sketch
from fipa.errors import FipaError


@dataclass(frozen=True)
class Descent(ABC):
    r"""What first-order rules share. The optimizer starts afresh every round.

    Parameters
    ----------
    lr
        Learning rate.
    steps, epochs
        Length of local training, one of the two.
    batch
        Examples per step and term of the loss; None for all of them. Batches are drawn without replacement in each
        epoch.
    weight_decay
        Coefficient of $\frac12 |\theta|^2$.
    proximal
        FedProx's $\mu$: adds $\frac\mu2 |\theta - \theta^{(k)}|^2$, which keeps clients near the broadcast model.
    lr_decay
        The learning rate of round k is multiplied by this to the power k - 1.
    clip
        Longest gradient, by its norm; None for any length.
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch: int | None = None
    weight_decay: float = 0.0
    proximal: float = 0.0
    lr_decay: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if (self.steps is None) == (self.epochs is None):
            raise FipaError(f"{name}: give steps or epochs, one of the two")
        if any(value is not None and value < 1 for value in (self.steps, self.epochs, self.batch)):
            raise FipaError(f"{name}: steps, epochs and batch must be at least 1")
        if self.clip is not None and not self.clip > 0:
            raise FipaError(f"{name}: clip must be positive, got {self.clip}")
        if not self.lr > 0 or not self.lr_decay > 0 or min(self.weight_decay, self.proximal) < 0:
            raise FipaError(f"{name}: lr and lr_decay must be positive, weight_decay and proximal not negative")

    def steps_for(self, examples: int) -> int:
        """Number of steps for a client with that many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(examples / (self.batch or examples))

    @abstractmethod
    def optimizer(self, thetas: Tensor, lr: float) -> torch.optim.Optimizer:
        """A fresh optimizer of one parameter."""


@dataclass(frozen=True)
class Adam(Descent):
    """Adam with torch's defaults. `fused` computes the same numbers with fewer passes over memory."""

    lr: float = 1e-4

    def optimizer(self, thetas: Tensor, lr: float) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.Adam([thetas], lr=lr, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class SGD(Descent):
    """Stochastic gradient descent."""

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise FipaError(f"SGD: momentum must be in [0, 1), got {self.momentum}")

    def optimizer(self, thetas: Tensor, lr: float) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.SGD([thetas], lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Scaffold(Descent):
    r"""SGD along $g_m - c_m + c$, with control variates that estimate each client's and the mean gradient.

    Karimireddy et al. (2020), option II: after $\tau$ steps, $c_m^+ = c_m - c - \Delta\theta_m / (\tau\eta)$, and the
    server moves c by the mean change of all clients' variates.
    """

    lr: float = 1e-2

    def optimizer(self, thetas: Tensor, lr: float) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.SGD([thetas], lr=lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class GaussNewton:
    r"""One local Gauss-Newton step $\Delta\theta_m = -(\hat H_m + \mu I)^\dagger g_m$, in the span of $\hat H_m$.

    $\hat H_m$ is the sketch that the client sends. A client that sends none takes all of its curvature: without damping
    the exact, minimum-norm solution of its linearised problem. For the paper's rule the two are the same: the server
    sees an update only through the sketch.

    Parameters
    ----------
    damping
        $\mu$.
    cutoff
        Eigenvalues below this share of the largest count as zero.
    whole
        Step outside of the span as well, $-(\hat H_m + \mu I)^{-1} g_m$ with $\mu > 0$: for rules with that `floor`,
        which then have the whole gradient to work with.
    """

    damping: float = 0.0
    cutoff: float = 0.0
    whole: bool = False

    def __post_init__(self) -> None:
        if self.damping < 0 or self.cutoff < 0:
            raise FipaError("GaussNewton: damping and cutoff must not be negative")
        if self.whole and not self.damping:
            raise FipaError("GaussNewton: whole needs a damping, the same as the server's floor")

    def __call__(self, sketch: Sketch, gradient: Tensor) -> Tensor:
        """The update (p)."""
        kept = sketch.eigenvalues > self.cutoff * sketch.eigenvalues[:1]
        inverse = torch.where(kept, 1 / (sketch.eigenvalues + self.damping), 0)
        inside = sketch.eigenvectors.T @ gradient
        if not self.whole:
            return -(sketch.eigenvectors @ (inverse * inside))
        return -(sketch.eigenvectors @ ((inverse - 1 / self.damping) * inside) + gradient / self.damping)


LocalRule = Adam | SGD | Scaffold | GaussNewton
Extra = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]  # a loss on features, inputs x and labels y


def descend(
    objective: StackedObjective,
    theta: Tensor,
    rule: Descent,
    steps: Sequence[int],
    *,
    lr: float,
    generators: Sequence[torch.Generator],
    correction: Tensor | None = None,
    extra: Extra | None = None,
    levels: Sequence[str] = (),
) -> Tensor:
    """Train M clients of one form side by side from `theta` (p); return their updates (M x p).

    Parameters
    ----------
    steps
        For each client; those who need fewer than others wait.
    generators
        Of each client's batches.
    correction
        Added to the gradients (M x p): SCAFFOLD's $c - c_m$.
    extra, levels
        A loss on the features at these levels, for a client that is trained alone.
    """
    thetas = theta.expand(objective.size, -1).clone().requires_grad_()
    optimizer = rule.optimizer(thetas, lr)
    batches = Batches(objective.lengths, rule.batch, generators) if rule.batch else None
    limits, shortest = torch.tensor(steps), min(steps, default=0)
    for step in range(max(steps, default=0)):
        chosen = batches.draw(step) if batches else None
        if extra is None:
            gradient = objective.gradients(thetas.detach(), chosen, generators)
        else:
            gradient = objective.gradients_with(extra, levels, thetas.detach(), chosen, generators)
        if rule.proximal:
            gradient = gradient.add(thetas.detach() - theta, alpha=rule.proximal)
        if correction is not None:
            gradient = gradient + correction
        if rule.clip is not None:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient = gradient * (rule.clip / norms).clamp(max=1)
        thetas.grad = gradient
        before = thetas.detach().clone() if step >= shortest else None
        optimizer.step()
        if before is not None:
            with torch.no_grad():
                done = limits <= step
                thetas[done] = before[done]
    return thetas.detach() - theta


class Batches:
    """Which examples each step sees: per client and term, a new permutation in every epoch."""

    def __init__(self, lengths: Sequence[int], batch: int, generators: Sequence[torch.Generator]) -> None:
        self._lengths = lengths
        self._batch = batch
        self._generators = generators
        self._steps_per_epoch = math.ceil(lengths[0] / batch)
        self._orders: list[Tensor] = []

    def draw(self, step: int) -> list[Tensor]:
        """Indices (M x batch) into each term; terms shorter than the first start over within an epoch."""
        place = step % self._steps_per_epoch
        if place == 0:
            self._orders = [
                torch.stack([torch.randperm(n, generator=g) for g in self._generators]) for n in self._lengths
            ]
        start = place * self._batch
        size = min(self._batch, self._lengths[0] - start)
        return [_part(order, start, size) for order in self._orders]


def _part(order: Tensor, start: int, size: int) -> Tensor:
    """That many columns from there on, beginning anew at the end, but none of them twice."""
    length = order.shape[1]
    if start + size <= length:
        return order[:, start : start + size]
    return order[:, torch.arange(start, start + min(size, length)) % length]
