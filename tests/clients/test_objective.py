"""Losses and gradients of clients side by side against each client's own, by plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clients.cases import (
    DOUBLE,
    KINDS,
    OUTPUTS,
    at,
    client,
    edge,
    gradient_by_hand,
    layout_of,
    loss_by_hand,
    misfit,
    network,
    objectives,
)
from fipa import Client, FipaError, Residual
from fipa.clients.objective import StackedObjective

STACKS = {
    (kind, size): StackedObjective(objectives(network(OUTPUTS[kind]), [client(kind, seed) for seed in range(size)]))
    for kind in KINDS
    for size in (1, 3)
}


def rows_at(kind: str, size: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, layout_of(network(OUTPUTS[kind])).numel, generator=rng, dtype=DOUBLE)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_equal_each_clients_own(kind: str, size: int) -> None:
    """At a point of its own for each client; twice, since the first call traces what later ones replay."""
    stack, model = STACKS[kind, size], network(OUTPUTS[kind])
    layout = layout_of(model)
    for seed in (0, 1):
        thetas = rows_at(kind, size, seed)
        losses, gradients = stack.losses(thetas), stack.gradients(thetas)
        assert losses.shape == (size,)
        for m in range(size):
            at(model, layout, thetas[m])
            expected = loss_by_hand(model, client(kind, m)).detach()
            torch.testing.assert_close(losses[m], expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(
                gradients[m], gradient_by_hand(model, layout.names, client(kind, m)), rtol=1e-11, atol=1e-13
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_alone_that_is_asked_often(kind: str) -> None:
    """Its gradient is the same if it is traced, at other points and on other examples than at first."""
    model = network(OUTPUTS[kind])
    stack = StackedObjective(objectives(model, [client(kind, 0)]), alone=True)
    other = StackedObjective(objectives(model, [client(kind, 1)]), stack._traces, alone=True)
    index = [torch.tensor([[n - 1, 0]]) for n in stack.lengths]
    for seed, one, chosen in [
        (0, stack, None),
        (1, stack, None),
        (2, other, None),
        (3, stack, index),
        (4, other, index),
    ]:
        thetas = rows_at(kind, 1, seed)
        often = one.gradients(thetas, chosen, often=True)
        torch.testing.assert_close(often, one.gradients(thetas, chosen), rtol=1e-12, atol=1e-14)
    assert len(stack._traces) == (0 if kind == "cross_entropy" else 2)


def test_a_client_is_not_traced_unless_it_is_asked_for() -> None:
    stack = StackedObjective(objectives(network(OUTPUTS["mse"]), [client("mse", 0)]))
    stack.gradients(rows_at("mse", 1), often=True)
    assert not stack._traces


def test_a_tensor_in_two_places_is_not_taken_for_one() -> None:
    x, y = torch.rand(5, 2, dtype=DOUBLE), torch.rand(5, 2, dtype=DOUBLE)
    model = nn.Linear(2, 2, dtype=DOUBLE)
    same, apart = objectives(model, [Client((x, x), loss="mse"), Client((x, y), loss="mse")])
    first = StackedObjective([same], alone=True)
    thetas = torch.rand(1, 6, dtype=DOUBLE)
    first.gradients(thetas, often=True)
    second = StackedObjective([apart], first._traces, alone=True)
    torch.testing.assert_close(second.gradients(thetas, often=True), second.gradients(thetas))


class Branching(nn.Linear):
    """Another function where its input is large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(x.detach().abs().max()) > 1 else 1)


class Counting(nn.Linear):
    """With a number that is no parameter."""

    def __init__(self, *sizes: int, **kwargs: Any) -> None:
        super().__init__(*sizes, **kwargs)
        self.register_buffer("scale", torch.tensor(2.0, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Convolving(nn.Conv1d):
    """Whose gradient torch's interpreter of traces does not know."""

    def __init__(self, *_: int, **kwargs: Any) -> None:
        super().__init__(1, 1, 2, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None])[:, 0]


class Dropping(nn.Linear):
    """With noise that it draws anew in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class Copying(nn.Linear):
    """A function of numbers that leave torch on their way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.from_numpy(x.numpy().copy()).sum()


@pytest.mark.parametrize("kind", [Branching, Counting, Convolving, Dropping, Copying])
def test_what_a_trace_would_freeze_is_followed(kind: Any) -> None:
    """Branches, buffers and noise change from call to call: a trace of the first one would be wrong."""
    model = kind(2, 1, dtype=DOUBLE)
    thetas = torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None]
    traces: dict[Any, Any] = {}
    for size in (0.3, 3.0):
        x = torch.rand(5, 2, dtype=DOUBLE) * size
        if kind is Counting:
            model.scale.fill_(size)
        found = []
        for often in (True, False):
            stack = StackedObjective(objectives(model, [Client((x, x[:, :1]), loss="mse")]), traces, alone=True)
            torch.manual_seed(0)
            found.append(stack.gradients(thetas, often=often))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=8, derandomize=True)
@given(seed=st.integers(0, 10**6), batch=st.sampled_from([1, 2]))
def test_gradients_on_batches(kind: str, size: int, seed: int, batch: int) -> None:
    """Each client has examples of its own in the batch, and its weights go with them."""
    stack, model = STACKS[kind, size], network(OUTPUTS[kind])
    layout, rng = layout_of(model), torch.Generator().manual_seed(seed)
    index = [torch.stack([torch.randperm(n, generator=rng)[:batch] for _ in range(size)]) for n in stack.lengths]
    thetas = rows_at(kind, size)
    gradients = stack.gradients(thetas, index)
    for m in range(size):
        at(model, layout, thetas[m])
        expected = gradient_by_hand(model, layout.names, client(kind, m), [term[m] for term in index])
        torch.testing.assert_close(gradients[m], expected, rtol=1e-11, atol=1e-13)


def test_frozen_parameters() -> None:
    """Only the selected parameters vary; the others stay as they are in the model."""
    model = network()
    clients = [client("plain", seed) for seed in range(2)]
    stack = StackedObjective(objectives(model, clients, "2.*"))
    assert layout_of(model, "2.*").names == ("2.weight", "2.bias")
    thetas = torch.randn(2, 4, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    gradients, losses = stack.gradients(thetas), stack.losses(thetas)
    frozen = network()
    for m in range(2):
        at(frozen, layout_of(frozen, "2.*"), thetas[m])
        assert torch.equal(frozen[0].weight, model[0].weight)
        torch.testing.assert_close(losses[m], loss_by_hand(frozen, clients[m]).detach(), rtol=1e-12, atol=0)
        expected = gradient_by_hand(frozen, ("2.weight", "2.bias"), clients[m])
        torch.testing.assert_close(gradients[m], expected, rtol=1e-11, atol=1e-13)


def test_parameters_of_the_model_are_not_touched() -> None:
    model = network()
    before = [p.clone() for p in model.parameters()]
    stack = StackedObjective(objectives(model, [client("plain", seed) for seed in range(2)]))
    stack.gradients(rows_at("plain", 2))
    stack.losses(rows_at("plain", 2))
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.grad is None


def residual(n: int = 4, dtype: torch.dtype = DOUBLE, function: object = misfit, weight: object = 1.0) -> Client:
    return Client((Residual(function, torch.ones(n, 2, dtype=dtype), torch.ones(n, dtype=DOUBLE), weight=weight),))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (residual(), residual(), True),
        (residual(), residual(weight=3.0), True),
        (residual(weight=torch.ones(4)), residual(weight=2.0), True),
        (residual(), residual(n=5), False),
        (residual(), residual(dtype=torch.float32), True),
        (residual(), residual(function=lambda u, x, y: u(x)[:, 0] + y), False),
        (residual(), residual(weight=torch.ones(4, 2)), False),
        (residual(), Client((residual().data[0], Residual(edge, torch.ones(4, 2, dtype=DOUBLE)))), False),
        (residual(), client("mse", 0, 4), False),
        (client("mse", 0), client("cross_entropy", 0), False),
    ],
)
def test_only_clients_of_one_form_are_stacked(one: Client, other: Client, alike: bool) -> None:
    pair = objectives(network(), [one, other])
    assert (pair[0].form == pair[1].form) == alike
    if alike:
        assert StackedObjective(pair).size == 2
    else:
        with pytest.raises(FipaError, match="different forms cannot be stacked"):
            StackedObjective(pair)


def test_no_clients_cannot_be_stacked() -> None:
    with pytest.raises(FipaError, match="stacked"):
        StackedObjective([])


@pytest.mark.parametrize("length", [3, 5, 8])
def test_weights_that_fit_no_residuals(length: int) -> None:
    """Twice as many weights as examples must not be read as two residuals per example."""
    one = residual(n=4, weight=torch.ones(length, dtype=DOUBLE))
    with pytest.raises(FipaError, match="weight"):
        StackedObjective(objectives(network(), [one])).losses(rows_at("plain", 1))


class Branching(nn.Module):
    """Cannot be mapped over clients: its control flow depends on a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z if float(z.sum()) > 0 else -z


def test_models_that_cannot_be_stacked_say_what_to_do() -> None:
    clients = [client("plain", seed) for seed in range(2)]
    stack = StackedObjective(objectives(Branching(), clients))
    with pytest.raises(FipaError, match=r"engine\.group = 1"):
        stack.gradients(torch.zeros(2, 3, dtype=DOUBLE))
    alone = StackedObjective(objectives(Branching(), clients[:1]))
    assert alone.gradients(torch.ones(1, 3, dtype=DOUBLE)).shape == (1, 3)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["terms", "cross_entropy"])
def test_stacks_that_share_traces_keep_their_own_data(kind: str) -> None:
    """Two pairs of clients of one form, and a triple: a trace holds no data, and fits its number of clients only."""
    clients, traces = objectives(network(OUTPUTS[kind]), [client(kind, seed) for seed in range(4)]), {}
    for chosen in ([0, 1], [2, 3], [1, 2, 3]):
        stack = StackedObjective([clients[m] for m in chosen], traces)
        thetas = rows_at(kind, len(chosen), seed=7)
        alone = [StackedObjective([clients[m]]) for m in chosen]
        expected = torch.cat([one.gradients(theta[None]) for one, theta in zip(alone, thetas, strict=True)])
        torch.testing.assert_close(stack.gradients(thetas), expected, rtol=1e-10, atol=1e-12)
        expected = torch.cat([one.losses(theta[None]) for one, theta in zip(alone, thetas, strict=True)])
        torch.testing.assert_close(stack.losses(thetas), expected, rtol=1e-12, atol=0)
    assert len(traces) == 4


def test_targets_of_another_shape_are_refused() -> None:
    """(n, 1) against (n,) would broadcast to n x n differences."""
    x, y = torch.ones(4, 2, dtype=DOUBLE), torch.ones(4, dtype=DOUBLE)
    (objective,) = objectives(network(), [Client((x, y), "mse")])
    with pytest.raises(FipaError, match=r"\(4, 1\) for targets y of \(4,\)"):
        objective.loss(torch.zeros(layout_of(network()).numel, dtype=DOUBLE), objective.terms)


@pytest.mark.parametrize("kind", ["plain", "terms", "mse"])
def test_rows_and_their_bend_along_a_direction(kind):
    """J^T r'' against the dense third-order tensor of the residuals."""
    one = client(kind, 1)
    (objective,) = objectives(network(OUTPUTS[kind]), [one])
    theta, v = rows_at(kind, 1)[0], rows_at(kind, 2)[1]

    def rows(t):
        return objective.rows(t, objective.terms)

    torch.testing.assert_close(0.5 * rows(theta).square().sum(), objective.loss(theta, objective.terms))
    J = torch.func.jacrev(rows)(theta)
    second = torch.einsum("rij,i,j->r", torch.func.jacrev(torch.func.jacrev(rows))(theta), v, v)
    torch.testing.assert_close(objective.bend(theta, v), J.T @ second, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(objective.remainder(theta, v), J.T @ rows(theta + v), rtol=1e-9, atol=1e-10)


def test_cross_entropy_has_no_rows():
    (objective,) = objectives(network(3), [client("cross_entropy", 1)])
    with pytest.raises(FipaError, match="cross_entropy has no residuals"):
        objective.rows(rows_at("cross_entropy", 1)[0], objective.terms)
