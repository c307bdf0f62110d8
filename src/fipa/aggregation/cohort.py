"""Everything the rules rely on, checked once: the clients of one round in the order of their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor

from fipa.aggregation.checks import check_curvature
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.summary import CurvatureSummary
from fipa.errors import LayoutError, UpdateError
from fipa.layout import Layout
from fipa.linalg import aligned
from fipa.spill import MEMORY_LIMIT, Passing, in_file, release, spilled

C = TypeVar("C", bound=CurvatureSummary)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cohort:
    """Validated clients of one round, in reduction order; all tensors in the form of `fipa.linalg.aligned`."""

    clients: tuple[str, ...]  # how errors call them
    ids: tuple[int | str, ...]  # client ids, or places in the list
    weights: tuple[float, ...]  # w_m = N_m / N, or the given weights' shares
    deltas: tuple[Tensor, ...]  # flat (p)
    curvatures: tuple[CurvatureSummary | None, ...]
    num_examples: tuple[int, ...]
    identified: bool = True  # whether `ids` tell who a client is, also in another round
    population: int | None = None  # clients of the federation, here or not; None: nobody has told
    theta: Tensor = field(default_factory=lambda: torch.zeros(0))  # the broadcast parameters, flat (p)
    memory_limit: int = MEMORY_LIMIT  # bytes of curvature that rules may have in memory at once
    memory: dict[Callable[[Cohort], Any], Any] = field(default_factory=dict)

    def remember(self, make: Callable[[Cohort], T]) -> T:
        """What `make` computes from the cohort but for its deltas: once, also if a rule is applied again.

        Others that share this memory have other deltas, so `make` gets none. Let it be a function of a module: one made
        inside a rule is another function in each call, and its result is not found again.
        """
        if make not in self.memory:
            self.memory[make] = make(replace(self, deltas=()))
        return self.memory[make]

    def with_deltas(self, deltas: Mapping[int | str, Tensor]) -> Cohort:
        """The same clients with other updates, by id."""
        return replace(self, deltas=tuple(aligned(deltas[i]) for i in self.ids))

    def with_weights(self, weights: Sequence[float]) -> Cohort:
        """The same clients with other weights, one each; they are scaled to a sum of 1, and 0 leaves a client out."""
        total = sum(weights)
        if len(weights) != len(self.clients) or not 0 < total < float("inf") or min(weights) < 0:
            raise UpdateError(f"weights {list(weights)}: {len(self.clients)} clients need one each, none negative")
        return replace(
            self, weights=tuple(w / total for w in weights), memory={}
        )  # what is remembered has weights in it

    @property
    def mean_delta(self) -> Tensor:
        r"""FedAvg's step $\sum_m w_m \Delta\theta_m$."""
        total = torch.zeros_like(self.deltas[0])
        for weight, delta in zip(self.weights, self.deltas, strict=True):
            total.add_(delta, alpha=weight)
        return total

    def require(self, kind: type[C], rule: str) -> Sequence[C]:
        """The clients' curvatures, all of one kind, or an error that names who lacks it."""
        for client, curvature in zip(self.clients, self.curvatures, strict=True):
            if not isinstance(curvature, kind):
                got = "no sketch" if curvature is None else f"a {type(curvature).__name__}"
                raise UpdateError(
                    f"{client} sent {got}, but {rule} needs a {kind.__name__}: compute it at the broadcast model with "
                    f"{kind.made_by}(...) and pass it as ClientUpdate(..., sketch=...)"
                )
        return Passing([c for c in self.curvatures if isinstance(c, kind)])


def gather(
    theta: Tensor | Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    *,
    population: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> tuple[Cohort, Tensor, Layout | None]:
    """Check a round's input; return its clients, the flat parameters they update, and those parameters' layout."""
    if isinstance(updates, ClientUpdate):
        raise UpdateError("updates is one ClientUpdate: pass a list of them, [update]")
    ordered, clients = _in_order(list(updates))
    _check_types(theta, clients, ordered)
    layout = _layout(theta, ordered)
    flat_theta = aligned(_flatten_theta(theta, layout))
    if population is not None and population < len(ordered):
        raise UpdateError(f"population={population}, but {len(ordered)} clients sent updates: count all of them")
    deltas, curvatures = [], []
    for client, update in zip(clients, ordered, strict=True):
        n = update.num_examples
        if isinstance(n, bool) or not isinstance(n, SupportsIndex) or n <= 0:
            raise UpdateError(
                f"{client} reports num_examples={n!r}: it must be a positive integer; leave out clients without data"
            )
        w = update.weight
        if w is not None and not 0 < w < float("inf"):
            raise UpdateError(
                f"{client} has weight={w!r}: it must be a positive number; leave out clients that do not count"
            )
        flat = aligned(_flatten_delta(client, update.delta, layout, flat_theta))
        parts = update.delta.values() if isinstance(update.delta, Mapping) else (update.delta,)
        deltas.append(spilled(flat) if any(in_file(part) for part in parts) else flat)
        if update.sketch is not None:
            check_curvature(client, update.sketch, layout, flat_theta)
            release(*update.sketch.tensors().values())
        curvatures.append(None if update.sketch is None else update.sketch.canonical())
        release(deltas[-1])
    counts = tuple(int(update.num_examples) for update in ordered)
    given = [n if update.weight is None else float(update.weight) for n, update in zip(counts, ordered, strict=True)]
    total = sum(given)
    weights = tuple(w / total for w in given)
    ids = tuple(i if update.client_id is None else update.client_id for i, update in enumerate(ordered))
    identified = ordered[0].client_id is not None
    cohort = Cohort(
        clients, ids, weights, Passing(deltas), tuple(curvatures), counts, identified, population, flat_theta,
        memory_limit,
    )  # fmt: skip
    return cohort, flat_theta, layout


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
    twice = [i for i, count in Counter(ids).items() if count > 1]
    if twice:
        raise UpdateError(f"client id {twice[0]} occurs more than once: a client may send one update per round")
    ordered = sorted(updates, key=lambda u: (isinstance(u.client_id, str), u.client_id))
    return ordered, tuple(f"client {u.client_id!r}" for u in ordered)


def _layout(theta: Tensor | Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Layout | None:
    """The layout of the first curvature or named update that fits theta; else that of the parameters themselves.

    One that does not fit is not taken, so that it is this client, and not theta or the others, that gets the blame.
    """
    sent = [u.sketch.layout for u in updates if u.sketch is not None]
    sent = sent or [Layout.of(u.delta) for u in updates if isinstance(u.delta, Mapping)]
    if sent:
        return next((layout for layout in sent if _fits(layout, theta)), sent[0])
    return Layout.of(theta) if isinstance(theta, Mapping) else None


def _fits(layout: Layout, theta: Tensor | Mapping[str, Tensor]) -> bool:
    if isinstance(theta, Mapping):
        pairs = zip(layout.names, layout.shapes, strict=True)
        return all(name in theta and tuple(theta[name].shape) == shape for name, shape in pairs)
    return theta.numel() == layout.numel


def _check_types(theta: Tensor | Mapping[str, Tensor], clients: Sequence[str], updates: Sequence[ClientUpdate]) -> None:
    flaw = _not_tensors(theta)
    if flaw:
        raise LayoutError(f"theta {flaw}: pass a tensor, or tensors by name")
    for client, update in zip(clients, updates, strict=True):
        flaw = _not_tensors(update.delta)
        if flaw:
            raise UpdateError(f"{client}: its update {flaw}: send a tensor, or tensors by name")
        if update.sketch is not None and not isinstance(update.sketch, CurvatureSummary):
            raise UpdateError(
                f"{client} sent a {type(update.sketch).__name__} as its sketch: use fipa.sketch, fipa.diagonal_fisher, "
                "fipa.input_covariance or fipa.additive_statistics"
            )


def _not_tensors(thing: object) -> str | None:
    if isinstance(thing, Mapping):
        odd = {name: t for name, t in thing.items() if not isinstance(t, Tensor)}
        return next((f"has a {type(t).__name__} as {name!r}" for name, t in odd.items()), None)
    return None if isinstance(thing, Tensor) else f"is a {type(thing).__name__}"


def _flatten_theta(theta: Tensor | Mapping[str, Tensor], layout: Layout | None) -> Tensor:
    if isinstance(theta, Mapping):
        assert layout is not None
        missing = [name for name in layout.names if name not in theta]
        if missing:
            raise LayoutError(f"theta has no parameter {missing[0]!r}, which the clients updated")
        chosen = {name: theta[name] for name in layout.names}
        kinds = {(t.dtype, t.device): name for name, t in chosen.items()}
        if len(kinds) > 1:
            (first, one), (second, other) = list(kinds.items())[:2]
            raise LayoutError(
                f"theta mixes dtypes or devices ({one!r}: {first}, {other!r}: {second}): leave buffers out, see "
                "fipa.parameters_of"
            )
        try:
            flat = layout.flatten(chosen)
        except LayoutError as error:
            raise LayoutError(f"theta does not fit what the clients updated: {error}") from error
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


def _first_bad(flat: Tensor, layout: Layout | None) -> str:
    if layout is None:
        return ""
    index = int((~flat.isfinite()).nonzero()[0])
    return next(f" (parameter {name!r})" for name, where in layout.slices.items() if index < where.stop)
