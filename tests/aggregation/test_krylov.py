"""Steps by iteration, where sketches are beyond the memory limit: against dense solves, and their own bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from aggregation.layouts import RULES, updates_for
from aggregation.strategies import (
    DOUBLE,
    FAST,
    Round,
    dense_parts,
    generator,
    normal,
    one_parameter,
    orthonormal,
    round_of,
    sketch_rounds,
)
from fipa import FIPA, CompletedFIPA
from fipa.aggregation import krylov
from fipa.aggregation.krylov import TOLERANCE, KrylovSpace
from fipa.aggregation.rule import aggregator
from fipa.spill import Shelf, in_file

DAMPINGS = st.floats(1e-3, 1e2)
ITERATED = (FIPA(0.3), FIPA(0.02, step=0.7), CompletedFIPA(0.3), CompletedFIPA(0.02, pull=0.4), FIPA(0.1, floor=0.05))


def many(clients: int = 30, p: int = 600, rank: int = 6, dtype: torch.dtype = DOUBLE, seed: int = 0) -> Round:
    """Clients whose sketches have some directions in common, as those of one model have."""
    rng = generator(seed)
    common = orthonormal(p, 2 * rank, rng)
    sketches, deltas = [], []
    for _ in range(clients):
        chosen = common[:, torch.randperm(2 * rank, generator=rng)[:rank]]
        vectors = torch.linalg.qr(chosen + 0.02 * normal(p, rank, rng=rng)).Q.contiguous()
        values = 20 * torch.arange(1, rank + 1, dtype=DOUBLE) ** -1.5
        sketches.append(fipa.Sketch(vectors, values, one_parameter(p)).to(dtype))
        deltas.append(normal(p, rng=rng).to(dtype))
    return round_of(sketches, deltas, [5 + m for m in range(clients)])


def results(clients: Round, rule: fipa.Rule, limit: int) -> tuple[fipa.Result[Tensor], fipa.Result[Tensor]]:
    theta = torch.zeros_like(clients.deltas[0])
    return fipa.aggregate(theta, clients.updates, rule), fipa.aggregate(
        theta, clients.updates, rule, memory_limit=limit
    )


# --- what the formulas say ---


@FAST
@given(clients=sketch_rounds(), damping=DAMPINGS, pull=st.floats(0, 1), floor=st.floats(1e-3, 10))
def test_equals_dense_solves(clients: Round, damping: float, pull: float, floor: float) -> None:
    eye, b = torch.eye(clients.p, dtype=DOUBLE), clients.response
    expected = {
        FIPA(damping): torch.linalg.solve(clients.total + damping * eye, b),
        CompletedFIPA(damping, pull=pull): torch.linalg.solve(
            clients.total + damping * eye, pull * b + damping * clients.mean
        ),
        FIPA(damping, floor=floor): torch.linalg.solve(
            clients.total + (damping + floor) * eye, b + floor * clients.mean
        ),
    }
    for rule, d in expected.items():
        result = fipa.aggregate(torch.zeros(clients.p, dtype=DOUBLE), clients.updates, rule, memory_limit=0)
        error = float((result.theta - d).norm())
        assert error <= (result.diagnostics.error_bound + 1e-8) * float(d.norm()) + 1e-12
        assert result.diagnostics.error_bound <= TOLERANCE


@FAST
@given(clients=sketch_rounds(), damping=DAMPINGS)
def test_shares_are_those_of_the_dense_parts(clients: Round, damping: float) -> None:
    for rule in (FIPA(damping), CompletedFIPA(damping)):
        parts = dense_parts(rule, clients)
        d = sum(parts)
        assume(float(d.norm()) > 1e-6)
        expected = [float(part @ d / (d @ d)) for part in parts]
        result = fipa.aggregate(torch.zeros(clients.p, dtype=DOUBLE), clients.updates, rule, memory_limit=0)
        assert list(result.diagnostics.shares.values()) == pytest.approx(expected, abs=1e-3)


def test_nothing_to_go_by() -> None:
    """Sketches without curvature, and updates that are zero."""
    sketches = [fipa.Sketch(orthonormal(30, 2, generator(1)), torch.zeros(2, dtype=DOUBLE), one_parameter(30))] * 2
    still = round_of(sketches, [torch.zeros(30, dtype=DOUBLE)] * 2, [1, 2])
    moving = round_of(sketches, [torch.ones(30, dtype=DOUBLE)] * 2, [1, 2])
    assert not bool(results(still, FIPA(0.1), 0)[1].theta.any())
    assert not bool(results(moving, FIPA(0.1), 0)[1].theta.any())
    torch.testing.assert_close(results(moving, CompletedFIPA(0.1), 0)[1].theta, torch.ones(30, dtype=DOUBLE))


# --- many sketches ---


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize("rule", ITERATED, ids=str)
def test_as_exact_as_it_says(rule: FIPA | CompletedFIPA, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "_room", lambda *_: (400, 16))
    clients = many(dtype=dtype)
    exact, found = results(clients, rule, 2**16)
    length = float(exact.theta.norm())
    assert 0 < found.diagnostics.error_bound <= TOLERANCE
    assert float((found.theta - exact.theta).norm()) <= (TOLERANCE + torch.finfo(dtype).eps * 100) * length
    for client, share in exact.diagnostics.shares.items():
        assert found.diagnostics.shares[client] == pytest.approx(share, abs=1e-4)
    rank = exact.diagnostics.effective_rank
    assert found.diagnostics.effective_rank == pytest.approx(rank, abs=4 * (2 * rank / 14) ** 0.5)


@pytest.mark.parametrize("rule", [FIPA(1e-4), CompletedFIPA(1e-4)], ids=str)
def test_the_bound_holds_also_where_memory_ends_the_iteration(
    rule: FIPA | CompletedFIPA, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, bounds, errors = many(), [], []
    for columns in (16, 64, 128, 192):
        monkeypatch.setattr(krylov, "_room", lambda *_, columns=columns: (columns, 16))
        exact, found = results(clients, rule, 2**16)
        errors.append(float((found.theta - exact.theta).norm() / found.theta.norm()))
        bounds.append(found.diagnostics.error_bound)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-3


def test_products_are_in_double_where_single_precision_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a damping of 1e-6 of the curvature, products in float32 would leave few digits of the step."""
    monkeypatch.setattr(krylov, "_room", lambda *_: (60, 16))
    clients = many(clients=4, p=60, dtype=torch.float32)
    exact, found = results(clients, FIPA(2e-5), 0)
    assert found.diagnostics.error_bound <= TOLERANCE
    assert float((found.theta - exact.theta).norm()) < 1e-3 * float(exact.theta.norm())


# --- where they are, and in what order they come ---


@pytest.mark.parametrize("rule", ITERATED, ids=str)
def test_same_bits_in_memory_and_in_files_and_in_any_order(
    rule: FIPA | CompletedFIPA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fipa.spill.SMALLEST", 1)
    clients = [fipa.ClientUpdate(u.delta, u.num_examples, u.sketch, i) for i, u in enumerate(many(12).updates)]
    theta, limit = torch.zeros(600, dtype=DOUBLE), 150_000
    expected = aggregator(theta, clients, memory_limit=limit)(rule)
    assert expected.diagnostics.error_bound > 0
    order = torch.randperm(12, generator=generator(2)).tolist()
    for arriving in (clients, clients[::-1], [clients[i] for i in order]):
        shelf = Shelf(limit)
        assert {in_file(shelf.keep(one).delta) for one in arriving} == {False, True}
        result = fipa.aggregate(theta, (one for one in arriving), rule, memory_limit=limit)
        assert torch.equal(result.theta, expected.theta)
        assert result.diagnostics == expected.diagnostics


@pytest.mark.parametrize("name", RULES)
def test_every_other_rule_gives_the_same_bits_from_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fipa.spill.SMALLEST", 1)
    rule = RULES[name]
    updates = updates_for(rule, torch.float32, 910, 9, seed=1)
    shelf = Shelf(0)
    kept = [shelf.keep(update) for update in updates]
    assert all(in_file(update.delta) for update in kept)
    expected = aggregator(torch.zeros(910), updates)(rule)
    result = aggregator(torch.zeros(910), kept)(rule)
    assert torch.equal(result.theta, expected.theta)
    assert result.diagnostics == expected.diagnostics
    assert all(torch.equal(tensor, expected.state[key]) for key, tensor in result.state.items())


# --- how often sketches are read ---


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    products: list[int] = []
    grow = KrylovSpace.grow

    def one_more(space: KrylovSpace) -> bool:
        products.append(space.size)
        return grow(space)

    monkeypatch.setattr(KrylovSpace, "grow", one_more)
    return products


def test_other_dampings_and_a_correction_share_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "_room", lambda *_: (400, 16))
    clients, products = many(), counted(monkeypatch)
    updates = [fipa.ClientUpdate(u.delta, u.num_examples, u.sketch, i) for i, u in enumerate(clients.updates)]
    apply = aggregator(torch.zeros(600, dtype=DOUBLE), updates, memory_limit=0)
    first = apply(FIPA(0.05))
    needed = len(products)
    assert needed > 3
    apply(FIPA(0.2))
    apply(CompletedFIPA(0.5))
    assert len(products) == needed  # larger dampings need no more
    corrections = {i: 0.1 * u.delta.flip(0) for i, u in enumerate(clients.updates)}
    bent = apply(FIPA(0.05), {}, corrections)
    assert len(products) == 2 * needed
    again = apply(FIPA(0.05))
    assert len(products) == 2 * needed
    assert torch.equal(again.theta, first.theta)
    direct = aggregator(torch.zeros(600, dtype=DOUBLE), updates)(FIPA(0.05), {}, corrections)
    torch.testing.assert_close(bent.theta, direct.theta, rtol=0, atol=TOLERANCE * float(direct.theta.norm()))


def test_products_do_not_grow_with_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "_room", lambda *_: (400, 16))
    counts = []
    for clients in (20, 40, 80):
        products = counted(monkeypatch)
        results(many(clients), CompletedFIPA(0.3), 0)
        counts.append(len(products))
        monkeypatch.undo()
        monkeypatch.setattr(krylov, "_room", lambda *_: (400, 16))
    assert max(counts) <= counts[0] + 1


# --- without damping ---


@pytest.mark.parametrize("rule", [FIPA(), CompletedFIPA()], ids=str)
def test_without_damping_it_is_the_direct_way(rule: FIPA | CompletedFIPA) -> None:
    direct, limited = results(many(p=1200), rule, 32 * 180**2)
    assert torch.equal(direct.theta, limited.theta)
    assert limited.diagnostics.error_bound == 0.0


def test_without_damping_a_system_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fipa.aggregation.fipa._ALWAYS", 0)
    monkeypatch.setattr(krylov, "WIDTH", 4)
    with pytest.raises(fipa.FipaError, match=r"FIPA without damping solves a system of side 180 .* set a damping"):
        results(many(p=1200), FIPA(), 32 * 180**2 - 1)


def test_room() -> None:
    columns, width = krylov._room(272_474, fipa.spill.MEMORY_LIMIT)
    assert width == krylov.WIDTH
    assert columns >= 24 * width
    assert 8 * columns * 272_474 <= fipa.spill.MEMORY_LIMIT // 4
    columns, width = krylov._room(11_173_962, fipa.spill.MEMORY_LIMIT)
    assert columns >= 4 * width


def test_many_small_sketches_whose_system_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sketches fit, the R x R system does not: damped steps iterate, others say what to do."""
    monkeypatch.setattr("fipa.aggregation.fipa._ALWAYS", 0)
    monkeypatch.setattr(krylov, "WIDTH", 4)
    generator = torch.Generator().manual_seed(3)
    layout = fipa.Layout(("w",), ((400,),))
    updates = []
    for client in range(40):
        vectors = torch.linalg.qr(torch.randn(400, 6, generator=generator, dtype=torch.float64)).Q
        sketch = fipa.Sketch(vectors, torch.arange(6, 0, -1).double(), layout)
        delta = torch.randn(400, generator=generator, dtype=torch.float64)
        updates.append(fipa.ClientUpdate(delta, 10, sketch, client))
    theta, limit = torch.zeros(400, dtype=torch.float64), 40 * 6 * 400 * 8
    found = fipa.aggregate(theta, updates, fipa.FIPA(damping=0.5), memory_limit=limit)
    direct = fipa.aggregate(theta, updates, fipa.FIPA(damping=0.5))
    assert found.diagnostics.error_bound > 0 == direct.diagnostics.error_bound
    torch.testing.assert_close(found.theta, direct.theta, rtol=1e-4, atol=1e-6)
    with pytest.raises(fipa.FipaError, match="system of side 240"):
        fipa.aggregate(theta, updates, fipa.FIPA(), memory_limit=limit)
