"""Random rounds of clients, and the dense p x p formulas that every rule is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

import fipa
from fipa import (
    FIPA,
    FOOF,
    AdditiveFIPA,
    AdditiveStatistics,
    ClientUpdate,
    CompletedFIPA,
    DiagonalCurvature,
    DiagonalFisher,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    InputCovariance,
    Layout,
    Sketch,
)

DOUBLE = torch.float64
CUTOFF = 1e-5  # the rules' default
FAST = settings()  # of the profile, see tests/conftest.py
SEEDS = st.integers(0, 2**31 - 1)


@dataclass(frozen=True)
class Round:
    """A round's updates next to each client's flat update and dense curvature (p x p)."""

    updates: list[ClientUpdate]
    deltas: list[Tensor]
    curvatures: list[Tensor]

    def __repr__(self) -> str:  # what hypothesis shows of a failure: the structure, not all numbers
        eigenvalues = [getattr(u.sketch, "eigenvalues", torch.zeros(0)).tolist() for u in self.updates]
        return f"Round(p={self.p}, examples={[u.num_examples for u in self.updates]}, eigenvalues={eigenvalues})"

    @property
    def p(self) -> int:
        return len(self.deltas[0])

    @property
    def weights(self) -> list[float]:
        counts = [update.num_examples for update in self.updates]
        return [n / sum(counts) for n in counts]

    @property
    def total(self) -> Tensor:
        """H, the weighted sum of the curvatures."""
        return sum(w * C for w, C in zip(self.weights, self.curvatures, strict=True))

    @property
    def mean(self) -> Tensor:
        """FedAvg's step."""
        return sum(w * D for w, D in zip(self.weights, self.deltas, strict=True))

    @property
    def response(self) -> Tensor:
        """b, the weighted sum of curvature times update."""
        return sum(w * C @ D for w, C, D in zip(self.weights, self.curvatures, self.deltas, strict=True))

    def with_deltas(self, deltas: Sequence[Tensor]) -> Round:
        updates = [replace(u, delta=d) for u, d in zip(self.updates, deltas, strict=True)]
        return Round(updates, list(deltas), self.curvatures)

    def change(self, rule: fipa.Rule) -> Tensor:
        """What the rule makes of this round, as a flat step away from zero."""
        return fipa.aggregate(torch.zeros(self.p, dtype=DOUBLE), self.updates, rule).theta


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=DOUBLE)


def orthonormal(p: int, rank: int, rng: torch.Generator) -> Tensor:
    return torch.linalg.qr(normal(p, rank, rng=rng)).Q


def orthonormal_with(common: Tensor, rank: int, rng: torch.Generator) -> Tensor:
    """Orthonormal columns that begin with the given ones."""
    fresh = normal(len(common), rank - common.shape[1], rng=rng)
    return torch.cat([common, torch.linalg.qr(fresh - common @ (common.T @ fresh)).Q], dim=1)


def one_parameter(p: int) -> Layout:
    return Layout(("theta",), ((p,),))


def dense(sketch: Sketch) -> Tensor:
    return (sketch.eigenvectors * sketch.eigenvalues) @ sketch.eigenvectors.T


def round_of(sketches: Sequence[Sketch], deltas: Sequence[Tensor], counts: Sequence[int]) -> Round:
    updates = [ClientUpdate(d, n, s) for s, d, n in zip(sketches, deltas, counts, strict=True)]
    return Round(updates, list(deltas), [dense(s) for s in sketches])


@st.composite
def sketch_rounds(
    draw: st.DrawFn, *, min_clients: int = 1, max_clients: int = 4, max_parameters: int = 9, full_rank: bool = False
) -> Round:
    """Clients with sketches of any rank from 0 to p, eigenvalues that may be zero, and bases that may coincide.

    Rounds whose spectrum comes near the cut-off are left out: there the answer is a matter of rounding.
    """
    p = draw(st.integers(1, max_parameters))
    clients = draw(st.integers(min_clients, max_clients))
    rng = generator(draw(SEEDS))
    positive = st.floats(0.25, 4.0)
    sketches: list[Sketch] = []
    for m in range(clients):
        # Bases may share a vector with, extend or equal those of the client before, or span the same by other vectors.
        relation = draw(st.sampled_from(["fresh", "one vector", "nested", "same", "rotated"])) if m else "fresh"
        before = sketches[-1].eigenvectors if m else torch.zeros(p, 0, dtype=DOUBLE)
        if relation in ("same", "rotated"):
            rank = before.shape[1]
            basis = before if relation == "same" else before @ orthonormal(rank, rank, rng)
        else:
            rank = p if full_rank else draw(st.integers(0, p))
            common = before[:, : {"fresh": 0, "one vector": 1, "nested": p}[relation]][:, :rank]
            basis = orthonormal_with(common, rank, rng)
        values = st.lists(positive if full_rank else st.just(0.0) | positive, min_size=rank, max_size=rank)
        eigenvalues = torch.tensor(sorted(draw(values), reverse=True), dtype=DOUBLE)
        sketches.append(Sketch(basis, eigenvalues, one_parameter(p)))
    counts = [draw(st.integers(1, 20)) for _ in range(clients)]
    deltas = [normal(p, rng=rng) for _ in range(clients)]
    result = round_of(sketches, deltas, counts)
    assume(clear_of_cutoff(result.total))
    return result


def clear_of_cutoff(H: Tensor) -> bool:
    values = torch.linalg.eigvalsh(H).clamp(min=0)
    relative = values / values.max() if values.max() > 0 else values
    return bool(((relative < 1e-10) | (relative > 1e-3)).all())


def inverse(H: Tensor, damping: float | Tensor, cutoff: float = CUTOFF) -> Tensor:
    """(H + damping)^-1, or the pseudo-inverse of H without damping."""
    if isinstance(damping, Tensor) or damping:
        return torch.linalg.inv(H + damping * torch.eye(len(H), dtype=DOUBLE))
    return torch.linalg.pinv(H, rtol=cutoff, hermitian=True)


def projector(H: Tensor) -> Tensor:
    """On the range of H."""
    return inverse(H, 0.0) @ H


def dense_parts(rule: fipa.Rule, clients: Round) -> list[Tensor]:
    """Every client's own part of the step, by dense linear algebra; the step is their sum."""
    if isinstance(rule, WRAPPERS):
        return dense_parts(rule.inner, clients)
    H = clients.total
    together = zip(clients.weights, clients.curvatures, clients.deltas, strict=True)
    if isinstance(rule, FedAvg):
        return [rule.step * w * D for w, _, D in together]
    F = inverse(H, dense_damping(rule, clients), getattr(rule, "cutoff", 0.0))
    if isinstance(rule, FIPA) or (isinstance(rule, AdditiveFIPA) and not rule.completed):
        return [rule.step * w * F @ C @ D for w, C, D in together]
    return [rule.step * w * (D + F @ (C - H) @ D) for w, C, D in together]


def dense_damping(rule: fipa.Rule, clients: Round) -> float | Tensor:
    """FOOF's damping is relative to each layer's mean eigenvalue, all others' is a number."""
    if not isinstance(rule, FOOF):
        return rule.damping
    damping = torch.ones(clients.p, dtype=DOUBLE)  # any positive number averages what no layer covers
    covariances = clients.updates[0].sketch
    where = covariances.layout.slices
    for weight, (bias, _) in covariances.layers.items():
        mean = sum(w * u.sketch.layers[weight][1] for w, u in zip(clients.weights, clients.updates, strict=True))
        for name in (weight, bias) if bias else (weight,):
            damping[where[name]] = rule.damping * mean.diagonal().mean()
    return damping


def dense_covariance(covariance: InputCovariance) -> Tensor:
    """C (x) I for every covered layer, in the order of the flat parameters; zero elsewhere."""
    layout = covariance.layout
    index = layout.unflatten(torch.arange(layout.numel))
    full = torch.zeros(layout.numel, layout.numel, dtype=DOUBLE)
    for weight, (bias, C) in covariance.layers.items():
        rows = len(index[weight])
        columns = [index[weight].reshape(rows, -1)] + ([index[bias][:, None]] if bias else [])
        order = torch.cat(columns, dim=1).reshape(-1)  # output by output: its weights, then its bias
        full[order[:, None], order] = torch.kron(torch.eye(rows, dtype=DOUBLE), C)
    return full


# Every rule, plain and with its settings in use; `random_round` gives each the curvature that it asks for.
RULES: dict[str, fipa.Rule] = {
    "FedAvg": FedAvg(),
    "FedAvg, step": FedAvg(step=0.6),
    "FIPA": FIPA(),
    "FIPA, damped": FIPA(damping=0.3, step=0.7),
    "CompletedFIPA": CompletedFIPA(),
    "CompletedFIPA, damped": CompletedFIPA(damping=0.3, step=0.7),
    "DiagonalFisher": DiagonalFisher(),
    "DiagonalFisher, damped": DiagonalFisher(damping=0.3, step=0.7),
    "FOOF": FOOF(),
    "FOOF, damped": FOOF(damping=0.5, step=0.7),
    "AdditiveFIPA": AdditiveFIPA(),
    "AdditiveFIPA, damped": AdditiveFIPA(damping=0.3, step=0.7),
    "AdditiveFIPA, completed": AdditiveFIPA(completed=True),
    "AdditiveFIPA, completed, damped": AdditiveFIPA(damping=0.3, step=0.7, completed=True),
    "FedAvgM": FedAvgM(),
    "FedAdam": FedAdam(),
    "FedYogi": FedYogi(),
    "FedAdagrad": FedAdagrad(),
    "FedAvgM of FIPA": FedAvgM(inner=FIPA(damping=0.3)),
    "FedAvgM of FedAdam of FOOF": FedAvgM(inner=FedAdam(inner=FOOF())),
}
WRAPPERS = (FedAvgM, FedAdam, FedYogi, FedAdagrad)

LAYOUT = Layout(("layer.weight", "scale", "layer.bias"), ((3, 2), (4,), (3,)))


def random_round(rule: fipa.Rule, seed: int, *, clients: int = 3, ids: Sequence[int | str] | None = None) -> Round:
    """Clients of unequal size with named updates of `LAYOUT`, and the curvature that `rule` needs."""
    rng = generator(seed)
    updates, deltas, curvatures = [], [], []
    for m in range(clients):
        examples = int(torch.randint(1, 50, (1,), generator=rng))
        delta = normal(LAYOUT.numel, rng=rng)
        curvature, matrix = _random_curvature(rule, m, delta, examples, rng)
        named = {name: t.clone() for name, t in LAYOUT.unflatten(delta).items()}
        updates.append(ClientUpdate(named, examples, curvature, None if ids is None else ids[m]))
        deltas.append(delta)
        curvatures.append(matrix)
    return Round(updates, deltas, curvatures)


def _random_curvature(
    rule: fipa.Rule, m: int, delta: Tensor, examples: int, rng: torch.Generator
) -> tuple[Sketch | DiagonalCurvature | InputCovariance | AdditiveStatistics | None, Tensor]:
    """What client m sends, and the same as a dense matrix."""
    p = LAYOUT.numel
    if isinstance(rule, WRAPPERS):
        return _random_curvature(rule.inner, m, delta, examples, rng)
    if isinstance(rule, FIPA | CompletedFIPA):
        sketch = Sketch(orthonormal(p, 2 + m, rng), 0.5 + torch.arange(2.0 + m, dtype=DOUBLE).flip(0), LAYOUT)
        return sketch, dense(sketch)
    if isinstance(rule, DiagonalFisher):
        values = torch.rand(p, generator=rng, dtype=DOUBLE)
        values[:2] = 0.0  # no client has curvature here
        return DiagonalCurvature(values, LAYOUT), values.diag()
    if isinstance(rule, FOOF):
        x = torch.cat([normal(5, 2, rng=rng), torch.ones(5, 1, dtype=DOUBLE)], dim=1)
        covariance = InputCovariance({"layer.weight": ("layer.bias", x.T @ x / 5)}, LAYOUT)
        return covariance, dense_covariance(covariance)
    if isinstance(rule, AdditiveFIPA):
        root = normal(p, p, rng=rng)
        H = root @ root.T / p + torch.eye(p, dtype=DOUBLE)
        return statistics(H, delta, examples, width=p), H
    return None, torch.eye(p, dtype=DOUBLE)


def statistics(
    H: Tensor, delta: Tensor, examples: int, *, width: int, seed: int = 5, layout: Layout = LAYOUT
) -> AdditiveStatistics:
    """What a client with curvature H sends to the additive rule."""
    omega = fipa.random_test_matrix(len(H), width, seed, DOUBLE)
    return AdditiveStatistics(H @ omega, H @ delta, delta, examples, seed, layout)


def tensors_in(thing: object) -> list[Tensor]:
    """All tensors inside nested dataclasses, mappings and sequences."""
    if isinstance(thing, Tensor):
        return [thing]
    if is_dataclass(thing):
        return [t for f in fields(thing) for t in tensors_in(getattr(thing, f.name))]
    if isinstance(thing, dict):
        thing = list(thing.values())
    return [t for item in thing for t in tensors_in(item)] if isinstance(thing, list | tuple) else []
