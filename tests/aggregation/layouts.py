"""The same updates with other strides and at other addresses, for every rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import fipa
from fipa.aggregation.shared import SharedFIPA

# By the names of the registry, with those settings that go another way.
RULES: dict[str, fipa.Rule] = {
    "fedavg": fipa.FedAvg(),
    "fipa": fipa.FIPA(),
    "fipa, damped": fipa.FIPA(damping=0.3),
    "fipa, floor": fipa.FIPA(damping=0.001, floor=0.01),
    "completed-fipa": fipa.CompletedFIPA(),
    "completed-fipa, damped": fipa.CompletedFIPA(damping=0.3),
    "additive-fipa": fipa.AdditiveFIPA(),
    "additive-fipa, completed": fipa.AdditiveFIPA(damping=0.3, completed=True),
    "diagonal-fisher": fipa.DiagonalFisher(damping=0.1),
    "foof": fipa.FOOF(),
    "fedavgm": fipa.FedAvgM(inner=fipa.FIPA(damping=0.3)),
    "fedadam": fipa.FedAdam(),
    "fedyogi": fipa.FedYogi(),
    "fedadagrad": fipa.FedAdagrad(inner=fipa.FOOF()),
    "fedvarp": fipa.FedVARP(),
    "lbfgs": fipa.LBFGS(),
    "fed3r": fipa.Fed3R(),
    "fedncm": fipa.FedNCM(),
    "shared-fipa": SharedFIPA(damping=0.3),
    "shared-fipa, within a radius": SharedFIPA(radius=0.1),
    "private-fedavg": fipa.PrivateFedAvg(seed=3),
    "private-additive-fipa": fipa.PrivateAdditiveFIPA(noise=0.01, seed=3),
    "private-additive-fipa, without noise": fipa.PrivateAdditiveFIPA(noise=0.0, completed=False, seed=3),
    "private-shared-fipa": fipa.PrivateSharedFIPA(noise=0.01, radius=0.1, seed=3),
}


def padded(t: Tensor) -> Tensor:
    """A part of a wider matrix, or every other number of a vector."""
    if t.dim() == 0:
        return t
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan).to(t.dtype)
    part = wide[..., : t.shape[-1]] if t.dim() > 1 else wide[..., :-1:2]
    return part.copy_(t)


def transposed(t: Tensor) -> Tensor:
    """Column by column; a vector as the column of a matrix."""
    if t.dim() == 1:
        return torch.stack([t, t], dim=1)[:, 1]
    return t.mT.contiguous().mT if t.dim() > 1 else t


def odd_address(t: Tensor) -> Tensor:
    """Dense, but one number after a multiple of 64 bytes."""
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


def column_at_odd_address(t: Tensor) -> Tensor:
    """Both."""
    return odd_address(t.mT).mT if t.dim() > 1 else odd_address(t)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "padded": padded,
    "transposed": transposed,
    "odd address": odd_address,
    "transposed at an odd address": column_at_odd_address,
}


def updates_for(rule: fipa.Rule, dtype: torch.dtype, parameters: int, rank: int, seed: int) -> list[fipa.ClientUpdate]:
    """Three clients with the curvature that `rule` needs."""
    rng = torch.Generator().manual_seed(seed)
    updates = []
    for client in range(3):
        delta = torch.randn(parameters, generator=rng, dtype=dtype)
        curvature = _curvature(rule, delta, 10 + client, rank + client, rng)
        updates.append(fipa.ClientUpdate(delta, 10 + client, curvature, client))
    return updates


def formed(updates: list[fipa.ClientUpdate], form: Callable[[Tensor], Tensor]) -> list[fipa.ClientUpdate]:
    """The same updates with all tensors in the given form."""
    return [replace(u, delta=form(u.delta), sketch=None if u.sketch is None else u.sketch.map(form)) for u in updates]


def _curvature(
    rule: fipa.Rule, delta: Tensor, examples: int, rank: int, rng: torch.Generator
) -> fipa.CurvatureSummary | None:
    p = len(delta)
    rule = getattr(rule, "inner", rule)
    factor = torch.linalg.qr(torch.randn(p, rank, generator=rng, dtype=delta.dtype)).Q.contiguous()
    values = torch.rand(rank, generator=rng, dtype=delta.dtype).sort(descending=True).values + 0.1
    if isinstance(rule, fipa.FIPA | fipa.CompletedFIPA):
        return fipa.Sketch(factor, values, fipa.Layout(("w",), ((p,),)))
    if isinstance(rule, fipa.AdditiveFIPA | fipa.PrivateAdditiveFIPA):
        omega = fipa.random_test_matrix(p, 9, 1, delta.dtype)
        products, response = (factor @ (values[:, None] * (factor.T @ v)) for v in (omega, delta[:, None]))
        return fipa.AdditiveStatistics(
            products, response[:, 0].clone(), delta, examples, 1, fipa.Layout(("w",), ((p,),))
        )
    if isinstance(rule, SharedFIPA):
        basis = fipa.random_test_matrix(p, 9, 1, delta.dtype)  # the same for all clients
        inside = factor.T @ torch.linalg.qr(basis).Q
        matrix = inside.T @ (values[:, None] * inside)
        moment = delta.new_zeros(0) if rule.radius else matrix @ delta[:9]
        matrix = (matrix + matrix.T) / 2
        return fipa.BasisCurvature(matrix, moment, torch.linalg.qr(basis).Q, fipa.Layout(("w",), ((p,),)))
    if isinstance(rule, fipa.DiagonalFisher):
        return fipa.DiagonalCurvature(factor.square().sum(1), fipa.Layout(("w",), ((p,),)))
    if isinstance(rule, fipa.Fed3R | fipa.FedNCM):
        classes = next(c for c in (10, 7, 5, 3, 2, 1) if p % c == 0)
        layout, side = fipa.Layout(("weight", "bias"), ((classes, p // classes - 1), (classes,))), p // classes
        x = torch.randn(2 * rank, side, generator=rng, dtype=delta.dtype)
        if isinstance(rule, fipa.Fed3R):
            return fipa.RidgeStatistics(x.T @ x, x[:classes].T.contiguous(), layout, examples)
        return fipa.ClassSums(x[:classes, 1:].clone(), torch.full((classes,), 3.0, dtype=delta.dtype), layout, examples)
    if isinstance(rule, fipa.FOOF):
        inputs = 29  # the covariance's side is one more; what is left over is averaged
        outputs = p // (inputs + 1)
        shapes = ((outputs, inputs), (outputs,), (p - outputs * (inputs + 1),))
        x = torch.randn(50, inputs + 1, generator=rng, dtype=delta.dtype)
        layout = fipa.Layout(("weight", "bias", "rest"), shapes)
        return fipa.InputCovariance({"weight": ("bias", x.T @ x / 50)}, layout)
    return None


def same_bits(rule: fipa.Rule, dtype: torch.dtype, parameters: int, rank: int) -> list[str]:
    """Forms in which two rounds give other bits, in parameters, state or diagnostics, than as tensors are made."""

    made = [updates_for(rule, dtype, parameters, rank, seed) for seed in (1, 2)]

    def rounds(form: Callable[[Tensor], Tensor]) -> list[fipa.Result[Tensor]]:
        theta, state, results = torch.zeros(parameters, dtype=dtype), {}, []
        for updates in made:
            saved = {name: form(t) for name, t in state.items()}
            result = fipa.aggregate(form(theta), formed(updates, form), rule, saved)
            theta, state = result.theta, result.state
            results.append(result)
        return results

    expected = rounds(FORMS["as it is"])
    return [name for name, form in FORMS.items() if not all(map(_equal, rounds(form), expected))]


def _equal(one: fipa.Result[Tensor], other: fipa.Result[Tensor]) -> bool:
    return (
        torch.equal(one.theta, other.theta)
        and list(one.state) == list(other.state)
        and all(torch.equal(t, other.state[name]) for name, t in one.state.items())
        and one.diagnostics == other.diagnostics
    )
