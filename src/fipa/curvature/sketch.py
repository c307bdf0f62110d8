"""`sketch`: a model, its data and a loss in; the leading eigenpairs of the curvature out."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fipa.curvature.operator import CurvatureOperator, Eigenpairs
from fipa.curvature.rank import Rank, RelativeThreshold, TraceShare
from fipa.curvature.routes import MEMORY_LIMIT, Route, curvature_of
from fipa.curvature.solvers import EXACT_LIMIT, block_krylov, exact, subspace_iteration
from fipa.curvature.summary import CurvatureSummary, wrong_shape
from fipa.curvature.terms import LossName
from fipa.errors import RankWarning, SketchError
from fipa.layout import Layout, ParamSelection

Solver = Literal["auto", "exact", "subspace", "krylov"]

_FORMAT = "fipa-sketch-1"
_ITERATIVE = {"subspace": subspace_iteration, "krylov": block_krylov}
_FIRST_GUESS = 64  # eigenpairs to compute before an adaptive rank asks for more
_EXACT_BY_DEFAULT = 1024  # side of the Gram matrix up to which the exact solver is also the fastest


@dataclass(frozen=True, eq=False)
class Sketch(CurvatureSummary):
    r"""Rank-r approximation $U \Lambda U^\top$ of a curvature matrix (paper Eq. `eq:lowrank_h`).

    Attributes
    ----------
    eigenvectors
        U (p x r), orthonormal columns.
    eigenvalues
        Diagonal of $\Lambda$ (r), descending, not negative.
    layout
        Names and shapes of the parameters that the rows of U stand for, in order.
    loss, num_examples
        What was differentiated, on how many examples.
    trace
        Tr H: all curvature, kept or not. The part that was not kept is estimated on the matrix-free route, else exact.
        With sub-sampled examples or labels, H is the sampled matrix: of less rank than the full one, and with larger
        leading eigenvalues.
    """

    eigenvectors: Tensor
    eigenvalues: Tensor
    layout: Layout
    loss: str = "unknown"
    num_examples: int = 0
    trace: float = math.nan

    made_by = "fipa.sketch"

    @property
    def rank(self) -> int:
        """Number of eigenpairs kept."""
        return len(self.eigenvalues)

    @property
    def residual(self) -> float:
        """Share of the trace that the kept eigenpairs leave out, between 0 and 1."""
        left = 1.0 - float(self.eigenvalues.sum()) / self.trace if self.trace else 0.0
        return left if math.isnan(left) else max(0.0, left)

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {"eigenvectors": self.eigenvectors, "eigenvalues": self.eigenvalues}

    def problem(self, parameters: int) -> str | None:  # noqa: D102
        if self.eigenvalues.dim() != 1:
            return wrong_shape("eigenvalues", self.eigenvalues, (self.eigenvalues.numel(),))
        if bool((self.eigenvalues < 0).any()):
            return (
                f"sent the negative eigenvalue {float(self.eigenvalues.min()):.3g}: a Gauss-Newton matrix has none; "
                "use fipa.sketch, or clamp rounding errors with eigenvalues.clamp(min=0)"
            )
        return wrong_shape("eigenvectors", self.eigenvectors, (parameters, self.rank))

    def truncate(self, rank: int) -> Sketch:
        """The same sketch with only its leading `rank` eigenpairs."""
        if rank < 0:
            raise SketchError(f"rank must not be negative, got {rank}")
        return replace(self, eigenvectors=self.eigenvectors[:, :rank], eigenvalues=self.eigenvalues[:rank])

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        about = {"loss": self.loss, "num_examples": self.num_examples, "trace": self.trace}
        save_file(
            {"eigenvectors": self.eigenvectors.contiguous(), "eigenvalues": self.eigenvalues.contiguous()},
            str(path),
            {"format": _FORMAT, "layout": self.layout.to_json(), "about": json.dumps(about)},
        )

    @classmethod
    def load(cls, path: str | Path) -> Sketch:
        """Read what `save` wrote."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise SketchError(f"{path} is not a sketch of format {_FORMAT}: {metadata.get('format')!r}")
                tensors = {name: file.get_tensor(name) for name in ("eigenvectors", "eigenvalues")}
            return cls(**tensors, layout=Layout.from_json(metadata["layout"]), **json.loads(metadata["about"]))
        except SafetensorError as error:
            raise SketchError(f"{path} is not a readable safetensors file: {error}") from error
        except KeyError as error:
            raise SketchError(f"{path} lacks {error}") from error


def sketch(
    model: nn.Module,
    data: Any,
    loss: LossName = "cross_entropy",
    rank: Rank = 20,
    *,
    params: ParamSelection = None,
    route: Route = "auto",
    solver: Solver = "auto",
    oversampling: int = 10,
    iterations: int = 4,
    max_examples: int | None = None,
    sampled_labels: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    memory_limit: int = MEMORY_LIMIT,
    seed: int = 0,
) -> Sketch:
    r"""Leading eigenpairs of the generalised Gauss-Newton (Fisher) matrix of a model on a client's data.

    The matrix is the paper's $H_m = \frac1{N_m} \sum_i J_i^\top S_i J_i$ (Eq. `eq:hmk`) at the model's present
    parameters, in eval mode. Neither the model nor its mode is changed.

    Parameters
    ----------
    model
        Any module that `torch.func` can differentiate.
    data
        Tensors x or (x, y), or an iterable of (x, y) batches. With `loss="least_squares"`: `fipa.Residual`s.
    loss
        `"cross_entropy"` (S = diag p - p p^T), `"mse"` (S = I) or `"least_squares"`.
    rank
        A number; None for all that the data support; `RelativeThreshold` or `TraceShare` to let the spectrum decide.
        More than the data support is clamped with a `RankWarning`.
    params
        Which parameters vary: see `parameters_of`. The sketch covers exactly these.
    route
        `"rows"`: Jacobians held in memory (or recomputed in blocks beyond the limit). `"matrix_free"`: JVPs and VJPs.
        `"linear_head"`: closed form, backbone run once. `"auto"`: the head if it is one, else rows if they fit.
    solver
        `"exact"`, the paper's `"subspace"` iteration, or block `"krylov"`. `"auto"`: exact if small, else krylov.
    oversampling, iterations
        s and q of the paper for `"subspace"`; for `"krylov"` extra columns, and blocks beyond the first.
    max_examples
        Sub-sample the examples, without replacement.
    sampled_labels
        Cross entropy only: draw this many labels per example from the model's predictions instead of summing over
        all classes: C - 1 times cheaper with one label. H is then an unbiased estimate; its eigenvalues are not.
    dtype, device
        Of the computation and of the result; the parameters' own by default. The model is not moved.
    memory_limit
        Bytes that rows or activations may take. The solver's own blocks come on top: some 2.5 (rank + oversampling)
        columns of p numbers for `"krylov"`.
    seed
        Of sub-sampling, sampled labels and start vectors.

    Examples
    --------
    >>> model = nn.Linear(4, 3)
    >>> fisher = sketch(model, torch.randn(50, 4), rank=5)
    >>> fisher.eigenvectors.shape, fisher.layout.names
    (torch.Size([15, 5]), ('weight', 'bias'))
    """
    if isinstance(rank, SupportsIndex):
        rank = index(rank)
    elif not isinstance(rank, RelativeThreshold | TraceShare | None):
        raise SketchError(f"rank takes an integer, None, a RelativeThreshold or a TraceShare, got {rank!r}")
    for name, value in (("oversampling", oversampling), ("iterations", iterations)):
        if value < 0:
            raise SketchError(f"{name} must not be negative, got {value}")
    generator = torch.Generator().manual_seed(seed)
    with curvature_of(
        model, data, loss, params=params, route=route, max_examples=max_examples, sampled_labels=sampled_labels,
        dtype=dtype, device=device, memory_limit=memory_limit, generator=generator,
    ) as (operator, layout, num_examples):  # fmt: skip
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
                raise SketchError(f'unknown solver {solver!r}: use "auto", "exact", "subspace" or "krylov"')
            return _ITERATIVE[chosen](
                operator, count, oversampling=oversampling, iterations=iterations, generator=generator
            )

        most = rank.max_rank if isinstance(rank, RelativeThreshold | TraceShare) else rank
        if most is not None and most < 1:
            raise SketchError(f"rank must be at least 1, got {most}")
        most = possible if most is None else min(most, possible)
        if isinstance(rank, RelativeThreshold | TraceShare):
            first = most if possible <= _EXACT_BY_DEFAULT else min(_FIRST_GUESS, most)
            vectors, values, trace = _adaptive(operator, rank, solve, first, most, generator)
        else:
            vectors, values = solve(most)
            trace = operator.trace(generator, (vectors, values))
    if isinstance(rank, int) and len(values) < rank:
        warnings.warn(
            f"rank {rank} was asked for, but {num_examples} examples of {layout.numel} parameters support only "
            f"{len(values)} in {values.dtype}: kept {len(values)}",
            RankWarning,
            stacklevel=2,
        )
    return Sketch(vectors, values, layout, loss, num_examples, trace).canonical()  # no part of a wider matrix


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
