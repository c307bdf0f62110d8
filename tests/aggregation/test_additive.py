"""Additive FIPA: equal to the exact rule while the test matrix spans the range, and a matter of sums alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fipa
from aggregation.strategies import (
    DOUBLE,
    FAST,
    LAYOUT,
    SEEDS,
    Round,
    dense_parts,
    generator,
    normal,
    one_parameter,
    orthonormal,
    sketch_rounds,
    statistics,
)
from fipa import FIPA, AdditiveFIPA, AdditiveStatistics, ClientUpdate, CompletedFIPA, UpdateError

COMPLETED = pytest.mark.parametrize("completed", [False, True], ids=["plain", "completed"])


def additive(clients: Round, width: int, seed: int = 5) -> Round:
    """The same clients, with additive statistics in place of their sketches."""
    together = zip(clients.updates, clients.deltas, clients.curvatures, strict=True)
    layout = one_parameter(clients.p)
    updates = [
        replace(u, sketch=statistics(C, D, u.num_examples, width=width, seed=seed, layout=layout))
        for u, D, C in together
    ]
    return Round(updates, clients.deltas, clients.curvatures)


def spans_well(clients: Round, width: int, seed: int) -> bool:
    """Random square systems are ill-conditioned now and then; the rule can only be as good as its test matrix."""
    values, vectors = torch.linalg.eigh(clients.total)
    kept = vectors[:, values > 1e-8 * values[-1]]
    omega = torch.linalg.qr(fipa.random_test_matrix(clients.p, width, seed, DOUBLE)).Q
    return kept.shape[1] == 0 or float(torch.linalg.svdvals(kept.T @ omega)[-1]) > 0.05


@COMPLETED
@FAST
@given(clients=sketch_rounds(), damping=st.just(0.0) | st.floats(1e-2, 10.0), seed=SEEDS, data=st.data())
def test_equals_the_exact_rule_when_the_test_matrix_spans_the_range(
    completed: bool, clients: Round, damping: float, seed: int, data: st.DataObject
) -> None:
    rank = int(torch.linalg.matrix_rank(clients.total, rtol=1e-8, hermitian=True))
    width = data.draw(st.integers(max(rank, 1), clients.p))
    assume(spans_well(clients, width, seed))
    exact = (CompletedFIPA if completed else FIPA)(damping, step=0.9)
    expected = clients.change(exact)
    change = additive(clients, width, seed).change(AdditiveFIPA(damping, step=0.9, completed=completed))
    torch.testing.assert_close(change, expected, rtol=0, atol=1e-8 * max(1.0, float(expected.norm())))


@COMPLETED
@pytest.mark.parametrize("width", [13, 14, 40])
def test_width_beyond_the_number_of_parameters(completed: bool, width: int) -> None:
    """A small model under a width that was meant for a large one."""
    clients = additive_round(seed=1, width=width)
    rule = AdditiveFIPA(damping=0.1, completed=completed)
    torch.testing.assert_close(clients.change(rule), sum(dense_parts(rule, clients)), rtol=0, atol=1e-8)


def additive_round(seed: int, width: int, clients: int = 4) -> Round:
    rng = generator(seed)
    p = LAYOUT.numel
    updates, deltas, curvatures = [], [], []
    for _ in range(clients):
        n = int(torch.randint(1, 30, (1,), generator=rng))
        root, delta = normal(p, 4, rng=rng), normal(p, rng=rng)
        H = root @ root.T
        updates.append(ClientUpdate(delta, n, statistics(H, delta, n, width=width)))
        deltas.append(delta)
        curvatures.append(H)
    return Round(updates, deltas, curvatures)


def as_update(pooled: AdditiveStatistics) -> ClientUpdate:
    return ClientUpdate(pooled.delta, pooled.num_examples, pooled)


@COMPLETED
@FAST
@given(seed=SEEDS, width=st.integers(1, 13), damping=st.floats(0.1, 1.0), split=st.integers(1, 3))
def test_pooled_in_a_tree_equals_all_at_once(
    completed: bool, seed: int, width: int, damping: float, split: int
) -> None:
    """Also while the width is too small for the exact answer: pooling is exact whatever the approximation."""
    clients = additive_round(seed, width)
    rule = AdditiveFIPA(damping, completed=completed)
    theta = torch.zeros(clients.p, dtype=DOUBLE)
    expected = clients.change(rule)
    sent = [u.sketch for u in clients.updates]
    left, right = fipa.pool(sent[:split]), fipa.pool(sent[split:])
    for partial in ([left, right], [fipa.pool([left, right])], [fipa.pool(iter(sent))]):
        change = fipa.aggregate(theta, [as_update(s) for s in partial], rule).theta
        torch.testing.assert_close(change, expected, rtol=0, atol=1e-8 * max(1.0, float(expected.norm())))


@COMPLETED
def test_error_falls_as_the_width_grows(completed: bool) -> None:
    """Eigenvalues 2^-i, in bases that nearly agree."""
    p, rng = 48, generator(11)
    updates: list[ClientUpdate] = []
    deltas, curvatures = [], []
    shared = orthonormal(p, p, rng)
    for n in (20, 30, 70):
        values = 0.5 ** torch.arange(p, dtype=DOUBLE)
        basis = torch.linalg.qr(shared + 0.005 * normal(p, p, rng=rng)).Q
        H, delta = basis * values @ basis.T, normal(p, rng=rng)
        updates.append(ClientUpdate(delta, n))
        deltas.append(delta)
        curvatures.append(H)
    clients = Round(updates, deltas, curvatures)
    rule = AdditiveFIPA(damping=0.05, completed=completed)
    expected = sum(dense_parts(rule, clients))

    def error(width: int) -> float:
        """Root mean square over a few test matrices."""
        changes = [additive(clients, width, seed).change(rule) for seed in range(4)]
        return float(torch.stack([(c - expected).square().sum() for c in changes]).mean().sqrt() / expected.norm())

    errors = [error(width) for width in (4, 8, 16, 32, 48)]
    assert all(after < 0.7 * before for before, after in pairwise(errors)), errors
    assert errors[-1] < 1e-8
    assert errors[0] > 1e-2  # else there would be nothing to gain


@COMPLETED
def test_equals_full_rank_sketches_of_a_network(completed: bool) -> None:
    """Through `fipa.additive_statistics` and `fipa.sketch`, with updates by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    theta, rng = fipa.parameters_of(model), generator(12)
    exact, sums = [], []
    for n in (4, 6):
        x = normal(n, 3, rng=rng)
        delta = {name: normal(*t.shape, rng=rng) for name, t in theta.items()}
        # at most 2 rows per example, 20 in all, of 31 parameters
        stats = fipa.additive_statistics(model, x, delta=delta, width=24, test_seed=3, num_examples=n)
        sums.append(ClientUpdate(delta, n, stats))
        exact.append(ClientUpdate(delta, n, fipa.sketch(model, x, rank=None)))
    expected = fipa.aggregate(theta, exact, (CompletedFIPA if completed else FIPA)(damping=0.01)).theta
    result = fipa.aggregate(theta, sums, AdditiveFIPA(damping=0.01, completed=completed)).theta
    for name in theta:
        torch.testing.assert_close(result[name], expected[name], rtol=0, atol=1e-9)


@COMPLETED
def test_no_curvature_at_all(completed: bool) -> None:
    zero = torch.zeros(13, 13, dtype=DOUBLE)
    deltas = [torch.ones(13, dtype=DOUBLE), 3 * torch.ones(13, dtype=DOUBLE)]
    updates = [ClientUpdate(d, n, statistics(zero, d, n, width=4)) for d, n in zip(deltas, (3, 1), strict=True)]
    result = fipa.aggregate(torch.zeros(13, dtype=DOUBLE), updates, AdditiveFIPA(completed=completed))
    torch.testing.assert_close(result.theta, torch.full((13,), 1.5 if completed else 0.0, dtype=DOUBLE))
    assert result.diagnostics.effective_rank == 0


@COMPLETED
def test_float32(completed: bool) -> None:
    clients = additive_round(seed=2, width=13)
    rule = AdditiveFIPA(damping=1.0, completed=completed)

    def single(update: ClientUpdate) -> ClientUpdate:
        s = update.sketch
        products, response, delta = s.products.float(), s.response.float(), s.delta.float()
        return ClientUpdate(delta, update.num_examples, replace(s, products=products, response=response, delta=delta))

    change = fipa.aggregate(torch.zeros(13), [single(u) for u in clients.updates], rule).theta
    assert change.dtype == torch.float32
    torch.testing.assert_close(change.double(), clients.change(rule), rtol=0, atol=1e-4)


# --- what clients can get wrong ---


def aggregate_with(**changes: object) -> Tensor:
    """A round whose second client's statistics are changed."""
    clients = additive_round(seed=3, width=5, clients=2)
    first, second = clients.updates
    second = replace(second, sketch=replace(second.sketch, **changes), client_id=1)
    updates = [replace(first, client_id=0), second]
    return fipa.aggregate(torch.zeros(13, dtype=DOUBLE), updates, AdditiveFIPA(completed=True)).theta


def nan_like(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, float("nan"), dtype=DOUBLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_seed": 6}, "seed 6.*all clients of a round must share"),
        ({"products": torch.zeros(13, 4, dtype=DOUBLE)}, "width 4.*all clients of a round must share"),
        ({"num_examples": 10**6}, "reports .* examples, but its statistics 1000000"),
        ({"products": nan_like((13, 5))}, "NaN or infinity in its products"),
        ({"response": nan_like((13,))}, "NaN or infinity in its response"),
        ({"delta": nan_like((13,))}, "NaN or infinity in its"),
        ({"products": torch.zeros(12, 5, dtype=DOUBLE)}, r"products.*\(12, 5\)"),
        ({"response": torch.zeros(12, dtype=DOUBLE)}, "response.*12"),
        ({"delta": torch.zeros(12, dtype=DOUBLE)}, "12"),
        ({"products": torch.zeros(13, 5)}, "float32.*theta is torch.float64"),
        ({"response": torch.zeros(13)}, "float32.*theta is torch.float64"),
        ({"delta": torch.zeros(13)}, "float32.*theta is torch.float64"),
        ({"layout": one_parameter(13)}, "other parameters"),
    ],
)
def test_bad_statistics_name_their_client(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UpdateError, match="client 1 .*" + message):
        aggregate_with(**changes)


def test_statistics_of_another_update() -> None:
    """The response was computed for another delta than the one that is sent: no rule can make sense of both."""
    with pytest.raises(UpdateError, match=r"client 1 .*(another|other) update"):
        aggregate_with(delta=torch.zeros(13, dtype=DOUBLE))


@pytest.mark.parametrize("setting", ["damping", "step", "cutoff"])
def test_bad_settings(setting: str) -> None:
    with pytest.raises(fipa.FipaError, match=rf"AdditiveFIPA\({setting}=-1\)"):
        AdditiveFIPA(**{setting: -1})


# --- float32 ---


@COMPLETED
@pytest.mark.parametrize("damping", [10.0**-k for k in range(4, 15)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_damping_does_not_blow_up_the_rounding_of_float32(completed: bool, damping: float, seed: int) -> None:
    # Twice as many columns as directions with curvature: the rest of the spectrum is what rounding makes of zero.
    rng = generator(seed)
    p, rank = 40, 5
    basis = orthonormal(p, rank, rng)
    rule = AdditiveFIPA(damping=damping, completed=completed)
    double, single = [], []
    for examples in (3, 5):
        turned = basis @ orthonormal(rank, rank, rng)
        H = turned * torch.linspace(2, 0.5, rank, dtype=DOUBLE) @ turned.T
        delta = normal(p, rng=rng)
        one = statistics(H, delta, examples, width=2 * rank, layout=one_parameter(p))
        double.append(ClientUpdate(delta, examples, one))
        single.append(ClientUpdate(delta.float(), examples, one.to(torch.float32)))
    expected = fipa.aggregate(torch.zeros(p, dtype=DOUBLE), double, rule).theta
    found = fipa.aggregate(torch.zeros(p), single, rule).theta
    assert float((found.double() - expected).norm()) < 1e-3 * float(expected.norm())


@COMPLETED
def test_weights_are_refused(completed: bool) -> None:
    """Sums cannot be weighted afterwards: to use them as they are would give another answer than asked for."""
    clients = additive_round(seed=2, width=13, clients=3)
    rule = AdditiveFIPA(damping=0.1, completed=completed)
    theta = torch.zeros(clients.p, dtype=DOUBLE)
    late = [replace(clients.updates[0], weight=0.5), *clients.updates[1:]]
    with pytest.raises(UpdateError, match=r"pooled by number of examples: leave ClientUpdate\(weight=\.\.\.\) out"):
        fipa.aggregate(theta, late, rule)
    same = [replace(u, weight=float(u.num_examples)) for u in clients.updates]
    assert torch.equal(fipa.aggregate(theta, same, rule).theta, clients.change(rule))
