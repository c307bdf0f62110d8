"""How many eigenpairs, and by which solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from fipa.curvature.operator import CurvatureOperator, Eigenpairs
from fipa.curvature.rank import Rank, RelativeThreshold, TraceShare
from fipa.curvature.solvers import EXACT_LIMIT, block_krylov, exact, subspace_iteration
from fipa.errors import SketchError, instead_of

Solver = Literal["auto", "exact", "subspace", "krylov"]

_ITERATIVE = {"subspace": subspace_iteration, "krylov": block_krylov}
_FIRST_GUESS = 64  # eigenpairs to compute before an adaptive rank asks for more
_EXACT_BY_DEFAULT = 1024  # side of the Gram matrix up to which the exact solver is also the fastest


def leading(
    operator: CurvatureOperator,
    rank: Rank,
    solver: Solver,
    *,
    oversampling: int,
    iterations: int,
    memory_limit: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, float]:
    """Eigenvectors, eigenvalues and the trace of all; arguments as for `sketch`."""
    possible = min(operator.rows, operator.parameters)
    fits = operator.rows * operator.parameters * operator.like.element_size() <= memory_limit

    def solve(count: int) -> Eigenpairs:
        chosen = solver
        if solver == "auto":
            small = possible <= max(_EXACT_BY_DEFAULT, min(2 * count, EXACT_LIMIT))
            chosen = "exact" if (small and fits) or rank is None else "krylov"
        if chosen == "exact":
            return exact(operator, count)
        if chosen not in _ITERATIVE:
            raise SketchError(f"there is no solver {solver!r}: {instead_of(solver, get_args(Solver))}")
        return _ITERATIVE[chosen](
            operator, count, oversampling=oversampling, iterations=iterations, generator=generator
        )

    most = rank.max_rank if isinstance(rank, RelativeThreshold | TraceShare) else rank
    if most is not None and most < 1:
        raise SketchError(f"rank must be at least 1, got {most}")
    most = possible if most is None else min(most, possible)
    if isinstance(rank, RelativeThreshold | TraceShare):
        first = most if possible <= _EXACT_BY_DEFAULT else min(_FIRST_GUESS, most)
        return _adaptive(operator, rank, solve, first, most, generator)
    vectors, values = solve(most)
    return vectors, values, operator.trace(generator, (vectors, values))


def _adaptive(
    operator: CurvatureOperator,
    rule: RelativeThreshold | TraceShare,
    solve: Callable[[int], Eigenpairs],
    first: int,
    most: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, float]:
    """Compute `first` eigenpairs, then twice as many, until the rule keeps fewer than there are."""
    count = first
    while True:
        vectors, values = solve(count)
        trace = operator.trace(generator, (vectors, values))
        keep = rule.count(values, trace) if len(values) else 0
        if keep < len(values) or len(values) < count or count == most:
            return vectors[:, :keep], values[:keep], trace
        count = min(2 * count, most)
