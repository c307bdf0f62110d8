r"""An equation, and the federated problem of solving it with a network (paper Eqs. `eq:pde_loss` to `eq:pde_fisher`).

Client m minimises on its part of the domain, with its share of the boundary,

$$\mathcal L_m(\theta) = \frac1{2 n} \sum_i \mathcal R[u_\theta](x_i)^2
+ \frac{\lambda}{2 b} \sum_j \mathcal B[u_\theta](s_j)^2 ,$$

and sketches the Gauss-Newton matrix of this very loss: interior and boundary rows carry the same weights in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fipa.clients.client import Client
from fipa.curvature.terms import Residual
from fipa.errors import FipaError
from fipa.federation.problem import Curves, Maps, Problem
from fipa.pde.domain import Box, Face, Region, check_split
from fipa.pde.field import Field
from fipa.pde.hard import Clamped
from fipa.randomness import generator_for

Operator = Callable[[Field, Tensor, Tensor], Tensor]
Values = Callable[[Tensor], Tensor]


def zero(x: Tensor) -> Tensor:
    """Zero, the source or the boundary values of many equations."""
    return x.new_zeros(len(x))


def dirichlet(u: Field, x: Tensor, g: Tensor) -> Tensor:
    """The condition u = g."""
    return u.value - g


@dataclass(frozen=True, eq=False)
class PDE:
    """An equation on a domain, with its boundary condition.

    Parameters
    ----------
    domain
        A box; time may be one of its axes.
    residual
        `residual(u, x, f)` at points x (n, d) inside, with f = `source(x)`: (n), zero where the equation holds.
    source
        f (n) at points (n, d).
    exact
        The solution (n) where it is known, to measure the error by.
    condition, values
        `condition(u, x, g)` at points of the boundary, with g = `values(x)`: (n), zero where the condition holds.
    faces
        Faces that the condition holds on; None for all.
    laplacian
        The residual needs no second derivative but the Laplacian, which is then cheaper.
    """

    domain: Box
    residual: Operator
    source: Values = zero
    exact: Values | None = None
    condition: Operator = dirichlet
    values: Values = zero
    faces: tuple[Face, ...] | None = None
    laplacian: bool = False

    def __post_init__(self) -> None:
        for axis, side in self.faces or ():
            if not 0 <= axis < self.domain.axes or side not in ("low", "high"):
                raise FipaError(f"({axis}, {side!r}) is no face of a domain with {self.domain.axes} axes")

    def interior(self, model: Callable[..., Any], x: Tensor, f: Tensor) -> Tensor:
        """Residuals (n) of the equation."""
        u = Field(model, x, laplacian=self.laplacian)
        _ = u.expanded  # an equation has derivatives: the value comes with them
        return _row(self.residual(u, x, f), x, "residual")

    def boundary(self, model: Callable[..., Any], x: Tensor, g: Tensor) -> Tensor:
        """Residuals (n) of the condition."""
        return _row(self.condition(Field(model, x), x, g), x, "condition")

    @property
    def conditions(self) -> tuple[Face, ...]:
        """Faces with a condition."""
        return self.domain.faces if self.faces is None else self.faces


def manufactured(domain: Box, residual: Operator, exact: Callable[[Any], Any], **settings: Any) -> PDE:
    """The equation whose solution is `exact`: its source and boundary values follow from the operators.

    `exact(x)` returns (n) for points (n, d), in functions of torch, which are differentiated to find the source. Source
    and boundary values must enter the operators as $-f$ and $-g$. Other arguments as for `PDE`.
    """

    def defect(operator: Operator) -> Values:
        return lambda x: operator(_solution(exact, x), x, zero(x))

    condition = settings.get("condition", dirichlet)
    pde = PDE(domain, residual, defect(residual), exact, values=defect(condition), **settings)
    x = domain.uniform(5, torch.Generator().manual_seed(0))
    for name, operator, values in (("residual", residual, pde.source), ("condition", condition, pde.values)):
        given = values(x)
        left = operator(_solution(exact, x), x, given)
        if bool((left.abs() > 1e-8 * (1 + given.abs())).any()):
            raise FipaError(f"the exact solution fails the {name}: it must subtract its last argument, as in N[u] - f")
    return pde


def _solution(exact: Callable[[Any], Any], x: Tensor) -> Field:
    """The exact solution in place of a model."""
    _row(exact(x), x, "exact solution")
    return Field(lambda y: exact(y)[:, None], x)


@dataclass(frozen=True)
class Points:
    """How many points each client has, and whether they are drawn anew in every round.

    Parameters
    ----------
    interior
        Points of each client inside of its region.
    boundary
        Points of each client on each face of the domain that it owns a part of.
    test
        Points to measure the error on.
    fresh
        Draw new points for every round.
    """

    interior: int
    boundary: int = 1
    test: int = 1024
    fresh: bool = False

    def __post_init__(self) -> None:
        for name in ("interior", "boundary", "test"):
            if getattr(self, name) < 1:
                raise FipaError(f"problem.points.{name} must be at least 1, got {getattr(self, name)}")


def federated(
    pde: PDE,
    regions: Sequence[Region],
    model: nn.Module,
    points: Points,
    *,
    seed: int,
    penalty: float = 1.0,
    hard_boundary: bool = False,
    extra: Callable[[int, Region], Sequence[Residual]] | None = None,
    metric: Callable[[nn.Module], float | Tensor] | None = None,
    name: str = "relative L2 error",
    labels: tuple[str, str] = ("x₁", "x₂"),
) -> Problem:
    r"""The problem of solving an equation with one client for each region.

    Parameters
    ----------
    penalty
        $\lambda$.
    hard_boundary
        Meet the condition u = 0 exactly: the model is multiplied by a function that vanishes on the faces that have it.
        The loss then has no boundary term, and neither `penalty` nor `points.boundary` a meaning.
    extra
        `extra(client, region)`: further terms of a client's loss, such as measurements.
    metric, name
        Instead of the relative L2 error against `pde.exact`; without either, the root mean square of the residual.
    labels
        Names of the axes in pictures.
    """
    if not penalty > 0:
        raise FipaError(f"problem.penalty must be positive, got {penalty}")
    check_split(pde.domain, regions, pde.conditions)
    if hard_boundary:
        _check_zero(pde, seed)
        model = Clamped(model, pde.domain, pde.conditions)
    interior, boundary = pde.interior, pde.boundary  # one object each: clients of one form are trained side by side

    dtype = next(model.parameters()).dtype

    def cast(values: Tensor) -> Tensor:
        return values.to(dtype)

    def client(number: int, region: Region, round_number: int) -> Client:
        generator = generator_for(seed, "data", round_number, number)
        x = region.box.uniform(points.interior, generator)
        terms = [Residual(interior, cast(x), cast(_finite(pde.source(x), x, "source")))]
        faces = region.faces(pde.domain, pde.conditions)
        if faces and not hard_boundary:
            s = torch.cat([region.box.on_face(face, points.boundary, generator) for face in faces])
            terms.append(Residual(boundary, cast(s), cast(_finite(pde.values(s), s, "boundary value")), weight=penalty))
        return Client((*terms, *(extra(number, region) if extra else ())))

    def draw(round_number: int) -> list[Client]:
        return [client(number, region, round_number) for number, region in enumerate(regions)]

    clients = draw(0)
    for number, one in enumerate(clients):
        for term in one.data:
            _check_rows(term, model, number)
    if metric is None:
        metric, name = _error(pde, points.test, seed, name)
    return Problem(
        model,
        clients,
        metric,
        name=name,
        picture=_picture(pde, regions, labels),
        resample=draw if points.fresh else None,
    )


def relative_error(u: Tensor, exact: Tensor) -> Tensor:
    r"""$|u - u^*|_2 / |u^*|_2$."""
    return torch.linalg.vector_norm(u - exact) / torch.linalg.vector_norm(exact)


def _error(pde: PDE, count: int, seed: int, name: str) -> tuple[Callable[[nn.Module], Tensor], str]:
    """The error and its name: on a regular grid in one dimension, at random points in several."""
    domain = pde.domain
    x = domain.grid([count]) if domain.axes == 1 else domain.uniform(count, generator_for(seed, "test"))
    if pde.exact is None:
        f = _finite(pde.source(x), x, "source")

        def residual(model: nn.Module) -> Tensor:
            dtype = next(model.parameters()).dtype
            return pde.interior(model, x.to(dtype), f.to(dtype)).square().mean().sqrt()

        return residual, "root mean square of the residual"
    exact = _finite(pde.exact(x), x, "exact solution")
    if not bool(exact.any()):
        raise FipaError("the exact solution is zero at every test point: a relative error has no meaning there")
    return lambda model: relative_error(_predict(model, x), exact), name


def _picture(pde: PDE, regions: Sequence[Region], labels: tuple[str, str], side: int = 65) -> Curves | Maps:
    """The solution as a curve, as a map, or as a map through the middle of the other axes."""
    domain = pde.domain
    if domain.axes == 1:
        x = domain.grid([401])
        return Curves(
            x[:, 0],
            None if pde.exact is None else pde.exact(x),
            lambda model: _predict(model, x),
            tuple((r.low[0], r.high[0]) for r in regions),
            "solution after the last round",
            labels[0],
            "u",
            error=True,
            target_label="exact solution",
        )
    middle = [(a + b) / 2 for a, b in zip(domain.low, domain.high, strict=True)]
    plane = Box(domain.low[:2], domain.high[:2]).grid([side, side])
    x = torch.tensor(middle, dtype=torch.float64).repeat(len(plane), 1)
    x[:, :2] = plane
    met = [all(r.low[i] <= middle[i] < r.high[i] for i in range(2, domain.axes)) for r in regions]
    where = "" if domain.axes == 2 else ", cut through the middle of the other axes"
    return Maps(
        (domain.low[0], domain.high[0], domain.low[1], domain.high[1]),
        None if pde.exact is None else pde.exact(x).reshape(side, side),
        lambda model: _predict(model, x).reshape(side, side),
        tuple((r.low[0], r.high[0], r.low[1], r.high[1]) if m else None for r, m in zip(regions, met, strict=True)),
        f"solution after the last round{where}",
        *labels,
        target_label="exact solution",
    )


def _predict(model: nn.Module, x: Tensor) -> Tensor:
    """The first function of a model, whatever its dtype."""
    return model(x.to(next(model.parameters()).dtype))[:, 0].double()


def _row(values: Any, x: Tensor, what: str) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != x.shape[:1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise FipaError(f"the {what} must be a tensor ({len(x)},) at {len(x)} points, got {got}")
    return values


def _finite(values: Any, x: Tensor, what: str) -> Tensor:
    values = _row(values, x, what)
    bad = ~values.isfinite()
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise FipaError(f"the {what} is {float(values[place])} at x = {x[place].tolist()}")
    return values


def _check_zero(pde: PDE, seed: int, count: int = 100) -> None:
    """Before a model is made to vanish on the boundary: that the solution does."""
    if pde.condition is not dirichlet:
        raise FipaError("hard_boundary is for the condition u = 0: give condition=fipa.pde.dirichlet, or leave it out")
    for face in pde.conditions:
        x = pde.domain.on_face(face, count, generator_for(seed, "data"))
        values = _finite(pde.values(x), x, "boundary value")
        if bool((values.abs() > 1e-12).any()):
            place = int(values.abs().argmax())
            raise FipaError(
                f"hard_boundary is for the condition u = 0, but u is {float(values[place]):.3g} at x = "
                f"{x[place].tolist()}: leave it out"
            )


def _check_rows(term: Residual, model: nn.Module, client: int) -> None:
    """Before any training: an operator that cannot be evaluated, or is NaN from the start."""
    with torch.no_grad():
        rows = term(model)
    if not bool(rows.isfinite().all()):
        place = int((~rows.isfinite()).any(dim=1).nonzero()[0])
        name = getattr(term.function, "__name__", "residual")
        raise FipaError(
            f"the {name} residual of client {client} is {rows[place].tolist()} at x = "
            f"{term.inputs[0][place].tolist()} for the initial model: check the operator and its source"
        )
