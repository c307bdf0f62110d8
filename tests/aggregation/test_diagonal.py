"""Fisher merging against the dense diagonal system."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fipa
from aggregation.strategies import DOUBLE, FAST, SEEDS, Round, dense_parts, generator, normal, one_parameter
from fipa import ClientUpdate, DiagonalCurvature, DiagonalFisher


@st.composite
def diagonal_rounds(draw: st.DrawFn) -> Round:
    """Any number of zeros in the diagonals, at places that clients share or not."""
    p = draw(st.integers(1, 6))
    clients = draw(st.integers(1, 4))
    rng = generator(draw(SEEDS))
    updates, deltas, curvatures = [], [], []
    for _ in range(clients):
        values = draw(st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=p, max_size=p))
        diagonal, delta = torch.tensor(values, dtype=DOUBLE), normal(p, rng=rng)
        curvature = DiagonalCurvature(diagonal, one_parameter(p))
        updates.append(ClientUpdate(delta, draw(st.integers(1, 100)), curvature))
        deltas.append(delta)
        curvatures.append(diagonal.diag())
    return Round(updates, deltas, curvatures)


@FAST
@given(clients=diagonal_rounds(), damping=st.just(0.0) | st.floats(1e-3, 10.0), step=st.floats(0.1, 2.0))
def test_equals_dense_solve(clients: Round, damping: float, step: float) -> None:
    rule = DiagonalFisher(damping, step)
    torch.testing.assert_close(clients.change(rule), sum(dense_parts(rule, clients)), rtol=1e-10, atol=1e-10)


@FAST
@given(clients=diagonal_rounds())
def test_stays_between_the_clients(clients: Round) -> None:
    """Each parameter is a weighted average: neither rule nor zeros can lead out of the clients' range."""
    change, all_deltas = clients.change(DiagonalFisher()), torch.stack(clients.deltas)
    assert bool((change <= all_deltas.max(0).values + 1e-12).all())
    assert bool((change >= all_deltas.min(0).values - 1e-12).all())


@FAST
@given(clients=diagonal_rounds())
def test_tends_to_fedavg_under_strong_damping(clients: Round) -> None:
    leading = (clients.response - clients.total @ clients.mean).norm()
    for damping in (1e7, 1e8):
        error = (clients.change(DiagonalFisher(damping)) - clients.mean).norm()
        assert error <= leading / damping * (1 + 1e-3) + 1e-13


def test_by_hand() -> None:
    """Three parameters: both clients curved, one of them, none."""
    layout = one_parameter(3)

    def update(delta: list[float], n: int, values: list[float]) -> ClientUpdate:
        return ClientUpdate(torch.tensor(delta), n, DiagonalCurvature(torch.tensor(values), layout))

    updates = [update([1.0, 7.0, 2.0], 1, [6.0, 1.0, 0.0]), update([5.0, 9.0, 6.0], 3, [2.0, 0.0, 0.0])]
    result = fipa.aggregate(torch.zeros(3), updates, DiagonalFisher())
    # weights 1/4 and 3/4: (1.5 * 1 + 1.5 * 5) / 3, then client 0 alone, then the average
    assert result.theta.tolist() == [3.0, 7.0, 5.0]
    assert result.diagnostics.effective_rank == 2
    assert result.diagnostics.condition_number == pytest.approx(3.0 / 0.25)


def test_no_curvature_at_all_is_fedavg() -> None:
    zeros = DiagonalCurvature(torch.zeros(2), one_parameter(2))
    updates = [ClientUpdate(torch.tensor([1.0, 2.0]), 1, zeros), ClientUpdate(torch.tensor([5.0, 2.0]), 3, zeros)]
    result = fipa.aggregate(torch.zeros(2), updates, DiagonalFisher())
    assert result.theta.tolist() == [4.0, 2.0]
    assert result.diagnostics.effective_rank == 0
    assert result.diagnostics.condition_number == 1


def test_with_the_fisher_diagonal_of_a_model() -> None:
    """`fipa.diagonal_fisher` gives the diagonal of what `fipa.sketch` sketches, and the rule takes it."""
    torch.manual_seed(0)
    model, rng = nn.Linear(3, 4).double(), generator(1)
    theta = fipa.parameters_of(model)
    updates, deltas, curvatures = [], [], []
    for n in (6, 11):
        x, delta = normal(n, 3, rng=rng), normal(16, rng=rng)
        sketch = fipa.sketch(model, x, rank=None)
        H = (sketch.eigenvectors * sketch.eigenvalues) @ sketch.eigenvectors.T
        updates.append(ClientUpdate(sketch.layout.unflatten(delta), n, fipa.diagonal_fisher(model, x)))
        deltas.append(delta)
        curvatures.append(H.diagonal().diag())
    rule = DiagonalFisher(damping=0.01)
    change = fipa.aggregate(theta, updates, rule).theta
    expected = fipa.Layout.of(theta).unflatten(sum(dense_parts(rule, Round(updates, deltas, curvatures))))
    for name in theta:
        torch.testing.assert_close(change[name], theta[name] + expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([1.0, -1e-3, 1.0, 1.0]), "negative"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "NaN or infinity in its values"),
        (torch.tensor([1.0, float("inf"), 1.0, 1.0]), "NaN or infinity in its values"),
        (torch.ones(3), "values.*3.*4"),
        (torch.ones(1), "values.*1.*4"),
        (torch.ones(4, 4), "values.*4, 4"),
        (torch.ones(4, dtype=DOUBLE), "float64.*theta is torch.float32"),
    ],
)
def test_bad_diagonals_name_their_client(values: torch.Tensor, message: str) -> None:
    good = ClientUpdate(torch.ones(4), 1, DiagonalCurvature(torch.ones(4), one_parameter(4)), client_id=0)
    bad = ClientUpdate(torch.ones(4), 1, DiagonalCurvature(values, one_parameter(4)), client_id=1)
    with pytest.raises(fipa.UpdateError, match="client 1 .*" + message):
        fipa.aggregate(torch.zeros(4), [good, bad], DiagonalFisher())


def test_large_finite_curvature_is_accepted() -> None:
    """The sum of a diagonal may overflow while each number is fine."""
    curvature = DiagonalCurvature(torch.full((4,), 2e38), one_parameter(4))
    result = fipa.aggregate(torch.zeros(4), [ClientUpdate(torch.ones(4), 1, curvature)], DiagonalFisher())
    assert result.theta.tolist() == [1.0] * 4


@pytest.mark.parametrize("setting", ["damping", "step"])
def test_bad_settings(setting: str) -> None:
    with pytest.raises(fipa.FipaError, match=rf"DiagonalFisher\({setting}=-1\)"):
        DiagonalFisher(**{setting: -1})
