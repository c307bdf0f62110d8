"""The stacked sketches: three ways to one spectrum, none of which stacks anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fipa
from aggregation.strategies import (
    DOUBLE,
    FAST,
    Round,
    generator,
    normal,
    one_parameter,
    orthonormal,
    round_of,
    sketch_rounds,
)
from fipa import parallel
from fipa.aggregation import stack
from fipa.aggregation.fipa import ReducedSolve
from fipa.aggregation.stack import Stack
from fipa.threads import threads

# The smallest relative eigenvalue that must be resolved selects the path.
PATHS = {"own dtype": 1.0, "float64 Gram": 1e-6, "QR": 0.0}


def stack_of(clients: Round) -> Stack:
    return Stack([u.sketch for u in clients.updates], clients.weights)


def dense_rows(clients: Round) -> Tensor:
    """A (R x p), stacked for real."""
    sketches = [u.sketch.to(DOUBLE) for u in clients.updates]
    together = zip(clients.weights, sketches, strict=True)
    return torch.cat([(w * s.eigenvalues).sqrt()[:, None] * s.eigenvectors.T for w, s in together])


@pytest.mark.parametrize("path", PATHS)
@FAST
@given(clients=sketch_rounds())
def test_spectrum_equals_dense_eigenvalues(path: str, clients: Round) -> None:
    A = dense_rows(clients)
    values, vectors = stack_of(clients).spectrum(PATHS[path])
    expected = torch.linalg.eigvalsh(A @ A.T).flip(0)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    assert bool((values >= 0).all())  # a square root will be taken, or a damping added
    torch.testing.assert_close(vectors @ values.diag() @ vectors.T, A @ A.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(A), dtype=DOUBLE), rtol=0, atol=1e-12)


@FAST
@given(clients=sketch_rounds())
def test_products_equal_those_of_the_dense_stack(clients: Round) -> None:
    A, stack = dense_rows(clients), stack_of(clients)
    v, z = clients.deltas[0], torch.linspace(-1, 1, len(A), dtype=DOUBLE)
    torch.testing.assert_close(stack.times(v), A @ v, rtol=0, atol=1e-12)
    torch.testing.assert_close(stack.transposed(z), A.T @ z, rtol=0, atol=1e-12)
    each = torch.cat(stack.times_each(clients.deltas))
    start, expected = 0, []
    for rank, delta in zip(stack.ranks, clients.deltas, strict=True):
        expected.append(A[start : start + rank] @ delta)
        start += rank
    torch.testing.assert_close(each, torch.cat(expected), rtol=0, atol=1e-12)


@FAST
@given(clients=sketch_rounds())
def test_bound_of_the_largest_eigenvalue_holds(clients: Round) -> None:
    largest = float(torch.linalg.eigvalsh(clients.total)[-1])
    bound = stack_of(clients).largest_possible
    assert largest <= bound * (1 + 1e-12)
    assert bound <= len(clients.updates) * largest * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_many_blocks_of_rows_equal_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last block of fewer rows than the stack has columns included."""
    rng = generator(0)
    sketches = [fipa.Sketch(orthonormal(23, r, rng), torch.ones(r, dtype=DOUBLE), one_parameter(23)) for r in (4, 6)]
    stack = Stack(sketches, [0.5, 0.5])
    whole = stack.spectrum(PATHS[path])[0]
    monkeypatch.setattr("fipa.aggregation.stack._BLOCK_ROWS", 7)
    torch.testing.assert_close(stack.spectrum(PATHS[path])[0], whole, rtol=0, atol=1e-13)


def nearly_parallel_clients() -> tuple[Stack, Tensor]:
    """Two clients of rank 4 whose eigenvectors differ by angles of 1e-8; the small eigenvalues of H, exactly."""
    basis = orthonormal(50, 8, generator(3))
    angle = 1e-8 * torch.arange(4.0, 0.0, -1.0, dtype=DOUBLE)
    tilted = angle.cos() * basis[:, :4] + angle.sin() * basis[:, 4:]
    ones, layout = torch.ones(4, dtype=DOUBLE), one_parameter(50)
    stack = Stack([fipa.Sketch(basis[:, :4], ones, layout), fipa.Sketch(tilted, ones, layout)], [0.5, 0.5])
    return stack, (angle / 2).sin().square()


def test_qr_resolves_eigenvalues_that_a_gram_matrix_cannot() -> None:
    stack, exact = nearly_parallel_clients()

    def worst(resolution: float) -> float:
        return float(((stack.spectrum(resolution)[0][4:] - exact) / exact).abs().max())

    assert worst(PATHS["QR"]) < 1e-6
    # 1e-16 of the largest: lost in the rounding of the Gram matrix. Else the QR path would be of no use.
    assert worst(PATHS["float64 Gram"]) > 0.1


def test_undamped_rule_solves_ill_conditioned_sketches() -> None:
    """Eigenvalues of H down to 1e-12 of the largest, against least squares with the stacked rows themselves."""
    rng = generator(1)
    p, r = 40, 7
    values = torch.logspace(0, -12, r, dtype=DOUBLE)
    sketches = [fipa.Sketch(orthonormal(p, r, rng), values, one_parameter(p)) for _ in range(3)]
    delta = normal(p, rng=rng)
    # All clients agree, so that the exact answer is of the size of delta and errors are not hidden by its size.
    clients = round_of(sketches, [delta] * 3, [10, 20, 30])
    A = dense_rows(clients).numpy()
    expected, *_ = np.linalg.lstsq(A, A @ delta.numpy(), rcond=1e-13**0.5)
    change = clients.change(fipa.FIPA(cutoff=1e-13)).numpy()
    assert np.linalg.norm(change - expected) < 1e-8 * np.linalg.norm(expected)
    # With the default cut-off the small eigenvalues count as zero: the directions above are really used.
    assert np.linalg.norm(clients.change(fipa.FIPA()).numpy() - expected) > 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("damping", [0.0, 1e-7, 1.0], ids=["QR", "float64 Gram", "own dtype"])
@pytest.mark.parametrize("rule", [fipa.FIPA, fipa.CompletedFIPA])
def test_float32_sketches(rule: type[fipa.FIPA] | type[fipa.CompletedFIPA], damping: float) -> None:
    rng = generator(2)
    p = 60
    values = torch.logspace(1, -1, 5, dtype=DOUBLE)
    sketches = [fipa.Sketch(orthonormal(p, 5, rng), values, one_parameter(p)) for _ in range(3)]
    exact = round_of(sketches, [normal(p, rng=rng) for _ in range(3)], [5, 7, 9])
    single = [fipa.ClientUpdate(u.delta.float(), u.num_examples, u.sketch.to(torch.float32)) for u in exact.updates]
    change = fipa.aggregate(torch.zeros(p), single, rule(damping)).theta
    assert change.dtype == torch.float32
    torch.testing.assert_close(change.double(), exact.change(rule(damping)), rtol=0, atol=2e-5)


def test_float32_takes_the_spectrum_in_float64() -> None:
    """Where products in float32 are not safe, small eigenvalues of float32 sketches are right to eight digits."""
    rng = generator(4)
    sketches = [
        fipa.Sketch(orthonormal(30, 3, rng).float(), torch.tensor([1.0, 1e-3, 1e-5]), one_parameter(30))
        for _ in range(2)
    ]
    stack = Stack(sketches, [0.25, 0.75])
    A = dense_rows(round_of(sketches, [torch.zeros(30)] * 2, [1, 3]))
    exact = torch.linalg.svdvals(A).square()
    for path in ("float64 Gram", "QR"):
        values, _ = stack.spectrum(PATHS[path])
        assert values.dtype == DOUBLE
        torch.testing.assert_close(values, exact, rtol=1e-8, atol=0)


def hard_sketches(name: str) -> list[fipa.Sketch]:
    """Five clients in float32 whose sketches overlap, are ill-conditioned, or have no full rank."""
    rng = generator(7)
    p = 60 if name == "more rows than parameters" else 800
    shared, values = orthonormal(p, 20, rng), 50 * torch.arange(1, 21, dtype=DOUBLE) ** -1.5
    steep = torch.logspace(2, -6, 20, dtype=DOUBLE)

    def vectors() -> Tensor:
        fresh = orthonormal(p, 20, rng)
        if name == "the same eigenvectors":
            return shared
        if name == "half of the eigenvectors":
            return torch.linalg.qr(torch.cat([shared[:, :10], fresh[:, :10]], dim=1)).Q
        angle = {"nearly parallel": 1e-2, "parallel up to rounding": 1e-7}.get(name)
        return fresh if angle is None else torch.linalg.qr(shared + angle * fresh).Q

    own = steep if name in ("steep", "half of the eigenvectors") else values
    return [fipa.Sketch(vectors().float(), own.float(), one_parameter(p)) for _ in range(5)]


HARD = (
    "random", "the same eigenvectors", "half of the eigenvectors", "nearly parallel", "parallel up to rounding",
    "steep", "more rows than parameters",
)  # fmt: skip


@pytest.mark.parametrize("cutoff", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("name", HARD)
def test_pseudo_inverse_of_float32_sketches_loses_nothing_to_the_gram_matrix(
    name: str, cutoff: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the singular value decomposition of the dense stack, and against the QR that resolves all."""
    sketches, weights = hard_sketches(name), [0.1, 0.2, 0.3, 0.15, 0.25]
    p, rng = len(sketches[0].eigenvectors), generator(8)
    clients = round_of(sketches, [torch.randn(p, generator=rng) for _ in sketches], [2, 4, 6, 3, 5])
    assert clients.weights == weights
    A = dense_rows(clients)
    left, singular, right = torch.linalg.svd(A, full_matrices=False)
    values = singular.square() / singular[0].square()
    noise = (len(A) * torch.finfo(torch.float32).eps) ** 2
    kept = values > max(cutoff, noise)
    y = torch.cat([rows @ u.delta.double() for rows, u in zip(A.split(20), clients.updates, strict=True)])
    exact = right[kept].T @ ((left[:, kept].T @ y) / singular[kept])

    def errors() -> tuple[float, float]:
        solve = ReducedSolve(stack_of(clients), 0.0, cutoff)
        assert solve.effective_rank == int(kept.sum())
        step = fipa.aggregate(torch.zeros(p), clients.updates, fipa.FIPA(cutoff=cutoff)).theta
        return tuple(float((d - exact).norm() / exact.norm()) for d in (A.T @ solve(y), step))  # type: ignore[return-value]

    stack = stack_of(clients)
    assert stack.cut(cutoff) > 0.0  # the Gram matrix
    alone, whole = errors()
    monkeypatch.setattr(Stack, "cut", lambda *_: 0.0)  # the QR
    _, before = errors()
    assert alone < torch.finfo(torch.float32).eps / 10
    assert whole <= 1.01 * before + 1e-9


def test_pseudo_inverse_takes_a_qr_where_a_gram_matrix_would_lose_digits() -> None:
    single, double = (stack_of(round_of([s], [torch.zeros(800)], [1])) for s in _in_both_precisions())
    assert single.cut(1e-5) > 0.0
    assert single.cut(1e-8) == single.cut(0.0) == 0.0  # the Gram matrix does not resolve such a cut
    assert double.cut(1e-5) == double.cut(1e-1) == 0.0  # nor as many digits as these sketches have


def _in_both_precisions() -> tuple[fipa.Sketch, fipa.Sketch]:
    sketch = hard_sketches("random")[0]
    return sketch, sketch.to(DOUBLE)


class LargestNew(TorchDispatchMode):
    """Records the size of the largest tensor that was made, as opposed to a view of an old one."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("damping", [0.0, 1e-7, 1.0], ids=["QR", "float64 Gram", "own dtype"])
@pytest.mark.parametrize("rule", [fipa.FIPA, fipa.CompletedFIPA])
def test_nothing_larger_than_a_block_is_allocated(
    rule: type[fipa.FIPA] | type[fipa.CompletedFIPA], damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sketches that are in memory row by row, as `fipa.sketch` makes them; others are copied once."""
    p, ranks, block = 60_000, (4, 4, 4), 16384
    R = sum(ranks)
    limit = max((block + R) * R, p)  # a block of rows below the triangular factor
    assert limit < min(ranks) * p  # so that a copy of one client's sketch would not pass for a block
    rng = generator(5)
    updates = []
    for r in ranks:
        sketch = fipa.Sketch(orthonormal(p, r, rng).float().contiguous(), torch.linspace(2, 1, r), one_parameter(p))
        updates.append(fipa.ClientUpdate(torch.randn(p, generator=rng), 10 * r, sketch))
    theta = torch.zeros(p)
    monkeypatch.setattr(parallel, "cores", lambda: 1)  # what other threads make is not seen
    with LargestNew() as largest:
        fipa.aggregate(theta, updates, rule(damping))
    assert p <= largest.numel <= limit


def test_the_gram_matrix_is_the_same_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared out to threads, and not: its products are few enough to stay in one otherwise."""
    sketches = [fipa.Sketch(orthonormal(300, 8, generator(i)), torch.ones(8), one_parameter(300)) for i in range(3)]
    whole = Stack(sketches, [0.2, 0.3, 0.5])._gram(torch.float64)
    monkeypatch.setattr(stack, "_WORTH_THREADS", 0)
    used = set()
    monkeypatch.setattr(parallel, "cores", lambda: used.add(1) or 2)
    with threads(1):
        assert torch.equal(Stack(sketches, [0.2, 0.3, 0.5])._gram(torch.float64), whole)
    assert used
