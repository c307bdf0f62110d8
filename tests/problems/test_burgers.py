"""Burgers' equation against sympy, and its solution against a spectral solver."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy as sp
import torch
from pde.cases import DOUBLE, axes, model_of, numbers, points, smooth
from scipy.integrate import solve_ivp

from fipa import FipaError, Maps
from fipa.pde import Field, Points, Region
from fipa.problems.burgers import CHUNK, Burgers, burgers

T, X = axes(2)
FEW = Points(interior=6, boundary=4, test=20)


def spectral(viscosity: float, times: list[float], n: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """u_t = -u u_x + nu u_xx on the periodic interval [-1, 1) by collocation at n Fourier points."""
    x = -1 + 2 * np.arange(n) / n
    k = 1j * np.pi * np.fft.rfftfreq(n, 1 / n)

    def slope(_: float, u: np.ndarray) -> np.ndarray:
        transformed = np.fft.rfft(u)
        flux = np.fft.irfft(transformed * k, n)
        return -u * flux + viscosity * np.fft.irfft(transformed * k**2, n)

    start = -np.sin(np.pi * x)
    solved = solve_ivp(slope, (0, times[-1]), start, method="DOP853", t_eval=times, rtol=1e-10, atol=1e-12)
    return x, solved.y.T


@pytest.mark.parametrize("viscosity", [0.02, 0.05])
def test_solution_against_a_spectral_method(viscosity: float) -> None:
    times = [0.1, 0.3, 0.5, 0.8, 1.0]
    x, expected = spectral(viscosity, times)
    for t, line in zip(times, expected, strict=True):
        place = torch.tensor([[t, s] for s in x], dtype=DOUBLE)
        found = Burgers(viscosity).solution(place)
        torch.testing.assert_close(found, torch.from_numpy(line), rtol=0, atol=2e-8)


def test_solution_at_the_smallest_viscosity() -> None:
    """Against the trapezoidal rule on 20,000 points, which is exact for such integrands."""
    viscosity = 1e-3
    for t, x in ((0.2, 0.3), (0.4, 0.01), (0.5, -0.002), (1.0, 0.003), (1.0, 0.9)):
        y = np.linspace(x - 2.5, x + 2.5, 20001)
        power = -np.cos(np.pi * y) / (2 * np.pi * viscosity) - (x - y) ** 2 / (4 * viscosity * t)
        share = np.exp(power - power.max())
        expected = -(np.sin(np.pi * y) * share).sum() / share.sum()
        found = Burgers(viscosity).solution(torch.tensor([[t, x]], dtype=DOUBLE)).item()
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("viscosity", [0.001, 0.02, 0.3])
def test_initial_and_boundary_values(viscosity: float) -> None:
    equation = Burgers(viscosity)
    x = torch.linspace(-1, 1, 33, dtype=DOUBLE)
    at_start = equation.solution(torch.stack([torch.zeros_like(x), x], dim=1))
    torch.testing.assert_close(at_start, -torch.sin(math.pi * x), rtol=0, atol=1e-14)
    t = torch.linspace(0, 1, 11, dtype=DOUBLE)
    for end in (-1.0, 0.0, 1.0):
        values = equation.solution(torch.stack([t, torch.full_like(t, end)], dim=1))
        torch.testing.assert_close(values, torch.zeros_like(t), rtol=0, atol=1e-12)


def test_solution_is_odd_and_has_a_front() -> None:
    x = points(50, 2, seed=1)
    equation = Burgers(0.02)
    mirrored = equation.solution(x * torch.tensor([1.0, -1.0], dtype=DOUBLE))
    torch.testing.assert_close(mirrored, -equation.solution(x), rtol=0, atol=1e-13)
    before, after = equation.solution(torch.tensor([[0.6, -0.1], [0.6, 0.1]], dtype=DOUBLE)).tolist()
    assert before > 0.7
    assert after < -0.7


def test_many_points_are_done_in_parts() -> None:
    x = points(CHUNK + 3, 2, seed=2)
    whole = Burgers(0.05).solution(x)
    assert whole.shape == (CHUNK + 3,)
    torch.testing.assert_close(whole[-4:], Burgers(0.05).solution(x[-4:]), rtol=1e-13, atol=1e-14)


def test_residual_by_sympy() -> None:
    u, x = smooth(2), points(7, 2, seed=3, low=-1)
    f = torch.linspace(-2, 3, 7, dtype=DOUBLE)
    expected = sp.diff(u, T) + u * sp.diff(u, X) - sp.Rational(3, 100) * sp.diff(u, X, 2)
    found = Burgers(0.03)(Field(model_of(u, d=2), x), x, f)
    torch.testing.assert_close(found, numbers(expected, x) - f, rtol=1e-11, atol=1e-11)


def test_the_solution_has_no_residual() -> None:
    """By central differences of Cole and Hopf's formula."""
    equation, h = Burgers(0.05), 1e-3
    x = points(20, 2, seed=4) * torch.tensor([0.8, 1.6], dtype=DOUBLE) + torch.tensor([0.1, -0.8], dtype=DOUBLE)
    up, right = torch.tensor([h, 0.0], dtype=DOUBLE), torch.tensor([0.0, h], dtype=DOUBLE)
    u = equation.solution
    in_time = (u(x + up) - u(x - up)) / (2 * h)
    in_space = (u(x + right) - u(x - right)) / (2 * h)
    second = (u(x + right) - 2 * u(x) + u(x - right)) / h**2
    residual = in_time + u(x) * in_space - 0.05 * second
    assert float(residual.abs().max()) < 5e-3 * float((u(x) * in_space).abs().max())


# --- the problem ---


def test_conditions_hold_at_the_start_and_at_both_ends() -> None:
    """Nothing is known at t = 1."""
    problem = burgers(0, cuts=(), points=FEW, hidden=(3,))
    (client,) = problem.clients
    (x, f), (s, g) = (term.inputs for term in client.data)
    assert not f.any()
    assert 0 <= float(x[:, 0].min()) <= float(x[:, 0].max()) <= 1
    assert float(x[:, 1].min()) < 0 < float(x[:, 1].max())
    assert [int(face.sum()) for face in (s[:, 0] == 0, s[:, 1] == -1, s[:, 1] == 1, s[:, 0] == 1)] == [4, 4, 4, 0]
    expected = torch.where(s[:, 0] == 0, -torch.sin(math.pi * s[:, 1]), 0.0)
    torch.testing.assert_close(g, expected, rtol=0, atol=1e-13)


def test_splits_in_time_in_space_and_in_both() -> None:
    in_time = burgers(0, cuts=((0.3, 0.6),), points=FEW, hidden=(3,))
    starts = [client.data[1].inputs[0][:, 0] == 0 for client in in_time.clients]
    assert [int(start.sum()) for start in starts] == [4, 0, 0]  # the others know the ends of the interval only
    assert [len(start) for start in starts] == [12, 8, 8]
    in_space = burgers(0, points=FEW, hidden=(3,))
    assert [len(client.data[1].inputs[0]) for client in in_space.clients] == [8, 8]
    both = burgers(0, cuts=((0.5,), (-0.5, 0.5)), points=FEW, hidden=(3,))
    assert [len(client.data) for client in both.clients] == [2, 2, 2, 1, 2, 2]  # time first: the middle, later
    assert isinstance(both.picture, Maps)
    assert len(both.picture.boxes) == 6
    assert (both.picture.x_label, both.picture.y_label) == ("t", "x")
    assert both.picture.extent == (0.0, 1.0, -1.0, 1.0)
    inner = Region((0.0, -0.2), (1.0, 0.2), boundary=False)
    whole = Region((0.0, -1.0), (1.0, 1.0))
    assert [len(c.data) for c in burgers(0, regions=(whole, inner), points=FEW, hidden=(3,)).clients] == [2, 1]


def test_metric_is_the_relative_error() -> None:
    problem = burgers(0, points=FEW, hidden=(3,))
    assert problem.evaluate(torch.zeros_like(problem.initial)) == pytest.approx(1.0)


@pytest.mark.parametrize("viscosity", [0.0009, 0.0, -0.01, math.nan])
def test_too_small_a_viscosity(viscosity: float) -> None:
    with pytest.raises(FipaError, match=r"problem\.viscosity must be at least 1e-3"):
        burgers(0, viscosity=viscosity)


def test_a_split_is_checked() -> None:
    with pytest.raises(FipaError, match=r"problem.cuts\[1\] must rise within \(-1, 1\), got \[1.5\]"):
        burgers(0, cuts=((), (1.5,)))
    later = Region((0.5, -1.0), (1.0, 1.0))
    with pytest.raises(FipaError, match="nobody owns the condition on the face x1 = 0 next to"):
        burgers(0, regions=(Region((0.0, -1.0), (0.5, 1.0), boundary=False), later))
