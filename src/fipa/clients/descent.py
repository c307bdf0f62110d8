"""Local training along gradients: SGD, Adam, and FedProx, which is their `proximal` term."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fipa.clients.objective import OFTEN, StackedObjective
from fipa.clients.rule import LocalRule, LocalWork, Memory
from fipa.errors import FipaError


@dataclass(frozen=True)
class Descent(LocalRule):
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
    bfloat16
        Let torch run products and convolutions of a model in single precision with 8 bits of mantissa (autocast, on
        the CPU). Parameters, sums and losses stay as they are. Faster on some processors; models that compiled loops
        run stay as exact as they were.
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch: int | None = None
    weight_decay: float = 0.0
    proximal: float = 0.0
    lr_decay: float = 1.0
    clip: float | None = None
    bfloat16: bool = False

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

    def steps_for(self, examples: int) -> int:  # noqa: D102
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(examples / (self.batch or examples))

    def lr_at(self, round_number: int, scale: float = 1.0) -> float:  # noqa: D102
        return self.lr * scale * self.lr_decay ** (round_number - 1)

    @abstractmethod
    def optimizer(self, thetas: Tensor, lr: float) -> Optimizer:
        """A fresh optimizer of one parameter."""

    def correction(self, theta: Tensor, memory: Memory, shared: Memory) -> Tensor | None:
        """What is added to every gradient (p) of a client in a round; None for nothing."""
        return None

    def corrections(self, work: LocalWork) -> Tensor | None:
        """The corrections of all clients (M x p); None if there are none."""
        found = [self.correction(work.theta, memory, work.shared) for memory in work.memories]
        if all(one is None for one in found):
            return None
        return torch.stack([torch.zeros_like(work.theta) if one is None else one for one in found])

    def train(self, work: LocalWork) -> Tensor:  # noqa: D102
        return descend(
            work.objective, work.theta, self, work.steps, lr=work.lr, generators=work.generators,
            correction=self.corrections(work),
        )  # fmt: skip


@dataclass(frozen=True)
class Adam(Descent):
    """Adam with torch's defaults. `fused` computes the same numbers with fewer passes over memory."""

    lr: float = 1e-4

    def optimizer(self, thetas: Tensor, lr: float) -> Optimizer:  # noqa: D102
        return torch.optim.Adam([thetas], lr=lr, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class SGD(Descent):
    """Stochastic gradient descent.

    Parameters
    ----------
    momentum
        Momentum of local training; it starts at zero in every round.
    """

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise FipaError(f"SGD: momentum must be in [0, 1), got {self.momentum}")

    def optimizer(self, thetas: Tensor, lr: float) -> Optimizer:  # noqa: D102
        return PlainSGD(thetas, lr, self.momentum, self.weight_decay)


class Optimizer(Protocol):
    """What `descend` needs of an optimizer: a step along the gradient in `.grad`, as torch's have."""

    def step(self) -> Any:
        """Move the parameters."""


class PlainSGD:
    """`torch.optim.SGD` of one parameter, to the last bit, without what torch does around every step."""

    def __init__(self, thetas: Tensor, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self._thetas = thetas
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._velocity: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters."""
        gradient = self._thetas.grad
        assert gradient is not None
        if self._weight_decay:
            gradient = gradient.add(self._thetas, alpha=self._weight_decay)
        if self._momentum:
            before = self._velocity
            gradient = gradient.clone() if before is None else before.mul_(self._momentum).add_(gradient)
            self._velocity = gradient
        self._thetas.add_(gradient, alpha=-self._lr)


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
    if rule.bfloat16 and theta.dtype != torch.float32:
        raise FipaError(f"bfloat16 is for models in float32, and this one is in {theta.dtype}: leave it out")
    thetas = theta.expand(objective.size, -1).clone().requires_grad_()
    optimizer = rule.optimizer(thetas, lr)
    batches = Batches(objective.lengths, rule.batch, generators) if rule.batch else None
    limits, shortest, longest = torch.tensor(steps), min(steps, default=0), max(steps, default=0)
    for step in range(longest):
        chosen = batches.draw(step) if batches else None
        with torch.autocast("cpu", torch.bfloat16) if rule.bfloat16 else nullcontext():
            if extra is None:
                gradient = objective.gradients(thetas.detach(), chosen, generators, often=longest >= OFTEN)
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
