"""Everything the rules rely on, checked once: the clients of one round in the order of their ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fipa.aggregation.update import ClientUpdate, Curvature
from fipa.curvature.additive import AdditiveStatistics
from fipa.curvature.covariance import InputCovariance
from fipa.curvature.diagonal import DiagonalCurvature
from fipa.curvature.sketch import Sketch
from fipa.errors import LayoutError, UpdateError
from fipa.layout import Layout

C = TypeVar("C", Sketch, DiagonalCurvature, InputCovariance, AdditiveStatistics)

_MAKERS = {
    Sketch: "fipa.sketch",
    DiagonalCurvature: "fipa.diagonal_fisher",
    InputCovariance: "fipa.input_covariance",
    AdditiveStatistics: "fipa.additive_statistics",
}


@dataclass(frozen=True, eq=False)
class Cohort:
    """Validated clients of one round, in reduction order."""

    clients: tuple[str, ...]  # how diagnostics and errors call them
    weights: tuple[float, ...]  # w_m = N_m / N
    deltas: tuple[Tensor, ...]  # flat (p)
    curvatures: tuple[Curvature | None, ...]
    num_examples: tuple[int, ...]

    @property
    def mean_delta(self) -> Tensor:
        r"""FedAvg's step $\sum_m w_m \Delta\theta_m$."""
        total = torch.zeros_like(self.deltas[0])
        for weight, delta in zip(self.weights, self.deltas, strict=True):
            total.add_(delta, alpha=weight)
        return total

    def require(self, kind: type[C], rule: str) -> list[C]:
        """The clients' curvatures, all of one kind, or an error that names who lacks it."""
        for client, curvature in zip(self.clients, self.curvatures, strict=True):
            if not isinstance(curvature, kind):
                got = "no sketch" if curvature is None else f"a {type(curvature).__name__}"
                raise UpdateError(
                    f"{client} sent {got}, but {rule} needs a {kind.__name__}: compute it at the broadcast model with "
                    f"{_MAKERS[kind]}(...) and pass it as ClientUpdate(..., sketch=...)"
                )
        return [c for c in self.curvatures if isinstance(c, kind)]


def gather(
    theta: Tensor | Mapping[str, Tensor], updates: Iterable[ClientUpdate]
) -> tuple[Cohort, Tensor, Layout | None]:
    """Check a round's input; return its clients, the flat parameters they update, and those parameters' layout."""
    ordered, clients = _in_order(list(updates))
    layout = _layout(theta, ordered)
    flat_theta = _flatten_theta(theta, layout)
    deltas, curvatures = [], []
    for client, update in zip(clients, ordered, strict=True):
        n = update.num_examples
        if isinstance(n, bool) or not isinstance(n, int) or n <= 0:
            raise UpdateError(
                f"{client} reports num_examples={n!r}: it must be a positive integer; leave out clients without data"
            )
        deltas.append(_flatten_delta(client, update.delta, layout, flat_theta))
        if update.sketch is not None:
            _check_curvature(client, update.sketch, layout, flat_theta)
        curvatures.append(update.sketch)
    counts = tuple(update.num_examples for update in ordered)
    weights = tuple(n / sum(counts) for n in counts)
    return Cohort(clients, weights, tuple(deltas), tuple(curvatures), counts), flat_theta, layout


def _in_order(updates: Sequence[ClientUpdate]) -> tuple[list[ClientUpdate], tuple[str, ...]]:
    if not updates:
        raise UpdateError("no client updates to aggregate: keep the model as it is, or wait for at least one client")
    for i, update in enumerate(updates):
        if not isinstance(update, ClientUpdate):
            raise UpdateError(
                f"update #{i} is a {type(update).__name__}: wrap it in fipa.ClientUpdate(delta, num_examples, ...)"
            )
    ids = [update.client_id for update in updates]
    if all(i is None for i in ids):
        return list(updates), tuple(f"client #{i}" for i in range(len(updates)))
    if any(i is None for i in ids):
        raise UpdateError(
            f"update #{ids.index(None)} has no client_id while others have: give all of them one, or none"
        )
    twice = sorted({str(i) for i in ids if ids.count(i) > 1})
    if twice:
        raise UpdateError(f"client id {twice[0]} occurs more than once: a client may send one update per round")
    ordered = sorted(updates, key=lambda u: (isinstance(u.client_id, str), u.client_id))
    return ordered, tuple(f"client {u.client_id}" for u in ordered)


def _layout(theta: Tensor | Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Layout | None:
    """Taken from the first curvature, else from the first named update, else from the parameters themselves."""
    for update in updates:
        if update.sketch is not None:
            return update.sketch.layout
    for update in updates:
        if isinstance(update.delta, Mapping):
            return Layout.of(update.delta)
    return Layout.of(theta) if isinstance(theta, Mapping) else None


def _flatten_theta(theta: Tensor | Mapping[str, Tensor], layout: Layout | None) -> Tensor:
    if isinstance(theta, Mapping):
        assert layout is not None
        missing = [name for name in layout.names if name not in theta]
        if missing:
            raise LayoutError(f"theta has no parameter {missing[0]!r}, which the clients updated")
        flat = layout.flatten({name: theta[name] for name in layout.names})
    else:
        flat = theta.detach().reshape(-1)
        if layout is not None and flat.numel() != layout.numel:
            raise LayoutError(f"theta has {flat.numel()} elements, but the clients updated {layout.numel}")
    if not flat.is_floating_point():
        raise LayoutError(f"theta must hold floating point numbers, not {flat.dtype}")
    if not bool(flat.isfinite().all()):
        raise LayoutError("theta holds NaN or infinity: go back to the last good checkpoint")
    return flat


def _flatten_delta(client: str, delta: Tensor | Mapping[str, Tensor], layout: Layout | None, theta: Tensor) -> Tensor:
    if isinstance(delta, Mapping):
        assert layout is not None
        try:
            flat = layout.flatten(delta)
        except LayoutError as error:
            raise UpdateError(
                f"{client}: {error}; update and sketch must cover the same parameters (see fipa.parameters_of)"
            ) from error
    else:
        flat = delta.detach().reshape(-1)
    if flat.shape != theta.shape:
        raise UpdateError(f"{client} sent an update of length {flat.numel()}, but there are {theta.numel()} parameters")
    if flat.dtype != theta.dtype or flat.device != theta.device:
        raise UpdateError(
            f"{client} sent an update of {flat.dtype} on {flat.device}, theta is {theta.dtype} on {theta.device}: "
            "convert one with .to(...)"
        )
    if not bool(flat.isfinite().all()):
        where = _first_bad(flat, layout)
        raise UpdateError(
            f"{client} sent NaN or infinity in its update{where}: leave this client out, or lower its learning rate"
        )
    return flat


def _check_curvature(client: str, curvature: Curvature, layout: Layout | None, theta: Tensor) -> None:
    if curvature.layout != layout:
        assert layout is not None
        odd = sorted(set(curvature.layout.names) ^ set(layout.names))
        detail = f"differs in {odd[0]!r}" if odd else "has other shapes or another order"
        raise UpdateError(f"{client} sent a sketch of other parameters than the other clients: it {detail}")
    tensors = _tensors(curvature)
    if isinstance(curvature, Sketch):
        p, r = layout.numel if layout else theta.numel(), curvature.eigenvalues.numel()
        if curvature.eigenvectors.shape != (p, r) or curvature.eigenvalues.dim() != 1:
            raise UpdateError(
                f"{client} sent eigenvectors of shape {tuple(curvature.eigenvectors.shape)} with {r} eigenvalues, "
                f"expected ({p}, {r})"
            )
        if bool((curvature.eigenvalues < 0).any()):
            raise UpdateError(
                f"{client} sent the negative eigenvalue {float(curvature.eigenvalues.min()):.3g}: a Gauss-Newton "
                "matrix has none; use fipa.sketch, or clamp rounding errors with eigenvalues.clamp(min=0)"
            )
    if isinstance(curvature, DiagonalCurvature) and bool((curvature.values < 0).any()):
        raise UpdateError(f"{client} sent a negative diagonal curvature: a Fisher diagonal has none")
    for name, tensor in tensors.items():
        if tensor.dtype != theta.dtype or tensor.device != theta.device:
            raise UpdateError(
                f"{client} sent {name} of {tensor.dtype} on {tensor.device}, theta is {theta.dtype} on {theta.device}: "
                "convert the sketch with .to(...)"
            )
        if not bool(tensor.sum().isfinite()):  # one pass and no copy: NaN and infinity survive a sum
            raise UpdateError(f"{client} sent NaN or infinity in its {name}: leave this client out")


def _tensors(curvature: Curvature) -> dict[str, Tensor]:
    if isinstance(curvature, Sketch):
        return {"eigenvectors": curvature.eigenvectors, "eigenvalues": curvature.eigenvalues}
    if isinstance(curvature, DiagonalCurvature):
        return {"diagonal": curvature.values}
    if isinstance(curvature, AdditiveStatistics):
        return {"products": curvature.products, "response": curvature.response}
    return {f"covariance of {name}": matrix for name, (_, matrix) in curvature.layers.items()}


def _first_bad(flat: Tensor, layout: Layout | None) -> str:
    if layout is None:
        return ""
    index = int((~flat.isfinite()).nonzero()[0])
    return next(f" (parameter {name!r})" for name, where in layout.slices.items() if index < where.stop)
