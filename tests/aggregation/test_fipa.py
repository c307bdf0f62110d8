"""FIPA and CompletedFIPA against their dense formulas, and the properties that the paper claims."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fipa
from aggregation.strategies import (
    DOUBLE,
    FAST,
    SEEDS,
    Round,
    dense_parts,
    generator,
    inverse,
    normal,
    one_parameter,
    orthonormal,
    projector,
    round_of,
    sketch_rounds,
)
from fipa import FIPA, ClientUpdate, CompletedFIPA, FedAvg, Layout, Sketch
from fipa.clients.gauss_newton import GaussNewton

DAMPINGS = st.floats(1e-3, 1e2)
BOTH = pytest.mark.parametrize("rule", [FIPA, CompletedFIPA])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.norm())))


# --- what the formulas say ---


@BOTH
@FAST
@given(clients=sketch_rounds(), damping=DAMPINGS, step=st.floats(0.1, 2.0))
def test_damped_equals_dense_solve(
    rule: type[FIPA] | type[CompletedFIPA], clients: Round, damping: float, step: float
) -> None:
    close(clients.change(rule(damping, step)), sum(dense_parts(rule(damping, step), clients)))


@BOTH
@FAST
@given(clients=sketch_rounds(), step=st.floats(0.1, 2.0))
def test_undamped_equals_pseudo_inverse(rule: type[FIPA] | type[CompletedFIPA], clients: Round, step: float) -> None:
    close(clients.change(rule(step=step)), sum(dense_parts(rule(step=step), clients)))


@FAST
@given(clients=sketch_rounds(), damping=DAMPINGS)
def test_without_its_pull_the_completed_rule_shortens_the_mean_where_curvature_is_high(
    clients: Round, damping: float
) -> None:
    shifted = clients.total + damping * torch.eye(clients.p, dtype=DOUBLE)
    expected = damping * torch.linalg.solve(shifted, clients.mean)
    close(clients.change(CompletedFIPA(damping, pull=0.0)), expected)
    assert float(expected.norm()) <= float(clients.mean.norm()) * (1 + 1e-9)
    half = (expected + clients.change(CompletedFIPA(damping))) / 2
    close(clients.change(CompletedFIPA(damping, pull=0.5)), half)


@FAST
@given(clients=sketch_rounds(), damping=DAMPINGS)
def test_fipa_solves_the_damped_normal_equations(clients: Round, damping: float) -> None:
    """Written out once more, without the helpers that all rules share."""
    H, b = clients.total, clients.response
    expected = torch.linalg.solve(H + damping * torch.eye(clients.p, dtype=DOUBLE), b)
    close(clients.change(FIPA(damping)), expected)
    close(clients.change(FIPA()), torch.linalg.pinv(H, rtol=1e-5, hermitian=True) @ b)


@FAST
@given(clients=sketch_rounds(), damping=st.floats(0, 10.0), floor=st.floats(1e-3, 10.0))
def test_floor_stands_under_every_curvature(clients: Round, damping: float, floor: float) -> None:
    """(H + floor + damping) d = sum_m w_m (H_m + floor) D_m, and the parts of the clients add up."""
    eye = torch.eye(clients.p, dtype=DOUBLE)
    together = zip(clients.weights, clients.curvatures, clients.deltas, strict=True)
    b = sum(w * (C + floor * eye) @ D for w, C, D in together)
    expected = torch.linalg.solve(clients.total + (floor + damping) * eye, b)
    close(clients.change(FIPA(damping, floor=floor)), expected)
    close(clients.change(FIPA(floor=floor)), clients.change(CompletedFIPA(floor)))
    close(clients.change(FIPA(damping, floor=0.0)), clients.change(FIPA(damping)))
    assume(float(expected.norm()) > 1e-6)
    result = fipa.aggregate(torch.zeros(clients.p, dtype=DOUBLE), clients.updates, FIPA(damping, floor=floor))
    assert sum(result.diagnostics.shares.values()) == pytest.approx(1, abs=1e-6)


def test_a_floor_passes_the_whole_gradient_on_whatever_the_rank() -> None:
    """Clients send -(H_m + mu)^-1 g_m with a sketch of rank 1: the server solves with their gradients."""
    p, floor, damping = 6, 1e-3, 0.2
    rng = generator(3)
    updates, gradients, total = [], [], torch.zeros(p, p, dtype=DOUBLE)
    for client in range(3):
        U, value = orthonormal(p, 1, rng), torch.tensor([2.0 + client], dtype=DOUBLE)
        gradients.append(normal(p, rng=rng))
        sketch = Sketch(U, value, one_parameter(p))
        updates.append(ClientUpdate(GaussNewton()(sketch, gradients[-1], floor), 10, sketch))
        total += (U * value) @ U.T / 3
    d = fipa.aggregate(torch.zeros(p, dtype=DOUBLE), updates, FIPA(damping, floor=floor)).theta
    expected = -torch.linalg.solve(total + (damping + floor) * torch.eye(p, dtype=DOUBLE), sum(gradients) / 3)
    close(d, expected)


def test_a_floor_below_the_rounding_of_the_sketches_is_refused() -> None:
    sketch = Sketch(torch.eye(4, 2), torch.tensor([1e3, 1.0]), one_parameter(4))
    update = ClientUpdate(torch.ones(4), 1, sketch)
    with pytest.raises(fipa.FipaError, match=r"floor=1e-06.* drowns in the rounding of torch.float32"):
        fipa.aggregate(torch.zeros(4), [update], FIPA(floor=1e-6))
    fipa.aggregate(torch.zeros(4), [update], FIPA(floor=1e-2))


@FAST
@given(clients=sketch_rounds(), damping=st.floats(1e-3, 10.0))
def test_completed_minimises_the_distance_to_all_updates(clients: Round, damping: float) -> None:
    """argmin_d sum_m w_m (d - D_m)^T (H_m + damping I) (d - D_m), from its gradient."""
    shifted = [C + damping * torch.eye(clients.p, dtype=DOUBLE) for C in clients.curvatures]
    together = list(zip(clients.weights, shifted, clients.deltas, strict=True))
    expected = torch.linalg.solve(sum(w * M for w, M, _ in together), sum(w * M @ D for w, M, D in together))
    d = clients.change(CompletedFIPA(damping))
    close(d, expected)
    gradient = sum(w * M @ (d - D) for w, M, D in together)
    close(gradient, torch.zeros_like(d))


@FAST
@given(clients=sketch_rounds(full_rank=True), cut=st.integers(1, 4))
def test_cutoff_is_relative_to_the_largest_eigenvalue(clients: Round, cut: int) -> None:
    """A cut between two eigenvalues: the directions below it do not move."""
    values = torch.linalg.eigvalsh(clients.total)
    assume(cut < clients.p)
    assume(values[cut] > 1.01 * values[cut - 1])
    rule = FIPA(cutoff=float((values[cut - 1] * values[cut]).sqrt() / values[-1]))
    close(clients.change(rule), inverse(clients.total, 0.0, rule.cutoff) @ clients.response)
    result = fipa.aggregate(torch.zeros(clients.p, dtype=DOUBLE), clients.updates, rule)
    assert result.diagnostics.effective_rank == clients.p - cut


@FAST
@given(clients=sketch_rounds(), damping=DAMPINGS, step=st.floats(0.1, 2.0))
def test_as_in_authors_code(clients: Round, damping: float, step: float) -> None:
    shifted = clients.total + damping * torch.eye(clients.p, dtype=DOUBLE)
    expected = step * damping * torch.linalg.solve(shifted, clients.response)
    close(clients.change(FIPA.as_in_authors_code(damping, step)), expected)


# --- properties ---


@FAST
@given(clients=sketch_rounds(), seed=SEEDS)
def test_weights_sum_to_the_projector_on_the_sketched_range(clients: Round, seed: int) -> None:
    """sum_m B_m = P: clients that agree on v get P v, and, completed, all of v."""
    v = normal(clients.p, rng=generator(seed))
    agreed = clients.with_deltas([v] * len(clients.updates))
    close(agreed.change(FIPA()), projector(clients.total) @ v)
    close(agreed.change(CompletedFIPA()), v)


@FAST
@given(clients=sketch_rounds(max_clients=1))
def test_one_client_gets_its_projected_update(clients: Round) -> None:
    (update,) = clients.updates
    U = update.sketch.eigenvectors[:, update.sketch.eigenvalues > 0]
    close(clients.change(FIPA()), U @ (U.T @ update.delta))
    close(clients.change(CompletedFIPA()), update.delta)


@st.composite
def equal_sketches(draw: st.DrawFn) -> Round:
    """Clients that all send the first client's sketch."""
    clients = draw(sketch_rounds())
    sketch = clients.updates[0].sketch
    return round_of([sketch] * len(clients.deltas), clients.deltas, [u.num_examples for u in clients.updates])


@FAST
@given(clients=equal_sketches())
def test_equal_sketches_give_fedavg_on_their_range(clients: Round) -> None:
    close(clients.change(FIPA()), projector(clients.total) @ clients.mean)
    close(clients.change(CompletedFIPA()), clients.mean)
    close(clients.change(CompletedFIPA(damping=0.7)), clients.mean)


@BOTH
@FAST
@given(clients=sketch_rounds(), damping=st.just(0.0) | DAMPINGS)
def test_step_stays_in_the_span_of_the_sketches(
    rule: type[FIPA] | type[CompletedFIPA], clients: Round, damping: float
) -> None:
    """The paper's orthogonal-complement correction is zero: neither b nor d has a part outside of the span."""
    outside = torch.eye(clients.p, dtype=DOUBLE) - projector(clients.total)
    zero = torch.zeros(clients.p, dtype=DOUBLE)
    close(outside @ clients.response, zero)
    # What CompletedFIPA adds to the average is a FIPA step as well.
    moved = clients.change(rule(damping)) - (clients.mean if rule is CompletedFIPA else 0)
    close(outside @ moved, zero)


@FAST
@given(clients=sketch_rounds())
def test_completed_tends_to_fedavg_under_strong_damping(clients: Round) -> None:
    """The error is (b - H mean) / damping to first order: ten times the damping, a tenth of the error."""
    scale = float(torch.linalg.eigvalsh(clients.total)[-1])
    near, far = ((clients.change(CompletedFIPA(f * max(scale, 1.0))) - clients.mean).norm() for f in (1e3, 1e4))
    leading = (clients.response - clients.total @ clients.mean).norm() / max(scale, 1.0)
    assert abs(near - leading / 1e3) <= 2e-3 * leading / 1e3 + 1e-14
    assert abs(far - leading / 1e4) <= 2e-4 * leading / 1e4 + 1e-14


@FAST
@given(clients=sketch_rounds())
def test_completed_tends_to_fipa_and_fedavg_under_weak_damping(clients: Round) -> None:
    """FIPA on the sketched range and FedAvg on its complement, with an error that falls like the damping."""
    P = projector(clients.total)
    limit = clients.change(FIPA()) + clients.mean - P @ clients.mean
    close(clients.change(CompletedFIPA()), limit)
    # d(b) - limit = -b (H + b)^-1 (limit - mean) on the range
    slope = float((inverse(clients.total, 0.0) @ (limit - clients.mean)).norm())
    for damping in (1e-4, 1e-5, 1e-6):
        error = float((clients.change(CompletedFIPA(damping)) - limit).norm())
        # Where clients disagree on one subspace, rounding errors grow like 1 / damping.
        assert error <= damping * slope + 1e-14 / damping


@BOTH
@pytest.mark.parametrize("damping", [1e-12, 1e-14, 1e-16, 1e-30])
def test_tiny_damping_is_not_worse_than_none(rule: type[FIPA] | type[CompletedFIPA], damping: float) -> None:
    """Clients that disagree on one subspace: the stack is exactly singular, and 1 / damping must not blow that up."""
    rng = generator(6)
    basis = orthonormal(8, 3, rng)
    bases = [basis, basis @ orthonormal(3, 3, rng), orthonormal(8, 3, rng)]
    values = torch.tensor([3.0, 2.0, 1.0], dtype=DOUBLE)
    sketches = [Sketch(U, values, one_parameter(8)) for U in bases]
    clients = round_of(sketches, [normal(8, rng=rng) for _ in range(3)], [3, 4, 5])
    close(clients.change(rule(damping)), clients.change(rule()))


@BOTH
@FAST
@given(clients=sketch_rounds(min_clients=2), damping=st.just(0.0) | DAMPINGS, data=st.data())
def test_order_of_clients_changes_only_rounding(
    rule: type[FIPA] | type[CompletedFIPA], clients: Round, damping: float, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(clients.updates))))
    shuffled = Round(*([things[i] for i in order] for things in (clients.updates, clients.deltas, clients.curvatures)))
    close(shuffled.change(rule(damping)), clients.change(rule(damping)))


@FAST
@given(clients=sketch_rounds(), k=st.integers(2, 5))
def test_only_the_ratio_of_examples_counts(clients: Round, k: int) -> None:
    more = [ClientUpdate(u.delta, k * u.num_examples, u.sketch) for u in clients.updates]
    assert torch.allclose(
        fipa.aggregate(torch.zeros(clients.p, dtype=DOUBLE), more, FIPA()).theta, clients.change(FIPA()), atol=1e-12
    )


# --- consistency with the centralised Gauss-Newton step ---


@FAST
@given(seed=SEEDS, p=st.integers(1, 8), counts=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_consistent_with_centralised_gauss_newton_on_least_squares(seed: int, p: int, counts: list[int]) -> None:
    """Clients that solve their own least squares exactly: FIPA gives the solution of all data together.

    Clients with fewer equations than unknowns included; all together may have too few as well.
    """
    rng = generator(seed)
    # Rows of singular values in [1, 2], so that no client's problem comes near the cut-off.
    X = [_well_conditioned(n, p, rng) for n in counts]
    residuals = [normal(n, rng=rng) for n in counts]
    sketches, deltas = [], []
    for x, r in zip(X, residuals, strict=True):
        U, s, _ = torch.linalg.svd(x.T / len(x) ** 0.5, full_matrices=False)
        sketches.append(Sketch(U, s.square(), one_parameter(p)))
        deltas.append(-torch.linalg.pinv(x) @ r)
    central = -torch.linalg.pinv(torch.cat(X), rtol=1e-8) @ torch.cat(residuals)
    close(round_of(sketches, deltas, counts).change(FIPA(cutoff=1e-14)), central, 1e-8)


def _well_conditioned(n: int, p: int, rng: torch.Generator) -> Tensor:
    r = min(n, p)
    scale = torch.linspace(1, 2, r, dtype=DOUBLE)
    return orthonormal(n, r, rng) * scale @ orthonormal(p, r, rng).T


def gauss_newton_parts(rows: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor]:
    """H and g of 1/2 |residuals|^2, whose Jacobian is `rows`."""
    return rows.T @ rows, rows.T @ residuals


def tanh_network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, outputs)).double()


def jacobian(model: nn.Module, function: object) -> tuple[Tensor, Tensor]:
    """Values (n) and Jacobian (n x p) of `function(model)` by the flat parameters, by plain autograd."""
    theta = dict(model.named_parameters())
    layout = Layout.of(theta)

    def call(flat: Tensor) -> Tensor:
        params = layout.unflatten(flat)
        return function(lambda x: torch.func.functional_call(model, params, (x,))).reshape(-1)

    flat = layout.flatten(theta)
    return call(flat), torch.func.jacrev(call)(flat)


@pytest.mark.parametrize("sizes", [(5, 9), (1, 7, 4)])
def test_consistent_with_centralised_gauss_newton_of_a_network_mse(sizes: tuple[int, ...]) -> None:
    """Through `fipa.sketch`: loss 1/2 mean of squared error, fewer residuals than parameters."""
    model, rng = tanh_network(outputs=2), generator(8)
    inputs = [normal(n, 3, rng=rng) for n in sizes]
    targets = [normal(n, 2, rng=rng) for n in sizes]

    def curvature_and_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        errors, J = jacobian(model, lambda u: u(x) - y)
        return gauss_newton_parts(J / len(x) ** 0.5, errors / len(x) ** 0.5)

    updates = []
    for x, y in zip(inputs, targets, strict=True):
        H, g = curvature_and_gradient(x, y)
        delta = -torch.linalg.pinv(H, rtol=1e-12, hermitian=True) @ g
        updates.append(ClientUpdate(delta, len(x), fipa.sketch(model, (x, y), "mse", rank=None)))
    H, g = curvature_and_gradient(torch.cat(inputs), torch.cat(targets))
    central = -torch.linalg.pinv(H, rtol=1e-12, hermitian=True) @ g
    close(fipa.aggregate(torch.zeros_like(central), updates, FIPA(cutoff=1e-12)).theta, central, 1e-8)


def test_consistent_with_centralised_gauss_newton_of_residual_terms() -> None:
    """PDE-like clients: interior and weighted boundary residuals, of unequal numbers."""
    model, rng = tanh_network(outputs=1), generator(9)
    sizes = [(4, 2), (7, 3)]
    data = [(normal(n, 3, rng=rng), normal(k, 3, rng=rng)) for n, k in sizes]

    def interior(u: nn.Module, x: Tensor) -> Tensor:
        return u(x).squeeze(1) ** 2 + u(x).squeeze(1) - x.sum(1)

    def edge(u: nn.Module, x: Tensor) -> Tensor:
        return u(x).squeeze(1) - x[:, 0]

    def parts(inside: Tensor, boundary: Tensor) -> tuple[Tensor, Tensor]:
        H = g = 0
        for function, x, weight in ((interior, inside, 1.0), (edge, boundary, 5.0)):
            r, J = jacobian(model, lambda u, f=function, x=x: f(u, x))
            scale = (weight / len(x)) ** 0.5
            h, slope = gauss_newton_parts(scale * J, scale * r)
            H, g = H + h, g + slope
        return H, g

    updates, H, g = [], 0, 0
    total = sum(n + k for n, k in sizes)
    for inside, boundary in data:
        Hm, gm = parts(inside, boundary)
        n = len(inside) + len(boundary)
        H, g = H + n / total * Hm, g + n / total * gm
        residuals = [fipa.Residual(interior, inside), fipa.Residual(edge, boundary, weight=5.0)]
        sketch = fipa.sketch(model, residuals, "least_squares", rank=None)
        updates.append(ClientUpdate(-torch.linalg.pinv(Hm, rtol=1e-12, hermitian=True) @ gm, n, sketch))
    central = -torch.linalg.pinv(H, rtol=1e-12, hermitian=True) @ g
    close(fipa.aggregate(torch.zeros_like(central), updates, FIPA(cutoff=1e-12)).theta, central, 1e-8)


# --- corner cases ---


@BOTH
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_no_curvature_at_all(rule: type[FIPA] | type[CompletedFIPA], damping: float) -> None:
    """Sketches of rank 0, or of eigenvalues 0: FIPA stays, CompletedFIPA averages."""
    empty = Sketch(torch.zeros(4, 0, dtype=DOUBLE), torch.zeros(0, dtype=DOUBLE), one_parameter(4))
    flat = Sketch(torch.eye(4, dtype=DOUBLE)[:, :2], torch.zeros(2, dtype=DOUBLE), one_parameter(4))
    deltas = [torch.ones(4, dtype=DOUBLE), 3 * torch.ones(4, dtype=DOUBLE)]
    for sketches in ([empty, empty], [empty, flat], [flat, flat]):
        clients = round_of(sketches, deltas, [3, 1])
        result = fipa.aggregate(torch.zeros(4, dtype=DOUBLE), clients.updates, rule(damping))
        expected = 1.5 if rule is CompletedFIPA else 0.0
        torch.testing.assert_close(result.theta, torch.full((4,), expected, dtype=DOUBLE))
        assert result.diagnostics.effective_rank == 0
        assert result.diagnostics.condition_number == 1


def test_two_clients_by_hand() -> None:
    """Client 1 knows the first axis, client 2 (three times the examples) both, half as steep."""
    layout = one_parameter(3)
    eye = torch.eye(3, dtype=DOUBLE)
    first = Sketch(eye[:, :1], torch.tensor([4.0], dtype=DOUBLE), layout)
    second = Sketch(eye[:, :2], torch.tensor([2.0, 2.0], dtype=DOUBLE), layout)
    deltas = [torch.tensor([1.0, 1.0, 1.0], dtype=DOUBLE), torch.tensor([6.0, 2.0, 5.0], dtype=DOUBLE)]
    clients = round_of([first, second], deltas, [1, 3])
    # H = diag(1/4 4 + 3/4 2, 3/4 2, 0) = diag(2.5, 1.5, 0),  b = (1/4 4 1 + 3/4 2 6, 3/4 2 2, 0) = (10, 3, 0)
    close(clients.change(FIPA()), torch.tensor([4.0, 2.0, 0.0], dtype=DOUBLE))
    close(clients.change(FIPA(damping=2.5)), torch.tensor([2.0, 0.75, 0.0], dtype=DOUBLE))
    # the mean of the updates is (4.75, 1.75, 4)
    close(clients.change(CompletedFIPA()), torch.tensor([4.0, 2.0, 4.0], dtype=DOUBLE))
    close(clients.change(FedAvg()), torch.tensor([4.75, 1.75, 4.0], dtype=DOUBLE))


@BOTH
@pytest.mark.parametrize("setting", ["damping", "step", "cutoff"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_bad_settings(rule: type[FIPA] | type[CompletedFIPA], setting: str, value: float) -> None:
    with pytest.raises(fipa.FipaError, match=rf"{rule.__name__}\({setting}={value}\): must be a finite number"):
        rule(**{setting: value})


# --- float32 ---


@BOTH
@pytest.mark.parametrize("damping", [10.0**-k for k in range(4, 15)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_damping_does_not_blow_up_the_rounding_of_float32(rule: type, damping: float, seed: int) -> None:
    # Two bases of one space: half of the stacked spectrum is zero, or what rounding makes of it.
    rng = generator(seed)
    p, rank = 40, 5
    basis = orthonormal(p, rank, rng)
    values = torch.linspace(2, 0.5, rank, dtype=DOUBLE)
    sketches = [Sketch(U, values, one_parameter(p)) for U in (basis, basis @ orthonormal(rank, rank, rng))]
    clients = round_of(sketches, [normal(p, rng=rng) for _ in sketches], [3, 5])
    single = [
        ClientUpdate(u.delta.float(), u.num_examples, s.to(torch.float32))
        for u, s in zip(clients.updates, sketches, strict=True)
    ]
    # Inside of the space nothing is singular: there the formula can be written down without losing digits.
    mean = clients.mean if rule is CompletedFIPA else torch.zeros(p, dtype=DOUBLE)
    H = basis.T @ clients.total @ basis + damping * torch.eye(rank, dtype=DOUBLE)
    expected = mean + basis @ torch.linalg.solve(H, basis.T @ (clients.response - clients.total @ mean))
    close(clients.change(rule(damping=damping)), expected, 1e-7)  # a Gram matrix in float64 is used down to 1e-9
    found = fipa.aggregate(torch.zeros(p), single, rule(damping=damping)).theta
    assert float((found.double() - expected).norm()) < 1e-5 * float(expected.norm())
