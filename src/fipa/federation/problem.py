"""What a federation works on: a model, the clients' data, and a measure of success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fipa.clients.client import Client
from fipa.curvature.terms import LossName, Residual
from fipa.errors import FipaError
from fipa.layout import Layout, ParamSelection, parameters_of


@dataclass(frozen=True, eq=False)
class Curves:
    """A picture for the report: a function of one variable, and what the model makes of it."""

    x: Tensor  # (n)
    target: Tensor | None  # (n), if it is known
    predict: Callable[[nn.Module], Tensor]  # (n)
    regions: tuple[tuple[float, float], ...] = ()  # each client's part, from and to
    title: str = "fit after the last round"
    x_label: str = "x"
    y_label: str = "u(x)"
    error: bool = False  # draw the pointwise error as well
    target_label: str = "target"


@dataclass(frozen=True, eq=False)
class Maps:
    """A picture for the report: a function of two variables on a grid (rows: y ascending, columns: x)."""

    extent: tuple[float, float, float, float]  # x from, x to, y from, y to
    target: Tensor | None  # if it is known
    predict: Callable[[nn.Module], Tensor]
    boxes: tuple[tuple[float, float, float, float] | None, ...] = ()  # each client's part; None if it is not in here
    title: str = "after the last round"
    x_label: str = "x"
    y_label: str = "y"
    target_label: str = "target"


@dataclass(frozen=True, eq=False)
class Shares:
    """A picture for the report: how many examples of each class a client holds."""

    counts: Tensor  # (clients x classes)
    classes: tuple[str, ...]


Picture = Curves | Maps | Shares


class Problem:
    """A model, clients and a metric.

    Parameters
    ----------
    model
        The module, with its initial parameters.
    clients
        One `fipa.Residual` (or several, or a `fipa.Client`) for each client; with `loss="mse"` or `"cross_entropy"`,
        tensors (x, y).
    metric
        `metric(model)` is the number to report after each round.
    name, goal, scale
        What the metric is called, whether less (`"min"`) or more (`"max"`) is better, and the axis of plots.
    picture
        `Curves`, `Maps` or `Shares` for the report.
    params
        Which parameters are trained and sent: see `fipa.parameters_of`.
    resample
        `resample(round_number)` gives the clients new data for a round, of the same form as `clients`; the same ones
        whenever it is asked.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Client | Residual | Sequence[Any]],
        metric: Callable[[nn.Module], float | Tensor],
        *,
        loss: LossName = "least_squares",
        name: str = "test error",
        goal: Literal["min", "max"] = "min",
        scale: Literal["log", "linear"] = "log",
        picture: Picture | None = None,
        params: ParamSelection = None,
        resample: Callable[[int], Sequence[Client]] | None = None,
    ) -> None:
        if not clients:
            raise FipaError("a problem needs at least one client")
        self.model = model
        self.clients = tuple(Client.of(client, loss) for client in clients)
        self.metric = metric
        self.name = name
        self.goal: Literal["min", "max"] = goal
        self.scale: Literal["log", "linear"] = scale
        self.picture = picture
        self.resample = resample
        self.layout = Layout.of(parameters_of(model, params))
        self.initial = self.theta()
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise FipaError(f"{path}: batch norm's running statistics are no parameters, use GroupNorm instead")

    def like(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        metric: Callable[[nn.Module], float | Tensor],
        params: ParamSelection,
    ) -> Problem:
        """This problem with another model, other data and another choice of parameters; without its picture."""
        return Problem(
            model, clients, metric, name=self.name, goal=self.goal, scale=self.scale, params=params,
            resample=self.resample,
        )  # fmt: skip

    @property
    def least_squares(self) -> bool:
        """Whether every client's loss is a sum of squares, for which step control is on by default."""
        return all(client.loss in ("mse", "least_squares") for client in self.clients)

    def theta(self) -> Tensor:
        """The model's present parameters, flat."""
        params = dict(self.model.named_parameters())
        return self.layout.flatten({name: params[name] for name in self.layout.names})

    def load(self, theta: Tensor) -> nn.Module:
        """The model with these parameters."""
        params = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.layout.unflatten(theta).items():
                params[name].copy_(value)
        return self.model

    def evaluate(self, theta: Tensor) -> float:
        """The metric at flat parameters."""
        model = self.load(theta).eval()
        with torch.no_grad():
            return float(self.metric(model))
