"""A coefficient as one of the parameters."""

from __future__ import annotations

import pytest
import sympy as sp
import torch
from federation.cases import run
from pde.cases import DOUBLE, axes, model_of, network, newton, numbers, points

from fipa import FIPA, Curves, FipaError, Problem
from fipa.pde import Field, Points, Region
from fipa.problems.inverse import WithCoefficient, diffusion, inverse

FEW = Points(interior=6)
(X,) = axes(1)
SOLUTION = sp.sin(sp.pi * X) + X / 2


def test_the_coefficient_is_a_parameter_and_starts_where_it_is_told_to() -> None:
    problem = inverse(0, start=1.75, hidden=(3,))
    assert "coefficient" in problem.layout.names
    assert problem.layout.numel == 2 * 3 + 4 + 1
    assert float(problem.layout.unflatten(problem.initial)["coefficient"]) == 1.75
    assert problem.evaluate(problem.initial) == pytest.approx((1.75 - 0.7) / 0.7)
    assert problem.name == "relative error of the coefficient"


def test_the_model_has_the_coefficient_beside_u() -> None:
    network_of_u, x = network([1, 3, 1]), points(5, 1)
    model = WithCoefficient(network_of_u, 1.5)
    out = model(x)
    torch.testing.assert_close(out[:, :1], network_of_u(x))
    assert out[:, 1].tolist() == [1.5] * 5
    u = Field(model, x)
    assert u[1].value.tolist() == [1.5] * 5
    assert not u[1].d(0).any()
    assert not u[1].dd(0).any()
    torch.testing.assert_close(u.dd(0), Field(network_of_u, x).dd(0))


def test_residual_by_sympy() -> None:
    u, a, x = sp.exp(-X) * sp.cos(3 * X), sp.Integer(2) + X / 5, points(7, 1)
    f = torch.linspace(-2, 3, 7, dtype=DOUBLE)
    found = diffusion(Field(model_of(u, a, d=1), x), x, f)
    torch.testing.assert_close(found, numbers(-a * sp.diff(u, X, 2) + u**3, x) - f, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("coefficient", [0.7, 2.5])
def test_source_and_readings_are_those_of_the_truth(coefficient: float) -> None:
    problem = inverse(0, coefficient=coefficient, noise=0.0, points=FEW, hidden=(3,))
    source = -coefficient * sp.diff(SOLUTION, X, 2) + SOLUTION**3
    for client, low in zip(problem.clients, (0.0, 0.25, 0.5, 0.75), strict=True):
        (x, f), (s, y) = (term.inputs for term in client.data)
        torch.testing.assert_close(f, numbers(source, x), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(y, numbers(SOLUTION, s), rtol=1e-13, atol=1e-13)
        assert low <= float(s.min()) <= float(s.max()) <= low + 0.25
        assert s.shape == (10, 1)


def test_the_truth_has_no_loss() -> None:
    u = model_of(SOLUTION, d=1)
    problem = inverse(0, noise=0.0, points=FEW, hidden=(3,))
    for client in problem.clients:
        interior, readings = client.data
        assert float(interior.loss(lambda x: torch.cat([u(x), 0 * u(x) + 0.7], dim=1))) < 1e-20
        assert float(interior.loss(lambda x: torch.cat([u(x), 0 * u(x) + 0.8], dim=1))) > 1e-3
        assert float(readings.loss(u)) < 1e-20


def test_noise_of_the_readings() -> None:
    problem = inverse(0, noise=0.3, sensors=400, points=FEW, hidden=(3,))
    errors = [client.data[1].inputs[1] - numbers(SOLUTION, client.data[1].inputs[0]) for client in problem.clients]
    assert float(torch.cat(errors).std()) == pytest.approx(0.3, rel=0.1)
    assert float(torch.cat(errors).mean()) == pytest.approx(0.0, abs=0.03)
    assert not torch.allclose(errors[0], errors[1])


def test_loss_of_a_client_by_hand() -> None:
    problem = inverse(0, sensors=4, penalty=9.0, points=FEW, hidden=(3,))
    interior, readings = problem.clients[1].data
    x, y = readings.inputs
    misfit = problem.model(x)[:, 0] - y
    assert readings.loss(problem.model).item() == pytest.approx(9 / 2 * misfit.square().mean().item())
    assert interior.weight == 1.0


def test_only_some_clients_have_sensors() -> None:
    problem = inverse(0, sensing=[2, 0], sensors=5, points=FEW, hidden=(3,))
    assert [len(client.data) for client in problem.clients] == [2, 1, 2, 1]
    alone = inverse(0, sensing=[0], sensors=5, points=FEW, hidden=(3,))
    assert torch.equal(alone.clients[0].data[1].inputs[1], problem.clients[0].data[1].inputs[1])


def test_sensors_stay_where_they_are_when_points_are_drawn_anew() -> None:
    problem = inverse(0, sensing=[1], points=Points(interior=6, fresh=True), hidden=(3,))
    first, second = problem.resample(1), problem.resample(2)
    assert not torch.equal(first[1].data[0].inputs[0], second[1].data[0].inputs[0])
    for one, other in zip(first[1].data[1].inputs, second[1].data[1].inputs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sensing", [[4], [0, 7], [-1], [0, -1], []])
def test_sensing_clients_that_do_not_exist(sensing: list[int]) -> None:
    with pytest.raises(FipaError, match=r"problem\.sensing must name clients 0 to 3"):
        inverse(0, sensing=sensing, hidden=(3,))


@pytest.mark.parametrize("wrong", [{"coefficient": 0.0}, {"sensors": 0}, {"noise": -0.1}])
def test_wrong_numbers(wrong: dict[str, float]) -> None:
    with pytest.raises(FipaError, match="coefficient must be positive, sensors at least 1, noise not negative"):
        inverse(0, **wrong)


@pytest.mark.parametrize("penalty", [0.0, -1.0])
def test_penalty_must_be_positive(penalty: float) -> None:
    with pytest.raises(FipaError, match=r"problem\.penalty must be positive"):
        inverse(0, penalty=penalty, hidden=(3,))


def test_regions_and_picture() -> None:
    regions = (Region((0.0,), (0.6,)), Region((0.4,), (1.0,)))
    problem = inverse(0, regions=regions, sensing=[1], points=FEW, hidden=(3,))
    assert [len(client.data) for client in problem.clients] == [1, 2]
    assert isinstance(problem.picture, Curves)
    assert problem.picture.regions == ((0.0, 0.6), (0.4, 1.0))
    torch.testing.assert_close(problem.picture.target, numbers(SOLUTION, problem.picture.x[:, None]))
    with pytest.raises(FipaError, match=r"leaves \[0.4, 1\] without an owner"):
        inverse(0, regions=(Region((0.0,), (0.4,)),), hidden=(3,))


@pytest.mark.long
def test_fipa_finds_the_coefficient() -> None:
    """Two of four clients have readings; none has noise."""

    def problem(seed: int) -> Problem:
        return inverse(seed, noise=0.0, sensing=(0, 2), points=Points(interior=30), hidden=(6, 6))

    rounds = run(newton(FIPA(), 12), problem, seed=2)
    assert rounds[-1][1]["metric"] < 1e-3
    found = problem(2).layout.unflatten(rounds[-1][0].theta)["coefficient"]
    assert float(found) == pytest.approx(0.7, rel=1e-3)
