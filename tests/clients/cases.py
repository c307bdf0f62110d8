"""Clients of every kind of loss, and their losses written out once more in plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fipa import Client, Layout, Residual, parameters_of
from fipa.clients.objective import Objective

DOUBLE = torch.float64


def network(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    """Two inputs, three tanh units."""
    rng = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng, dtype=DOUBLE))
    return model


def misfit(u: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return u(x)[:, 0] - y


def edge(u: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Two residuals per example, not linear in the output."""
    z = u(x)[:, 0]
    return torch.stack([z.square(), z - x[:, 1]], dim=1)


def client(kind: str, seed: int, n: int = 5) -> Client:
    rng = torch.Generator().manual_seed(100 + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=DOUBLE)

    if kind == "mse":
        return Client((draw(n, 2), draw(n, 2)), "mse")
    if kind == "cross_entropy":
        return Client((draw(n, 2), torch.randint(3, (n,), generator=rng)), "cross_entropy")
    if kind == "plain":
        return Client((Residual(misfit, draw(n, 2), draw(n)),))
    terms = (  # one weight per example, one per residual, one for all
        Residual(misfit, draw(n, 2), draw(n), weight=draw(n).square()),
        Residual(edge, draw(3, 2), weight=draw(3, 2).square()),
        Residual(edge, draw(2, 2), weight=0.3),
    )
    return Client(terms)


OUTPUTS = {"plain": 1, "terms": 1, "mse": 2, "cross_entropy": 3}
KINDS = tuple(OUTPUTS)


def loss_by_hand(model: nn.Module, one: Client, index: list[Tensor] | None = None) -> Tensor:
    """With sums over examples and residuals in the place of tensor algebra."""
    if one.loss == "least_squares":
        total = torch.zeros((), dtype=DOUBLE)
        for place, term in enumerate(one.data):
            chosen = range(len(term.inputs[0])) if index is None else index[place].tolist()
            part = torch.zeros((), dtype=DOUBLE)
            for i in chosen:
                rows = term.function(model, *(t[i : i + 1] for t in term.inputs)).reshape(-1)
                weight = torch.as_tensor(term.weight, dtype=DOUBLE)
                part = part + ((weight[i] if weight.dim() else weight) * rows.square()).sum()
            total = total + 0.5 * part / len(chosen)
        return total
    x, y = one.data if index is None else (t[index[0]] for t in one.data)
    z = model(x)
    if one.loss == "mse":
        return 0.5 * (z - y).square().sum() / len(y)
    return sum(z[i].logsumexp(0) - z[i, y[i]] for i in range(len(y))) / len(y)


def gradient_by_hand(
    model: nn.Module, names: tuple[str, ...], one: Client, index: list[Tensor] | None = None
) -> Tensor:
    params = dict(model.named_parameters())
    parts = torch.autograd.grad(loss_by_hand(model, one, index), [params[name] for name in names])
    return torch.cat([part.reshape(-1) for part in parts])


def layout_of(model: nn.Module, params: str | None = None) -> Layout:
    return Layout.of(parameters_of(model, params))


def objectives(model: nn.Module, clients: list[Client], params: str | None = None) -> list[Objective]:
    return [Objective(model, layout_of(model, params), one) for one in clients]


def at(model: nn.Module, layout: Layout, flat: Tensor) -> nn.Module:
    """The model with these parameters, in place."""
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in layout.unflatten(flat).items():
            params[name].copy_(value)
    return model
