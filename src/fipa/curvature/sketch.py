"""`sketch`: a model, its data and a loss in; the leading eigenpairs of the curvature out."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fipa.curvature.leading import Solver, leading
from fipa.curvature.options import Options
from fipa.curvature.rank import Rank, RelativeThreshold, TraceShare
from fipa.curvature.routes import MEMORY_LIMIT, Route, curvature_of
from fipa.curvature.summary import Arrived, CurvatureSummary, Occasion, SampledPlan, Shape, Source, wrong_shape
from fipa.curvature.terms import LossName
from fipa.errors import RankWarning, SketchError
from fipa.layout import Layout

_FORMAT = "fipa-sketch-1"
_UNIT = 0.05  # how far a column of eigenvectors that travelled may be from length 1: int8 takes a little


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

    kind = "sketch"
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

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        if self.eigenvalues.dim() != 1:
            return wrong_shape("eigenvalues", self.eigenvalues, (self.eigenvalues.numel(),))
        if bool((self.eigenvalues < 0).any()):
            return (
                f"sent the negative eigenvalue {float(self.eigenvalues.min()):.3g}: a Gauss-Newton matrix has none; "
                "use fipa.sketch, or clamp rounding errors with eigenvalues.clamp(min=0)"
            )
        return wrong_shape("eigenvectors", self.eigenvectors, (parameters, self.rank))

    def about(self) -> dict[str, Any]:  # noqa: D102
        return {"loss": self.loss, "trace": self.trace}

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        shape, most = found.get("eigenvalues", ()), plan.most
        if len(shape) != 1 or shape[0] < 0 or (most is not None and shape[0] > most):
            limit = "any number of them" if most is None else f"at most {most}"
            raise SketchError(f"has eigenvalues of shape {shape}, expected {limit}")
        return {"eigenvectors": (layout.numel, shape[0]), "eigenvalues": shape}

    @classmethod
    def restore(cls, arrived: Arrived) -> Self:  # noqa: D102
        lengths = torch.linalg.vector_norm(arrived.tensors["eigenvectors"], dim=0)
        if not bool(((lengths - 1).abs() <= _UNIT).all()):
            raise SketchError("has eigenvectors that are not of length 1")
        trace = arrived.about.get("trace")
        return cls(
            **arrived.tensors, layout=arrived.layout, loss=str(arrived.about.get("loss")),
            num_examples=arrived.num_examples, trace=float(trace) if isinstance(trace, int | float) else math.nan,
        )  # fmt: skip

    def sizes(self) -> dict[str, Tensor]:  # noqa: D102
        return {"curvature": self.eigenvalues.sum()}

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
    route: Route = "auto",
    solver: Solver = "auto",
    oversampling: int = 10,
    iterations: int = 4,
    memory_limit: int = MEMORY_LIMIT,
    **options: Unpack[Options],
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
    route
        `"rows"`: Jacobians held in memory (or recomputed in blocks beyond the limit). `"matrix_free"`: JVPs and VJPs.
        `"linear_head"`: closed form, backbone run once. `"auto"`: the head if it is one, else rows if they fit.
    solver
        `"exact"`, the paper's `"subspace"` iteration, or block `"krylov"`. `"auto"`: exact if small, else krylov.
    oversampling, iterations
        s and q of the paper for `"subspace"`; for `"krylov"` extra columns, and blocks beyond the first.
    memory_limit
        Bytes that rows or activations may take. The solver's own blocks come on top: some 2.5 (rank + oversampling)
        columns of p numbers for `"krylov"`.
    **options
        `params`: which parameters vary, see `parameters_of`; `max_examples` and `sampled_labels` for cheaper sketches;
        `dtype`, `device` and `seed`. See `fipa.curvature.options.Options`.

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
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    with curvature_of(
        model, data, loss, route=route, memory_limit=memory_limit, generator=generator, **options
    ) as (operator, layout, num_examples):  # fmt: skip
        vectors, values, trace = leading(
            operator, rank, solver, oversampling=oversampling, iterations=iterations, memory_limit=memory_limit,
            generator=generator,
        )  # fmt: skip
    if isinstance(rank, int) and len(values) < rank:
        warnings.warn(
            f"rank {rank} was asked for, but {num_examples} examples of {layout.numel} parameters support only "
            f"{len(values)} in {values.dtype}: kept {len(values)}",
            RankWarning,
            stacklevel=2,
        )
    return Sketch(vectors, values, layout, loss, num_examples, trace).canonical()  # no part of a wider matrix


@dataclass(frozen=True)
class SketchPlan(SampledPlan):
    """Eigenpairs, as for `fipa.sketch`."""

    rank: Rank = 20
    solver: Solver = "auto"
    route: Route = "auto"
    oversampling: int = 10
    iterations: int = 4

    makes = Sketch

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> Sketch:
        """The client's sketch."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)  # no news in a round: the record shows the rank
            return sketch(
                model, client.tensors, client.loss, self.rank, route=self.route, solver=self.solver,
                oversampling=self.oversampling, iterations=self.iterations, **self.options(layout, occasion),
            )  # fmt: skip

    @property
    def most(self) -> int | None:
        """Eigenpairs that a sketch may have; None for as many as the data support."""
        return self.rank.max_rank if isinstance(self.rank, RelativeThreshold | TraceShare) else self.rank

    def at_most(self, rank: int | None) -> SketchPlan:  # noqa: D102
        if rank is None or (self.most is not None and self.most <= rank):
            return self
        if isinstance(self.rank, RelativeThreshold | TraceShare):
            return replace(self, rank=replace(self.rank, max_rank=rank))
        return replace(self, rank=rank)
