"""Networks that are zero on the boundary: values and derivatives, the problem without a penalty, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from federation.cases import run
from torch import Tensor, nn

from fipa import FIPA, FipaError
from fipa.pde import PDE, Box, Field, Points, dirichlet, federated, grid_split, manufactured
from fipa.pde.hard import Clamped
from fipa.problems.elliptic import elliptic, poisson
from pde.cases import assert_is_dense, network, newton, points

SMALL = Points(interior=20, boundary=3, test=50)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_derivatives(d: int) -> None:
    domain = Box((-1.0,) * d, (2.0,) * d)
    model = Clamped(network([d, 4, 2]), domain, domain.faces)
    for component in (0, 1):
        assert_is_dense(model, points(6, d, low=-1, high=2), component)


@pytest.mark.parametrize("faces", [((0, "low"),), ((1, "high"), (0, "low")), Box.cube(2).faces])
def test_zero_on_faces_with_a_condition_only(faces: Any) -> None:
    domain = Box((0.5, -1.0), (2.0, 3.0))
    model = Clamped(network([2, 4, 1]), domain, faces)
    for face in domain.faces:
        x = domain.on_face(face, 5, torch.Generator().manual_seed(0))
        there = model(x).abs()
        if face in faces:
            assert float(there.max()) < 1e-15
        else:
            assert float(there.max()) > 1e-3


def test_the_window_is_one_in_the_middle() -> None:
    domain = Box((0.5, -1.0), (2.0, 3.0))

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x[:, :1])

    middle = torch.tensor([[1.25, 1.0]])
    assert Clamped(One(), domain, domain.faces)(middle).tolist() == [[1.0]]


def test_a_problem_without_points_on_the_boundary() -> None:
    soft, hard = (poisson(0, dimension=2, points=SMALL, hard_boundary=hard) for hard in (False, True))
    assert [len(client.data) for client in soft.clients] == [2, 2]
    assert [len(client.data) for client in hard.clients] == [1, 1]
    assert torch.equal(hard.clients[0].data[0].inputs[0], soft.clients[0].data[0].inputs[0])
    assert hard.layout.numel == soft.layout.numel
    assert torch.equal(hard.initial, soft.initial)


def test_converges_with_fewer_rounds_than_a_penalty() -> None:
    soft, hard = (
        run(newton(FIPA(), 12), lambda seed, hard=hard: elliptic(seed, points=SMALL, hidden=(8, 8), hard_boundary=hard))
        for hard in (False, True)
    )
    assert hard[-1][1]["metric"] < 0.2 * soft[-1][1]["metric"]
    assert hard[-1][1]["metric"] < 1e-3


def refused(pde: PDE) -> None:
    model = network([1, 4, 1]).requires_grad_(True)
    federated(pde, grid_split(pde.domain, [[0.5]]), model, SMALL, seed=0, hard_boundary=True)


def residual(u: Field, x: Tensor, f: Tensor) -> Tensor:
    return -u.laplacian - f


def test_other_boundary_values_are_refused() -> None:
    with pytest.raises(FipaError, match=r"hard_boundary is for the condition u = 0, but u is 1 at x = \[0.0\]"):
        refused(manufactured(Box.cube(1), residual, lambda x: torch.cos(math.pi * x[:, 0])))


def test_other_conditions_are_refused() -> None:
    def insulated(u: Field, x: Tensor, g: Tensor) -> Tensor:
        return u.d(0) - g

    with pytest.raises(FipaError, match=r"give condition=fipa\.pde\.dirichlet, or leave it out"):
        refused(PDE(Box.cube(1), residual, condition=insulated))
    refused(PDE(Box.cube(1), residual, condition=dirichlet))


def test_float32_stays_float32() -> None:
    model = Clamped(network([2, 4, 1]).float(), Box.cube(2), Box.cube(2).faces)
    assert model(points(3, 2).float()).dtype == torch.float32
