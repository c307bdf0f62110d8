"""Eigenpairs of A^T A, on operators of every route and on matrices made to be hard."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from curvature.cases import LargestTensor, build, case, dense, eye, make, operator_of, randn
from fipa import SketchError
from fipa.curvature import solvers
from fipa.curvature.operator import CurvatureOperator
from fipa.curvature.solvers import _normalise, block_krylov, exact, subspace_iteration


class Matrix(CurvatureOperator):
    """A known matrix as an operator."""

    def __init__(self, A):
        self.A, self.like, (self.rows, self.parameters) = A, A, A.shape

    def forward(self, V):
        return self.A @ V

    def adjoint(self, Z):
        return self.A.T @ Z

    def trace(self, generator):
        return float(self.A.square().sum())


def with_singular_values(rows, parameters, sigma, seed=0):
    left = torch.linalg.qr(randn(rows, len(sigma), seed=seed)).Q
    right = torch.linalg.qr(randn(parameters, len(sigma), seed=seed + 1)).Q
    return Matrix(left * torch.as_tensor(sigma, dtype=torch.float64) @ right.T)


def solve(operator, rank, solver, oversampling=10, iterations=None, seed=0):
    if solver == "exact":
        return exact(operator, rank)
    function, default = (subspace_iteration, 40) if solver == "subspace" else (block_krylov, 12)
    iterations = default if iterations is None else iterations
    generator = torch.Generator().manual_seed(seed)
    return function(operator, rank, oversampling=oversampling, iterations=iterations, generator=generator)


def assert_orthonormal(U, atol=1e-9):
    torch.testing.assert_close(U.T @ U, torch.eye(U.shape[1], dtype=U.dtype), rtol=0, atol=atol)


def assert_eigenpairs(H, U, values, rank, tolerance=1e-9):
    """The `rank` leading eigenpairs of H, or all that are not zero if those are fewer."""
    true = torch.linalg.eigvalsh(H).flip(0)
    scale = float(true[0])
    supported = int((true[:rank] > 1e-12 * scale).sum())
    assert len(values) == supported
    assert U.shape == (len(H), supported)
    torch.testing.assert_close(values, true[:supported], rtol=0, atol=tolerance * scale)
    assert_orthonormal(U)
    torch.testing.assert_close(H @ U, U * values, rtol=0, atol=tolerance * scale)


SOLVERS = ["exact", "subspace", "krylov"]
HEAD_ROUTES = ["rows", "streamed", "matrix_free", "linear_head"]
ROUTE_CASES = [
    *((name, route) for name in ("mlp/cross_entropy/head", "resnet/mse/head") for route in HEAD_ROUTES),
    *(
        (name, route)
        for name in ("mlp/cross_entropy", "tied/mse", "cnn/residual", "mlp/pde", "normed/mse")
        for route in ("rows", "streamed", "matrix_free")
    ),
]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("rank", [2, 6])
@pytest.mark.parametrize(("name", "route"), ROUTE_CASES)
def test_eigenpairs_on_every_route(name, route, rank, solver):
    one = case(name)  # at most 21 rows: with as many columns, few iterations make every solver exact
    result = solve(build(one, route), rank, solver, oversampling=20, iterations=3)
    assert_eigenpairs(one.hessian, *result, rank)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("route", ["rows", "matrix_free"])
def test_more_rows_than_parameters(route, solver):
    model, x = make(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))), randn(30, 2)
    operator = operator_of(model, x, "mse", route=route)
    assert operator.rows > operator.parameters
    assert_eigenpairs(dense(operator), *solve(operator, 5, solver), 5)


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    parameters=st.integers(1, 40),
    support=st.integers(1, 40),
    rank=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_any_support(solver, rows, parameters, support, rank, seed):
    """Also with a rank far above what A supports: Krylov blocks then run out of new directions."""
    short = min(rows, parameters)
    sigma = torch.linspace(2, 1, min(support, short))
    operator = with_singular_values(rows, parameters, sigma, seed)
    rank = min(rank, short)
    # enough columns for subspace iteration, enough blocks for Krylov, to be exact
    enough = {"exact": {}, "subspace": {"oversampling": short}, "krylov": {"oversampling": 2, "iterations": short}}
    result = solve(operator, rank, solver, seed=seed, **enough[solver])
    assert_eigenpairs(operator.A.T @ operator.A, *result, rank)


@pytest.mark.parametrize("iterations", [1, 3, 8])
@pytest.mark.parametrize("shape", [(300, 60), (60, 300)])
def test_krylov_on_fewer_distinct_rows_than_columns(shape, iterations):
    # 5 distinct examples, each repeated: what a client with duplicated data sends
    A = randn(5, shape[1]).repeat(shape[0] // 5, 1)
    operator = Matrix(A)
    assert_eigenpairs(A.T @ A, *solve(operator, 20, "krylov", iterations=iterations), 20)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_repeated_eigenvalues(shape, solver):
    operator = with_singular_values(*shape, [2.0] * 4 + [1.0] * 6 + [0.1] * 10)
    assert_eigenpairs(operator.A.T @ operator.A, *solve(operator, 10, solver), 10)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_small_eigenvalues_keep_their_digits(shape, solver):
    # A Gram matrix has an error of about 1e-16 of its largest eigenvalue: 1e-3 of the smallest here.
    eigenvalues = torch.logspace(0, -13, 14, dtype=torch.float64)
    operator = with_singular_values(*shape, eigenvalues.sqrt())
    U, values = solve(operator, 14, solver, oversampling=30)
    torch.testing.assert_close(values, eigenvalues, rtol=1e-4, atol=0)
    assert_orthonormal(U, atol=1e-7)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_float32(shape, solver):
    double = with_singular_values(*shape, torch.linspace(3, 1, 12))
    U, values = solve(Matrix(double.A.float()), 8, solver)
    assert U.dtype == values.dtype == torch.float32
    assert_orthonormal(U, atol=1e-5)
    true = torch.linalg.eigvalsh(double.A.T @ double.A).flip(0)[:8]
    torch.testing.assert_close(values.double(), true, rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 1)])
def test_zero_has_no_eigenpairs(shape, solver):
    U, values = solve(Matrix(torch.zeros(shape, dtype=torch.float64)), 2, solver)
    assert U.shape == (shape[1], 0)
    assert values.shape == (0,)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
def test_scale_does_not_matter(scale, solver):
    operator = with_singular_values(20, 30, torch.linspace(2, 1, 10))
    U, values = solve(operator, 5, solver)
    U_scaled, values_scaled = solve(Matrix(operator.A * scale**0.5), 5, solver)
    torch.testing.assert_close(values_scaled / scale, values, rtol=1e-9, atol=0)
    torch.testing.assert_close(U_scaled @ U_scaled.T, U @ U.T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", ["subspace", "krylov"])
def test_start_vectors_come_from_the_seed(solver):
    operator = with_singular_values(40, 60, torch.linspace(2, 1, 40))
    first, again, other = (solve(operator, 4, solver, iterations=1, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.allclose(first[1], other[1])


@pytest.mark.parametrize("solver", ["subspace", "krylov"])
def test_more_iterations_come_closer_from_below(solver):
    # Ritz values never exceed the eigenvalues, and the spaces they are taken on are better with every iteration.
    operator = with_singular_values(80, 100, torch.linspace(2, 1, 80))
    true = torch.linalg.eigvalsh(operator.A.T @ operator.A).flip(0)[:5]
    errors = []
    for iterations in (0, 1, 2, 4, 8):
        _, values = solve(operator, 5, solver, oversampling=5, iterations=iterations)
        assert len(values) == 5
        assert bool((values <= true * (1 + 1e-12)).all())
        errors.append(float((true - values).sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * errors[0]


def test_subspace_iteration_is_the_papers():
    """V <- orth(H V) q times, then the eigenpairs of V^T H V: repeated here in six lines."""
    operator = with_singular_values(40, 30, torch.linspace(2, 1, 30))
    H = operator.A.T @ operator.A
    V = operator.random(30, 6, torch.Generator().manual_seed(3))
    for _ in range(4):
        V = torch.linalg.qr(H @ V).Q
    values, W = torch.linalg.eigh(V.T @ H @ V)
    U, ritz = solve(operator, 4, "subspace", oversampling=2, iterations=4, seed=3)
    torch.testing.assert_close(ritz, values.flip(0)[:4])
    torch.testing.assert_close(U @ U.T, (V @ W.flip(1)[:, :4]) @ (V @ W.flip(1)[:, :4]).T, rtol=0, atol=1e-9)


def test_krylov_needs_fewer_products_than_subspace_iteration():
    operator = with_singular_values(80, 100, 0.97 ** torch.arange(80))
    true = torch.linalg.eigvalsh(operator.A.T @ operator.A).flip(0)[:10].sum()
    _, by_subspace = solve(operator, 10, "subspace", oversampling=10, iterations=4)  # 20 columns x 9 products
    _, by_krylov = solve(operator, 10, "krylov", oversampling=10, iterations=6)  # 10 columns x 13 products
    assert float(true - by_krylov.sum()) < 1e-3 * float(true - by_subspace.sum())


def test_exact_refuses_what_is_too_large(monkeypatch):
    monkeypatch.setattr(solvers, "EXACT_LIMIT", 7)
    assert len(exact(Matrix(eye(7)), 3)[1]) == 3
    with pytest.raises(SketchError, match=r"8 x 8 matrix \(limit 7\).*krylov"):
        exact(Matrix(eye(8)), 3)


@pytest.mark.long
@pytest.mark.parametrize("route", ["rows", "matrix_free"])
@pytest.mark.parametrize("wide", [True, False], ids=["more parameters", "more rows"])
def test_exact_makes_nothing_of_the_size_of_the_rows(wide, route):
    inputs, hidden, examples = (30, 92, 113) if wide else (10, 30, 800)
    model = make(lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 4)))
    x = randn(examples, inputs)
    A = operator_of(model, x, "mse", route="rows").matrix
    rows_bytes = A.numel() * 8
    short, long = sorted(A.shape)
    assert rows_bytes > 7 * max(64 * long, short * short) * 8
    with LargestTensor() as largest:
        operator = operator_of(model, x, "mse", route=route, memory_limit=rows_bytes // 7)
        U, values = exact(operator, 5)
    assert largest.nbytes <= rows_bytes // 7
    gram = A @ A.T if wide else A.T @ A
    true = torch.linalg.eigvalsh(gram).flip(0)[:5]
    torch.testing.assert_close(values, true, rtol=1e-10, atol=0)
    assert_orthonormal(U)
    torch.testing.assert_close(A.T @ (A @ U), U * values, rtol=0, atol=1e-9 * float(true[0]))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(solver, bad):
    A = randn(6, 8)
    A[2, 3] = bad
    with pytest.raises(SketchError, match="not finite"):
        solve(Matrix(A), 3, solver)


def test_columns_that_rounding_has_made_dependent_become_orthonormal() -> None:
    generator = torch.Generator().manual_seed(0)
    columns = torch.linalg.qr(torch.randn(40, 6, generator=generator)).Q
    columns[:, 5] = columns[:, 4] * (1 + 1e-7)  # the Gram matrix of these is singular
    values = torch.ones(6)
    vectors, same = _normalise(columns, values)
    assert same is values
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors[:, :5], columns[:, :5], atol=1e-5, rtol=0)
