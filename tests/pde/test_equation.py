"""From an equation to a federated problem: losses, curvature, metrics, pictures, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation.cases import run
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

import fipa
from fipa import FIPA, Curves, FipaError, Maps, Problem, Residual
from fipa.clients.objective import Objective, StackedObjective
from fipa.models import mlp
from fipa.pde import (
    PDE,
    Box,
    Field,
    Points,
    Region,
    dirichlet,
    federated,
    grid_split,
    manufactured,
    relative_error,
    zero,
)
from fipa.problems.elliptic import poisson
from pde.cases import DOUBLE, network, newton

SMALL = Points(interior=5, boundary=3, test=16)
HALVES = grid_split(Box.cube(1), [[0.5]])


def wave(x: Any) -> Any:
    return torch.sin(math.pi * x[:, 0])


def poisson_1d(u: Field, x: Tensor, f: Tensor) -> Tensor:
    return -u.laplacian - f


LINE = PDE(Box.cube(1), poisson_1d, lambda x: math.pi**2 * wave(x), wave)


def solve(pde: PDE = LINE, model: nn.Module | None = None, points: Points = SMALL, **more: Any) -> Problem:
    d = pde.domain.axes
    split = more.pop("regions", None) or grid_split(pde.domain, [[(pde.domain.low[0] + pde.domain.high[0]) / 2]])
    net = model or mlp([d, 4, 1], generator=torch.Generator().manual_seed(0))
    return federated(pde, split, net, points, seed=0, **more)


# --- the loss and its curvature by hand ---

PENALTY = 7.0


def square() -> Problem:
    """-Laplacian u = f on the unit square in two halves; each owns three faces."""
    return poisson(3, points=SMALL, penalty=PENALTY, hidden=(4,))


def rows(problem: Problem, client: int) -> Callable[[Tensor], Tensor]:
    """The stacked residuals times the roots of their weights, as a function of flat parameters, without jets."""
    interior, boundary = problem.clients[client].data
    x, s = interior.inputs[0], boundary.inputs[0]
    assert (len(x), len(s)) == (5, 9)
    f = 2 * math.pi**2 * torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])

    def stacked(theta: Tensor) -> Tensor:
        params = problem.layout.unflatten(theta)

        def u(point: Tensor) -> Tensor:
            return functional_call(problem.model, params, (point[None],))[0, 0]

        inside = -vmap(lambda p: hessian(u)(p).trace())(x) - f
        edge = vmap(u)(s)  # the solution is zero there
        return torch.cat([inside / math.sqrt(5), edge * math.sqrt(PENALTY / 9)])

    return stacked


def test_loss_of_a_client() -> None:
    problem = square()
    for client in (0, 1):
        by_hand = 0.5 * rows(problem, client)(problem.initial).square().sum()
        terms = problem.clients[client].data
        assert sum(term.loss(problem.model).item() for term in terms) == pytest.approx(float(by_hand), rel=1e-12)


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"route": "rows", "memory_limit": 1000}, {"route": "rows", "memory_limit": 0}, {"route": "matrix_free"}],
    ids=str,
)
def test_the_sketch_is_the_gauss_newton_matrix_of_the_loss(client: int, options: dict[str, Any]) -> None:
    """Interior and boundary rows weigh in the curvature what they weigh in the loss."""
    problem = square()
    J = jacrev(rows(problem, client))(problem.initial)
    found = fipa.sketch(problem.model, problem.clients[client].data, "least_squares", rank=None, **options)
    U = found.eigenvectors
    torch.testing.assert_close(U * found.eigenvalues @ U.T, J.T @ J, rtol=1e-9, atol=1e-9)
    assert found.trace == pytest.approx(float(J.square().sum()), rel=1e-9)


def test_gradients_of_two_clients_side_by_side() -> None:
    problem = square()
    objectives = [Objective(problem.model, problem.layout, client) for client in problem.clients]
    thetas = torch.stack([problem.initial, 0.7 * problem.initial + 0.1])
    found = StackedObjective(objectives).gradients(thetas)
    for client, theta in enumerate(thetas):
        r, J = rows(problem, client)(theta), jacrev(rows(problem, client))(theta)
        torch.testing.assert_close(found[client], J.T @ r, rtol=1e-10, atol=1e-11)
        (alone,) = StackedObjective(objectives[client : client + 1]).gradients(theta[None])
        torch.testing.assert_close(alone, J.T @ r, rtol=1e-10, atol=1e-11)


def test_points_of_each_client() -> None:
    """Inside of its region, and on those faces of the domain that it touches."""
    problem = square()
    for client, (low, high) in zip(problem.clients, ((0.0, 0.5), (0.5, 1.0)), strict=True):
        x, s = (term.inputs[0] for term in client.data)
        assert low <= float(x[:, 0].min()) <= float(x[:, 0].max()) <= high
        assert client.num_examples == 5 + 9
        end = 0.0 if low == 0 else 1.0
        on = [s[:, 0] == end, s[:, 1] == 0, s[:, 1] == 1]
        assert [int(face.sum()) for face in on] == [3, 3, 3]
        assert bool(((s[:, 0] >= low) & (s[:, 0] <= high)).all())
        assert client.data[1].weight == PENALTY
    one, other = (client.data[0].inputs[0] for client in problem.clients)
    assert not torch.allclose(one + torch.tensor([0.5, 0.0]), other)


def test_seeds() -> None:
    first, again, other = (poisson(seed, points=SMALL, hidden=(4,)) for seed in (0, 0, 1))
    for one, same, different in zip(first.clients, again.clients, other.clients, strict=True):
        for a, b, c in zip(one.data, same.data, different.data, strict=True):
            assert torch.equal(a.inputs[0], b.inputs[0])
            assert not torch.equal(a.inputs[0], c.inputs[0])
    assert not torch.equal(first.initial, other.initial)


def test_a_client_without_a_boundary_has_no_such_term() -> None:
    regions = [*HALVES, Region((0.2,), (0.4,)), Region((0.0,), (0.3,), boundary=False)]
    problem = solve(regions=regions)
    assert [len(client.data) for client in problem.clients] == [2, 2, 1, 1]


def test_further_terms_of_a_client() -> None:
    def extra(client: int, region: Region) -> list[Residual]:
        x = torch.tensor([[region.low[0]]], dtype=DOUBLE)
        return [Residual(lambda u, x: u(x)[:, 0] - 1, x, weight=3.0)] if client == 1 else []

    problem = solve(extra=extra)
    assert [len(client.data) for client in problem.clients] == [2, 3]
    term = problem.clients[1].data[2]
    value = problem.model(torch.tensor([[0.5]], dtype=DOUBLE)).item()
    assert term.loss(problem.model).item() == pytest.approx(1.5 * (value - 1) ** 2)


# --- metrics ---


def zeros(d: int) -> nn.Module:
    model = mlp([d, 3, 1], generator=torch.Generator())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_relative_error_on_a_regular_grid() -> None:
    """Constant 2 instead of sin(pi x) on five points: sin is 0, r, 1, r, 0 with r = 1 / sqrt 2."""
    problem = solve(model=zeros(1), points=Points(interior=5, test=5))
    assert problem.name == "relative L2 error"
    theta = problem.initial.clone()
    assert problem.evaluate(theta) == pytest.approx(1.0)
    theta[-1] = 2.0
    r = math.sqrt(0.5)
    expected = math.sqrt(4 + (2 - r) ** 2 + 1 + (2 - r) ** 2 + 4) / math.sqrt(r * r + 1 + r * r)
    assert problem.evaluate(theta) == pytest.approx(expected)


def test_relative_error_of_two_vectors() -> None:
    assert float(relative_error(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))) == pytest.approx(5 / 4)


def test_without_a_solution_the_metric_is_the_residual() -> None:
    """u = 0 against -u'' = x: the root of the mean of x^2 on the grid 0, 1/2, 1."""
    pde = PDE(Box.cube(1), poisson_1d, lambda x: x[:, 0])
    problem = solve(pde, zeros(1), Points(interior=5, test=3))
    assert problem.name == "root mean square of the residual"
    assert problem.evaluate(problem.initial) == pytest.approx(math.sqrt((0.25 + 1) / 3))
    assert isinstance(problem.picture, Curves)
    assert problem.picture.target is None
    plane = PDE(Box.cube(2), poisson_1d, lambda x: x[:, 0])
    problem = solve(plane, zeros(2), Points(interior=5, test=4000))
    assert problem.evaluate(problem.initial) == pytest.approx(math.sqrt(1 / 3), abs=0.02)


def test_a_metric_of_ones_own() -> None:
    problem = solve(metric=lambda model: 42.0, name="answer")
    assert (problem.name, problem.evaluate(problem.initial)) == ("answer", 42.0)


# --- pictures ---


def test_a_curve_in_one_dimension() -> None:
    regions = [Region((0.0,), (0.6,)), Region((0.4,), (1.0,))]
    picture = solve(model=zeros(1), regions=regions, labels=("s", "t")).picture
    assert isinstance(picture, Curves)
    assert picture.error
    assert picture.regions == ((0.0, 0.6), (0.4, 1.0))
    assert (picture.x_label, picture.target_label) == ("s", "exact solution")
    torch.testing.assert_close(picture.x, torch.linspace(0, 1, 401, dtype=DOUBLE))
    torch.testing.assert_close(picture.target, torch.sin(math.pi * picture.x))
    assert picture.predict(zeros(1)).tolist() == [0.0] * 401


class Coordinates(nn.Module):
    """x + 10 y + 100 z + a parameter."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.line = nn.Linear(d, 1, dtype=DOUBLE)
        with torch.no_grad():
            self.line.weight.copy_(10.0 ** torch.arange(d)[None])
            self.line.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def test_a_map_in_two_dimensions() -> None:
    """Rows are y ascending, columns x ascending."""
    domain = Box((0.0, -1.0), (2.0, 1.0))
    pde = PDE(domain, poisson_1d, exact=lambda x: x[:, 0] + 10 * x[:, 1])
    regions = [Region((0.0, -1.0), (1.5, 1.0)), Region((1.0, -1.0), (2.0, 1.0))]
    picture = solve(pde, regions=regions).picture
    assert isinstance(picture, Maps)
    assert picture.extent == (0.0, 2.0, -1.0, 1.0)
    assert picture.boxes == ((0.0, 1.5, -1.0, 1.0), (1.0, 2.0, -1.0, 1.0))
    assert picture.target is not None
    side = len(picture.target)
    assert picture.target.shape == (side, side)
    assert float(picture.target[0, 0]) == pytest.approx(-10)
    assert float(picture.target[0, -1]) == pytest.approx(2 - 10)
    assert float(picture.target[-1, 0]) == pytest.approx(10)
    torch.testing.assert_close(picture.predict(Coordinates(2)).detach(), picture.target)
    assert "cut" not in picture.title


def test_a_cut_through_the_middle_in_three_dimensions() -> None:
    domain = Box((0.0, 0.0, 2.0), (1.0, 1.0, 6.0))
    pde = PDE(domain, poisson_1d, exact=lambda x: x[:, 0] + 10 * x[:, 1] + 100 * x[:, 2])
    picture = solve(pde, regions=grid_split(domain, [[0.5], [], [3.0]])).picture
    assert isinstance(picture, Maps)
    assert picture.boxes == (None, None, (0.0, 0.5, 0.0, 1.0), (0.5, 1.0, 0.0, 1.0))  # those with z = 4 in them
    assert picture.target is not None
    assert float(picture.target[0, 0]) == pytest.approx(400)
    assert float(picture.target[-1, 0]) == pytest.approx(410)
    torch.testing.assert_close(picture.predict(Coordinates(3)).detach(), picture.target)
    assert "cut through the middle" in picture.title
    split = solve(pde, regions=grid_split(domain, [[], [], [4.0]])).picture  # right along the plane
    assert isinstance(split, Maps)
    assert split.boxes == (None, (0.0, 1.0, 0.0, 1.0))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_picture_needs_no_exact_solution(d: int) -> None:
    pde = PDE(Box.cube(d), poisson_1d)
    picture = solve(pde, regions=list(reversed(grid_split(pde.domain, [[0.5]]))), metric=lambda model: 1.0).picture
    assert isinstance(picture, Curves if d == 1 else Maps)
    assert picture.target is None
    places = picture.regions if isinstance(picture, Curves) else picture.boxes
    assert [place[:2] for place in places if place is not None] == [(0.5, 1.0), (0.0, 0.5)]


# --- what is refused ---

OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "scalar": (lambda u, x, f: (u.laplacian + f).sum(), r"the residual must be a tensor \(5,\) at 5 points, got \(\)"),
    "too few": (lambda u, x, f: u.laplacian[:2], r"the residual must be .*got \(2,\)"),
    "list": (lambda u, x, f: [0.0] * 5, "the residual must be .*got a list"),
    "forgotten": (lambda u, x, f: None, "the residual must be .*got a NoneType"),
    "column times row": (lambda u, x, f: -u.laplacian + x[:, :1] * u.value - f, r"\(5, 5\)"),
    "nan": (
        lambda u, x, f: u.laplacian + (x[:, 0] - 2).log(),
        r"the interior residual of client 0 is \[nan\] at x = \[0\.\d+\] for the initial model",
    ),
    "second derivatives": (lambda u, x, f: u.dd(1), "carries the Laplacian only"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_residuals_that_cannot_be(name: str) -> None:
    operator, message = OPERATORS[name]
    d = 2 if name == "second derivatives" else 1
    with pytest.raises(FipaError, match=message):
        solve(PDE(Box.cube(d), operator, laplacian=d == 2))


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (lambda u, x, g: u.value / 0 * 0, r"the boundary residual of client 0 is \[nan\] at x = \[0.0\]"),
        (lambda u, x, g: u.value[:0], r"the condition must be .*got \(0,\)"),
    ],
)
def test_conditions_that_cannot_be(condition: Callable[..., Any], message: str) -> None:
    with pytest.raises(FipaError, match=message):
        solve(PDE(Box.cube(1), poisson_1d, condition=condition))


def not_a_number(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 0.5, math.nan, 1.0).to(DOUBLE)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"source": not_a_number}, r"the source is nan at x = \[0\.[5-9]\d*\]"),
        ({"exact": not_a_number}, r"the exact solution is nan at x = \[0\.\d+\]"),
        ({"values": not_a_number}, r"the boundary value is nan at x = \[1\.0\]"),
        ({"source": lambda x: x[:, 0] / 0}, "the source is inf at"),
        ({"source": lambda x: 1.0}, r"the source must be a tensor \(5,\) at 5 points, got a float"),
        ({"source": lambda x: x}, r"the source must be a tensor \(5,\) at 5 points, got \(5, 1\)"),
        ({"values": lambda x: x}, r"the boundary value must be a tensor \(1,\) at 1 points, got \(1, 1\)"),
        ({"exact": lambda x: x}, r"the exact solution must be a tensor \(16,\) at 16 points, got \(16, 1\)"),
        ({"exact": zero}, "the exact solution is zero at every test point"),
    ],
)
def test_numbers_that_cannot_be(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(FipaError, match=message):
        solve(PDE(Box.cube(1), poisson_1d, **parts))


def test_manufactured_equations_must_subtract_the_source() -> None:
    def wrong(u: Field, x: Tensor, f: Tensor) -> Tensor:
        return u.laplacian + f

    with pytest.raises(FipaError, match=r"fails the residual: it must subtract its last argument"):
        manufactured(Box.cube(1), wrong, lambda x: torch.sin(x[:, 0]))
    with pytest.raises(FipaError, match=r"the exact solution must be a tensor \(5,\) at 5 points, got \(5, 1\)"):
        manufactured(Box.cube(1), poisson_1d, torch.sin)


def test_no_such_axis() -> None:
    with pytest.raises(FipaError, match="there is no axis 1: the points have 1"):
        solve(PDE(Box.cube(1), lambda u, x, f: u.d(1)))


def test_the_residual_is_the_metric_of_a_float32_model_without_a_solution() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    problem = federated(PDE(Box.cube(1), poisson_1d), grid_split(Box.cube(1), []), model, Points(4, test=6), seed=0)
    assert 0 < problem.evaluate(problem.initial) < 10


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.nan])
def test_penalty_must_be_positive(penalty: float) -> None:
    with pytest.raises(FipaError, match=r"problem\.penalty must be positive, got"):
        solve(penalty=penalty)


@pytest.mark.parametrize("name", ["interior", "boundary", "test"])
@pytest.mark.parametrize("count", [0, -3])
def test_counts_must_be_positive(name: str, count: int) -> None:
    with pytest.raises(FipaError, match=rf"{name} must be at least 1, got {count}"):
        Points(**({"interior": 5} | {name: count}))


def test_a_split_is_checked() -> None:
    with pytest.raises(FipaError, match=r"leaves \[0.4, 0.5\] without an owner"):
        solve(regions=[Region((0.0,), (0.4,)), Region((0.5,), (1.0,))])
    with pytest.raises(FipaError, match="nobody owns the condition on the face x1 = 0"):
        solve(regions=[Region((0.0,), (0.5,), boundary=False), Region((0.5,), (1.0,))])
    assert len(solve(PDE(Box.cube(1), poisson_1d, faces=()), regions=[Region((0.0,), (1.0,), False)]).clients) == 1


def test_a_model_that_ignores_x() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = nn.Parameter(torch.ones(1, 1, dtype=DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            return self.level.expand(x.shape[0], 1)

    with pytest.raises(FipaError, match="does not vary with x"):
        solve(model=Constant())


def test_a_model_in_float32() -> None:
    """Torch's default: the points follow the model's dtype, as they do in clients' training."""
    problem = solve(model=network([1, 4, 1]).float().requires_grad_(True))
    assert problem.initial.dtype == torch.float32
    assert 0 < problem.evaluate(problem.initial) < 10


# --- equations of one's own ---


def helmholtz(u: Field, x: Tensor, f: Tensor) -> Tensor:
    return -u.dd(0) - 2 * u.value - f


def neumann(u: Field, x: Tensor, g: Tensor) -> Tensor:
    return u.d(0) - g


def own(seed: int) -> Problem:
    """-u'' - 2 u = f with u' given at both ends; u = cos 3x, so that f = 7 cos 3x."""
    pde = PDE(
        Box.cube(1),
        helmholtz,
        lambda x: 7 * torch.cos(3 * x[:, 0]),
        lambda x: torch.cos(3 * x[:, 0]),
        condition=neumann,
        values=lambda x: -3 * torch.sin(3 * x[:, 0]),
    )
    model = mlp([1, 8, 1], generator=torch.Generator().manual_seed(seed))
    return federated(pde, HALVES, model, Points(interior=30, test=50), seed=seed, penalty=10.0)


@pytest.mark.long
def test_an_equation_with_slopes_at_its_boundary_is_solved() -> None:
    start = own(0)
    rounds = run(newton(FIPA(), 20), own)
    assert rounds[-1][1]["metric"] < 1e-3 * start.evaluate(start.initial)
    losses = [record["loss"] for _, record in rounds]
    assert losses == sorted(losses, reverse=True)


def test_a_condition_on_some_faces_only() -> None:
    """u' + u = 2 on [0, 1] from u(0) = 1: u = 2 - exp(-x), with nothing known at the other end."""
    pde = PDE(
        Box.cube(1),
        lambda u, x, f: u.d(0) + u.value - f,
        lambda x: torch.full((len(x),), 2.0, dtype=DOUBLE),
        lambda x: 2 - torch.exp(-x[:, 0]),
        values=lambda x: torch.ones(len(x), dtype=DOUBLE),
        faces=((0, "low"),),
    )

    def problem(seed: int) -> Problem:
        return federated(
            pde, HALVES, mlp([1, 6, 1], generator=torch.Generator().manual_seed(0)), Points(20, test=50), seed=seed
        )

    assert [len(client.data) for client in problem(0).clients] == [2, 1]
    assert run(newton(FIPA(), 12), problem)[-1][1]["metric"] < 1e-3


def test_dirichlet_and_zero() -> None:
    x = torch.tensor([[1.0], [2.0]])
    assert dirichlet(Field(lambda x: 3 * x, x), x, torch.tensor([1.0, 1.0])).tolist() == [2.0, 5.0]
    assert zero(x).tolist() == [0.0, 0.0]
