"""A problem in which only some of a model's parameters are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fipa.curvature.data import cast
from fipa.curvature.functional import inputs_of
from fipa.curvature.modes import evaluation_mode
from fipa.federation.problem import Problem
from fipa.layout import parameters_of

BLOCK = 250  # examples that go through the frozen part at once


def focus(problem: Problem, params: str | Sequence[str]) -> Problem:
    """The same problem with the selected parameters as the only ones that are trained, sketched, sent and aggregated.

    If they are all of the model's last module (a head), that module becomes the model, and what the frozen rest makes
    of a client's examples its data: the rest runs once for each client of a round, not once for every step. Local
    training then does not augment its batches.
    """
    names = tuple(parameters_of(problem.model, params))
    found = _head(problem, names)
    if found is None:
        return problem.like(problem.model, problem.clients, problem.metric, names)
    path, head = found
    features = Features(problem.model, path, problem.clients[0].transform)
    clients = [replace(client, transform=features, augment=None) for client in problem.clients]
    through = getattr(problem.metric, "through", None)
    if through is None:  # a metric of the user's own needs the whole model, which holds the head
        whole = problem.model

        def metric(_: nn.Module) -> Any:
            return problem.metric(whole)

    else:
        metric = through(features)
    return problem.like(head, clients, metric, [name.removeprefix(f"{path}.") for name in names])


@dataclass(frozen=True, eq=False)
class Features:
    """What the module at `path` of a frozen model is given for inputs x."""

    model: nn.Module
    path: str
    transform: Any

    def __call__(self, x: Tensor) -> Tensor:
        """What it is given for all rows of x, one block after the other."""
        with torch.no_grad(), evaluation_mode(self.model):
            return torch.cat([self._block(block) for block in x.split(BLOCK)])

    def _block(self, x: Tensor) -> Tensor:
        with inputs_of(self.model, [self.path]) as seen:
            self.model(cast(x if self.transform is None else self.transform(x), next(self.model.parameters())))
        return seen[self.path]


def _head(problem: Problem, names: Sequence[str]) -> tuple[str, nn.Module] | None:
    """The module that holds all of these parameters and no others, if the model ends with it."""
    first = problem.clients[0]
    alike = all((client.loss, client.transform) == (first.loss, first.transform) for client in problem.clients)
    if not alike or first.loss == "least_squares" or problem.resample is not None:
        return None
    parts = _common([name.split(".")[:-1] for name in names])
    while parts:
        path = ".".join(parts)
        head = problem.model.get_submodule(path)
        if {f"{path}.{name}" for name, _ in head.named_parameters()} != set(names):
            return None
        if _ends_with(problem, head):
            return path, head
        parts = parts[:-1]
    return None


def _ends_with(problem: Problem, head: nn.Module) -> bool:
    """Whether the model calls this module once, with one tensor, and returns what it returns."""
    model, one = problem.model, problem.clients[0]
    calls: list[tuple[Any, Any, Any]] = []
    handle = head.register_forward_hook(
        lambda _, args, keywords, output: calls.append((args, keywords, output)), with_kwargs=True
    )
    try:
        with torch.no_grad(), evaluation_mode(model):
            x, _ = replace(one, data=tuple(t[:1] for t in one.data), num_examples=0).tensors
            output = model(cast(x, next(model.parameters())))
    finally:
        handle.remove()
    if len(calls) != 1:
        return False
    args, keywords, returned = calls[0]
    return len(args) == 1 and not keywords and returned is output


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The longest beginning that all have."""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
