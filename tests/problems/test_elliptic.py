"""The elliptic equations against sympy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sympy as sp
import tiny
import torch
from federation.cases import run
from pde.cases import DOUBLE, axes, laplacian, model_of, newton, numbers, points, smooth

from fipa import FIPA, FipaError, Problem
from fipa.config.load import load
from fipa.pde import PDE, Points, Region
from fipa.problems.elliptic import EQUATIONS, SOLUTIONS, Equation, elliptic, poisson, poisson_residual

X, Y = axes(2)
CIRCLE = (sp.Rational(9, 100) - (X - sp.Rational(45, 100)) ** 2 - (Y - sp.Rational(55, 100)) ** 2) / sp.Rational(6, 10)

# name: dimension, the left-hand side as an operator on u, the solution
CASES: dict[str, tuple[int, Callable[[sp.Expr], sp.Expr], sp.Expr]] = {
    "allen-cahn": (1, lambda u: -sp.diff(u, X, 2) + u**3 - u, sp.sin(sp.pi * X)),
    "bratu": (1, lambda u: -sp.diff(u, X, 2) - sp.exp(u), X * (1 - X)),
    "fisher": (1, lambda u: -sp.diff(u, X, 2) + u * (1 - u), X**2 * (1 - X)),
    "reaction-diffusion": (1, lambda u: -sp.diff(u, X, 2) + u**2, sp.sin(2 * sp.pi * X)),
    "allen-cahn-2d": (
        2,
        lambda u: -laplacian(u, 2) / 16 + u**3 - u,
        sp.tanh(CIRCLE / (sp.sqrt(2) / 10)),
    ),
}
for _d in (1, 2, 3, 5):
    _sines = [sp.sin(sp.pi * s) for s in axes(_d)]
    CASES[f"product {_d}"] = (_d, lambda u, d=_d: -laplacian(u, d), sp.prod(_sines))
    CASES[f"sum {_d}"] = (_d, lambda u, d=_d: -laplacian(u, d), sum(_sines, sp.Integer(0)))


def pde_of(name: str) -> PDE:
    if name in EQUATIONS:
        return EQUATIONS[name].pde
    kind, d = name.split()
    return Equation(poisson_residual, SOLUTIONS[kind], int(d)).pde


def problem_of(name: str) -> Problem:
    few = Points(interior=6, boundary=2, test=8)
    if name in EQUATIONS:
        return elliptic(0, equation=name, points=few, hidden=(3,))
    kind, d = name.split()
    return poisson(0, dimension=int(d), solution=kind, points=few, hidden=(3,))


def test_all_equations_are_tested() -> None:
    assert set(EQUATIONS) <= set(CASES)
    assert {name.split()[0] for name in CASES} >= set(SOLUTIONS)


@pytest.mark.parametrize("name", CASES)
def test_residual_of_an_arbitrary_function(name: str) -> None:
    d, operator, _ = CASES[name]
    u, x = smooth(d), points(7, d, seed=1)
    f = torch.linspace(-2, 3, 7, dtype=DOUBLE)
    found = pde_of(name).interior(model_of(u, d=d), x, f)
    torch.testing.assert_close(found, numbers(operator(u), x) - f, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_the_source_is_what_makes_the_solution_one(name: str) -> None:
    d, operator, u = CASES[name]
    pde, x = pde_of(name), points(9, d, seed=2)
    assert pde.domain.low == (0.0,) * d
    assert pde.domain.high == (1.0,) * d
    torch.testing.assert_close(pde.exact(x), numbers(u, x), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(pde.source(x), numbers(operator(u), x), rtol=1e-11, atol=1e-11)
    residual = pde.interior(lambda y: pde.exact(y)[:, None], x, numbers(operator(u), x))
    assert float(residual.abs().max()) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_the_solution_has_the_boundary_values(name: str) -> None:
    d, _, u = CASES[name]
    pde = pde_of(name)
    assert len(pde.conditions) == 2 * d
    for axis in range(d):
        for end in (0.0, 1.0):
            x = points(4, d, seed=axis)
            x[:, axis] = end
            g = numbers(u, x)
            torch.testing.assert_close(pde.values(x), g, rtol=1e-12, atol=1e-13)
            if name.startswith("product") or (d == 1):
                assert float(g.abs().max()) < 1e-14
            assert float(pde.boundary(lambda y: pde.exact(y)[:, None], x, g).abs().max()) < 1e-13


@pytest.mark.parametrize("name", CASES)
def test_data_of_the_clients(name: str) -> None:
    """The default cut: two halves along the first axis."""
    d, operator, u = CASES[name]
    problem = problem_of(name)
    assert len(problem.clients) == 2
    for client, (low, high) in zip(problem.clients, ((0.0, 0.5), (0.5, 1.0)), strict=True):
        interior, boundary = client.data
        (x, f), (s, g) = interior.inputs, boundary.inputs
        assert x.shape == (6, d)
        assert low <= float(x[:, 0].min()) <= float(x[:, 0].max()) <= high
        torch.testing.assert_close(f, numbers(operator(u), x), rtol=1e-11, atol=1e-11)
        assert len(s) == (1 if d == 1 else 2 * (2 * d - 1))
        assert bool(((s == 0) | (s == 1)).any(dim=1).all())
        torch.testing.assert_close(g, numbers(u, s), rtol=1e-12, atol=1e-13)
    assert 0.1 < problem.evaluate(problem.initial) < 20


def test_the_bubble() -> None:
    """One inside, minus one outside, zero on the circle."""
    exact = pde_of("allen-cahn-2d").exact
    centre, rim, corner = exact(torch.tensor([[0.45, 0.55], [0.75, 0.55], [0.0, 0.0]], dtype=DOUBLE)).tolist()
    assert centre > 0.75
    assert rim == pytest.approx(0, abs=1e-14)
    assert corner < -0.98


def test_cuts_and_regions() -> None:
    few = Points(interior=4, test=8)
    problem = poisson(0, dimension=3, cuts=((0.5,), (), (0.25, 0.5)), points=few, hidden=(3,))
    assert len(problem.clients) == 6
    regions = (Region((0.0, 0.0), (0.6, 1.0)), Region((0.4, 0.0), (1.0, 1.0)), Region((0.3, 0.3), (0.7, 0.7)))
    problem = elliptic(0, equation="allen-cahn-2d", regions=regions, points=few, hidden=(3,))
    assert [len(client.data) for client in problem.clients] == [2, 2, 1]
    assert problem.picture.boxes == ((0.0, 0.6, 0.0, 1.0), (0.4, 1.0, 0.0, 1.0), (0.3, 0.7, 0.3, 0.7))
    with pytest.raises(FipaError, match=r"problem.cuts has 2 entries, but the domain has 1 axes"):
        elliptic(0, cuts=((0.5,), (0.5,)))


def test_sizes_and_weights() -> None:
    assert elliptic(0).layout.numel == 2 * 32 + 2 * 33 * 32 + 33
    assert poisson(0, dimension=5, points=Points(4), hidden=(8,)).layout.numel == 6 * 8 + 9
    assert elliptic(0, penalty=3.5).clients[0].data[1].weight == 3.5
    assert [len(term.inputs[0]) for term in elliptic(0).clients[0].data] == [400, 1]


@pytest.mark.long
def test_fipa_solves_one() -> None:
    def problem(seed: int) -> Problem:
        return elliptic(seed, equation="bratu", points=Points(interior=30, test=50), hidden=(8,))

    start = problem(2)
    rounds = run(newton(FIPA(), 17), problem, 2)
    assert rounds[-1][1]["metric"] < 1e-3 * start.evaluate(start.initial)


# --- in a file ---

TOML = """\
rounds = 1
[problem]
name = "elliptic"
hidden = [3]
points = { interior = 10, test = 16 }
regions = [{ low = [0.0], high = [0.5] }, { low = [0.5], high = [1.0] }]
[[arms]]
name = "A"
rule = { name = "fipa" }
local = { name = "gauss-newton" }
"""


def test_a_file_with_regions(tmp_path: Path) -> None:
    text = TOML.replace("high = [1.0]", "high = [1.0], boundary = true").replace("test = 16", "fresh = true")
    problem = load(str(tiny.write(tmp_path, text)))[1].factory()(0)
    assert len(problem.clients) == 2
    assert problem.resample is not None
    assert len(problem.clients[0].data[0].inputs[0]) == 10


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[0.5] },", "[0.4] },", "the split leaves [0.4, 0.5] without an owner: give it to a client"),
        ("[0.5] },", "[0.5], boundary = false },", "nobody owns the condition on the face x1 = 0 next to [0, 0.5]"),
        ("[1.0]", "[1.5]", "region 1, [0.5, 1.5], is no part of the domain [0, 1]"),
        ("[1.0]", "[1.0, 2.0]", "a box needs a low and a high end for each axis"),
        (
            "high = [1.0]",
            "hihg = [1.0]",
            "problem.regions[1].hihg: unknown key: did you mean 'high'?",
        ),
        (
            "test = 16",
            "tset = 16",
            "tset: unknown key: did you mean 'test'? Choose one of interior, boundary, test, fresh",
        ),
        ("interior = 10", "interior = 0", "interior must be at least 1, got 0"),
        ("interior = 10", "interior = 2.5", "problem.points.interior: "),
        ("interior = 10, ", "", "problem.points.interior: "),
        ("hidden = [3]", 'equation = "navier"', "'navier'"),
        ("hidden = [3]", "penalty = 0", "problem.penalty must be positive, got 0"),
        (
            "regions = [{ low = [0.0], high = [0.5] }, ",
            "cuts = [[0.7, 0.3]] #",
            "problem.cuts[0] must rise within (0, 1)",
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in TOML
    done = tiny.fipa("run", tiny.write(tmp_path, TOML.replace(old, new, 1)), "--out", tmp_path / "run")
    assert done.code == 2
    assert reason in " ".join(done.err.split())
    assert not (tmp_path / "run").exists()
