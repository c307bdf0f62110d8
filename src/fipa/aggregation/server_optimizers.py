r"""Server optimisers (Reddi et al., 2021): the change of any rule taken as a pseudo-gradient.

Their state travels through `aggregate(..., state=...)` and `result.state`: the rules themselves stay pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.rule import Rule, Step, check_not_negative
from fipa.errors import FipaError, LayoutError

State = dict[str, Tensor]


@dataclass(frozen=True)
class FedAvgM:
    r"""Momentum on the server, $v \leftarrow \mu v + \Delta$, $\theta \leftarrow \theta + \eta v$.

    Parameters
    ----------
    momentum
        $\mu$, from 0 to below 1.
    lr
        $\eta$, the server's learning rate.
    inner
        The rule whose step $\Delta$ is taken as the pseudo-gradient.
    """

    momentum: float = 0.9
    lr: float = 1.0
    inner: Rule = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        check_not_negative(self, momentum=self.momentum, lr=self.lr)
        _check_below_one(self, momentum=self.momentum)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        own, inner = _split(state)
        step = self.inner(cohort, inner)
        v = self.momentum * buffer(own, "momentum", step.change, 0.0) + step.change
        return replace(step, change=self.lr * v, state=_join({"momentum": v}, step.state))


@dataclass(frozen=True)
class _Adaptive(ABC):
    r"""$m \leftarrow \beta_1 m + (1 - \beta_1) \Delta$, then $\theta \leftarrow \theta + \eta m / (\sqrt v + \tau)$.

    v starts at $\tau^2$, and there is no bias correction, as in the paper of Reddi et al.

    Parameters
    ----------
    lr
        $\eta$, the server's learning rate.
    beta1
        $\beta_1$, the momentum.
    beta2
        $\beta_2$, how slowly the mean square forgets.
    tau
        $\tau$: the larger, the less each coordinate has a step of its own.
    inner
        The rule whose step $\Delta$ is taken as the pseudo-gradient.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    inner: Rule = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        check_not_negative(self, lr=self.lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)
        _check_below_one(self, beta1=self.beta1, beta2=self.beta2)
        if self.tau == 0:
            raise FipaError(f"{type(self).__name__}(tau=0): a parameter that never moved would be 0 / 0")

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:
        own, inner = _split(state)
        step = self.inner(cohort, inner)
        m = self.beta1 * buffer(own, "mean", step.change, 0.0) + (1 - self.beta1) * step.change
        v = self._second_moment(buffer(own, "square", step.change, self.tau**2), step.change.square())
        change = self.lr * m / (v.sqrt() + self.tau)
        return replace(step, change=change, state=_join({"mean": m, "square": v}, step.state))

    @abstractmethod
    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    r"""Adam on the server, $v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2$."""

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    r"""Yogi on the server, $v \leftarrow v - (1 - \beta_2) \Delta^2 \mathrm{sign}(v - \Delta^2)$."""

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    r"""Adagrad on the server, $v \leftarrow v + \Delta^2$; momentum is off by default."""

    beta1: float = 0.0

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


def _check_below_one(rule: object, **values: float) -> None:
    for name, value in values.items():
        if value >= 1:
            raise FipaError(f"{type(rule).__name__}({name}={value}): must be below 1, or the past never fades")


def _split(state: Mapping[str, Tensor]) -> tuple[State, State]:
    """A wrapper's own buffers, and those of the rule inside it."""
    inner = {key.removeprefix("inner."): t for key, t in state.items() if key.startswith("inner.")}
    return {key: t for key, t in state.items() if not key.startswith("inner.")}, inner


def _join(own: State, inner: State) -> State:
    return own | {f"inner.{key}": t for key, t in inner.items()}


def buffer(state: Mapping[str, Tensor], name: str, like: Tensor, start: float) -> Tensor:
    """What the state holds under this name, checked to be like the update; filled with `start` at first."""
    found = state.get(name)
    if found is None:
        return torch.full_like(like, start)
    if found.shape != like.shape:
        raise LayoutError(
            f"the server state {name!r} has {found.numel()} elements, the update {like.numel()}: "
            "start with state=None when the trained parameters change"
        )
    if found.dtype != like.dtype or found.device != like.device:
        raise LayoutError(
            f"the server state {name!r} is {found.dtype} on {found.device}, the update {like.dtype} on "
            f"{like.device}: convert it with .to(...)"
        )
    return found
