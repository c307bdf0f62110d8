"""Data, model and metric of the function fits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from fipa import Curves, FipaError, Maps
from fipa.problems.fitting import GAUSSIANS, misfit, mixture2d, sine, teacher

EDGES = (-0.5, 0.25, 0.5, 2.0)


def test_every_client_of_the_sine_sees_its_own_part() -> None:
    problem = sine(3, waves=3, edges=EDGES, samples=50)
    assert [client.num_examples for client in problem.clients] == [50] * 3
    for client, (low, high) in zip(problem.clients, pairwise(EDGES), strict=True):
        x, u = client.data[0].inputs
        assert x.shape == (50, 1)
        assert low <= float(x.min()) < low + 0.2 * (high - low)
        assert high - 0.2 * (high - low) < float(x.max()) <= high
        torch.testing.assert_close(u, torch.sin(3 * math.pi * x[:, 0]))


def test_metric_of_the_sine_is_the_mean_square_on_the_grid() -> None:
    """A network of zeros: the mean of sin^2 over grid points."""
    problem = sine(0, waves=2, grid=101, hidden=(3,))
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    theta = torch.zeros(problem.layout.numel, dtype=torch.float64)
    assert problem.evaluate(theta) == pytest.approx(float(torch.sin(2 * math.pi * x).square().mean()))
    theta[-1] = 0.5  # the last bias
    assert problem.evaluate(theta) == pytest.approx(float((0.5 - torch.sin(2 * math.pi * x)).square().mean()))
    assert isinstance(problem.picture, Curves)
    torch.testing.assert_close(problem.picture.x, x)
    assert problem.picture.regions == ((0.0, 0.5), (0.5, 1.0))
    assert problem.picture.predict(problem.model).tolist() == [0.5] * 101


def test_paper_sizes() -> None:
    assert sine(0).layout.numel == 901
    assert mixture2d(0, samples=2, grid=2, picture=2).layout.numel == 2 * 20 + 20 + 3 * 420 + 21


@pytest.mark.parametrize("make", [sine, mixture2d])
def test_seeds(make: object) -> None:
    """One seed gives one problem; others give other data and another model; clients differ."""
    first, again, other = (make(seed, samples=20) for seed in (0, 0, 1))
    assert torch.equal(first.theta(), again.theta())
    assert not torch.equal(first.theta(), other.theta())
    for one, same, different in zip(first.clients, again.clients, other.clients, strict=True):
        assert torch.equal(one.data[0].inputs[0], same.data[0].inputs[0])
        assert not torch.equal(one.data[0].inputs[0], different.data[0].inputs[0])
    left, right = (client.data[0].inputs[0] for client in first.clients[:2])
    assert not torch.allclose(left - left.min(), right - right.min())


def test_data_of_a_client_do_not_depend_on_how_many_there_are() -> None:
    two, three = sine(0, edges=(0.0, 0.5, 1.0)), sine(0, edges=(0.0, 0.5, 1.0, 1.5))
    assert torch.equal(two.clients[1].data[0].inputs[0], three.clients[1].data[0].inputs[0])


def gaussians(x: float, y: float) -> float:
    return sum(
        a * math.exp(-((x - mx) ** 2) / (2 * sx**2) - (y - my) ** 2 / (2 * sy**2)) for a, mx, my, sx, sy in GAUSSIANS
    )


def test_every_client_of_the_mixture_sees_its_own_box() -> None:
    problem = mixture2d(0, boxes=2, samples=30, grid=5, picture=4, hidden=(3,))
    assert isinstance(problem.picture, Maps)
    boxes = [(0.0, 0.5, 0.0, 0.5), (0.5, 1.0, 0.0, 0.5), (0.0, 0.5, 0.5, 1.0), (0.5, 1.0, 0.5, 1.0)]
    assert problem.picture.boxes == tuple(boxes)
    for client, (left, right, low, high) in zip(problem.clients, boxes, strict=True):
        points, u = client.data[0].inputs
        assert left <= float(points[:, 0].min()) < left + 0.2
        assert right - 0.2 < float(points[:, 0].max()) <= right
        assert low <= float(points[:, 1].min()) < low + 0.2
        assert high - 0.2 < float(points[:, 1].max()) <= high
        assert u.tolist() == pytest.approx([gaussians(x, y) for x, y in points.tolist()])


def test_metric_and_map_of_the_mixture() -> None:
    """Rows of the map are y ascending, columns x."""
    problem = mixture2d(0, boxes=1, samples=2, grid=5, picture=4, hidden=(3,))
    theta = torch.zeros(problem.layout.numel, dtype=torch.float64)
    values = [gaussians(i / 4, j / 4) for i in range(5) for j in range(5)]
    assert problem.evaluate(theta) == pytest.approx(sum(v * v for v in values) / 25)
    target = problem.picture.target
    assert target.shape == (4, 4)
    assert float(target[1, 2]) == pytest.approx(gaussians(2 / 3, 1 / 3))
    assert problem.picture.predict(problem.model).shape == (4, 4)


def test_residual_is_the_misfit() -> None:
    x = torch.tensor([[1.0], [2.0]])
    assert misfit(lambda x: 3 * x, x, torch.tensor([1.0, 1.0])).tolist() == [2.0, 5.0]


@pytest.mark.parametrize("edges", [(), (0.0,), (0.0, 0.0), (0.0, 1.0, 0.5)])
def test_edges_must_rise(edges: tuple[float, ...]) -> None:
    with pytest.raises(FipaError, match=r"edges must rise.*got \["):
        sine(0, edges=edges)


def test_bad_sizes() -> None:
    with pytest.raises(FipaError, match="samples must be at least 1, got 0"):
        sine(0, samples=0)
    with pytest.raises(FipaError, match="samples must be at least 1, got -1"):
        mixture2d(0, samples=-1)
    with pytest.raises(FipaError, match="boxes must be at least 1, got 0"):
        mixture2d(0, boxes=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_theorems_assumptions_hold_for_the_teacher(seed: int) -> None:
    """Gauss-Newton steps on all data end without a residual, where the Jacobian has full column rank."""
    problem = teacher(seed)
    theta = problem.theta()
    x, u = (torch.cat(parts) for parts in zip(*(client.data[0].inputs for client in problem.clients), strict=True))
    assert [(int(c.data[0].inputs[0][:, 0].sign().min()), c.num_examples) for c in problem.clients] == [
        (-1, 400), (1, 400)
    ]  # fmt: skip

    def residuals(flat: torch.Tensor) -> torch.Tensor:
        params = problem.layout.unflatten(flat)
        return torch.func.functional_call(problem.model, params, (x,))[:, 0] - u

    assert float(residuals(theta).square().mean()) > 1e-4
    for _ in range(12):
        jacobian = torch.func.jacrev(residuals)(theta)
        theta = theta - torch.linalg.lstsq(jacobian, residuals(theta)).solution
    singular = torch.linalg.svdvals(torch.func.jacrev(residuals)(theta))
    assert len(singular) == 25
    assert float(singular[-1]) > 1e-5 * float(singular[0])
    assert problem.evaluate(theta) < 1e-24
