r"""What the server remembers of every client: the last quadratic that it told of its loss.

Client m was last seen at $\theta_m$, with loss $f_m$, gradient $g_m$ and curvature $S_m = Q^\top H_m Q$. Since then the
model has moved by $Q z_m$. So its gradient now is about $g_m + Q S_m z_m$, and its loss
$f_m + g_m^\top Q z_m + \frac12 z_m^\top S_m z_m$. Of a client that trains, the update that leads to its minimum is now
$\Delta\theta_m - Q z_m$, and $Q^\top H_m$ times that $h_m - S_m z_m$. A client that answered just now, one that answers
late and one that was not asked for weeks differ in nothing but their age.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.basis import Basis
from fipa.linalg import aligned
from fipa.parallel import inside, spanned

UNTOLD = -1  # the round of a client whose curvature nobody knows
COLUMNS = ("ids", "examples", "visits", "rounds", "losses", "moments", "moves", "known")  # a row for each client
SINGLE = ("updates", "matrices")  # a tensor for each
AT_ONCE = 16  # clients whose losses are predicted together
OTHERS = -1  # the id of clients that are remembered as one
HEARSAY = 0.1  # weight of a client that is known from a warm-up only, beside those that have told their gradient


@dataclass(frozen=True, eq=False)
class News:
    """What a client tells.

    Attributes
    ----------
    client, examples, round_number
        Who, with which weight, and when it was asked.
    update, loss
        From and at the model that it was asked about; None if it did not tell its loss.
    matrix, moment
        Its curvature there; without a matrix the one that it told before holds, or none.
    moves
        Where the model has moved since, in the basis; None if it has not.
    """

    client: int
    examples: int
    round_number: int
    update: Tensor
    loss: float | None = None
    matrix: Tensor | None = None
    moment: Tensor | None = None
    moves: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Quadratics:
    r"""What the server remembers of M clients: a row each, in the order of their ids.

    Attributes
    ----------
    ids, examples, visits, rounds
        Who they are, their weights, the round of their last answer, and the round in which each told its curvature,
        or `UNTOLD`.
    losses, updates
        When they were last seen (M, and p each): $-g_m$, or $\Delta\theta_m$ of clients that train. A loss that nobody
        told is NaN. Updates are most of the memory, so each has a tensor of its own: those that stay are not copied.
    matrices
        $S_m$ (s x s each), for the s leading columns, which were all when the client told it; else it is zero.
    moments, moves
        $h_m = Q^\top H_m \Delta\theta_m$ of clients that train, else 0, and $z_m$ (M x k each).
    known
        How much of each column was there when the client told its curvature (M x k), from 0 to 1.
    merged
        The ids and examples (n x 2) of those who are remembered as one, in the row of `OTHERS`.
    kept
        Nothing, in the dtype of updates and matrices.
    """

    ids: Tensor
    examples: Tensor
    visits: Tensor
    rounds: Tensor
    losses: Tensor
    updates: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    moments: Tensor
    moves: Tensor
    known: Tensor
    merged: Tensor
    kept: Tensor

    @classmethod
    def none(cls, like: Tensor, kept: torch.dtype | None = None) -> Quadratics:
        """An empty memory for parameters (p) like these; `kept` is the dtype of updates and matrices."""
        whole, table = torch.zeros(0, dtype=torch.int64), like.new_zeros(0, 0)
        nothing = like.new_zeros(0, dtype=kept or like.dtype)
        return cls(
            whole, whole, whole, whole, like.new_zeros(0), (), (), table, table, table, whole.reshape(0, 2), nothing
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> int:
        """Columns of the basis."""
        return self.moves.shape[1]

    def place(self, client: int) -> int | None:
        """The row of a client, if it is known."""
        found = (self.ids == client).nonzero()
        return int(found[0, 0]) if len(found) else None

    def told(self, *news: News) -> Quadratics:
        """With clients' news in the place of what they told before."""
        places = {client: place for place, client in enumerate(self.ids.tolist())}
        fresh = {one.client: self._row(one) for one in news if not self._knows_better(one)}
        ids = sorted({*places, *fresh})

        source = torch.tensor([places.get(client, 0) for client in ids], dtype=torch.int64)

        def joined(name: str) -> Tensor:
            before: Tensor = getattr(self, name)
            after = before[source] if len(before) else before.new_empty(len(ids), *before.shape[1:])
            for row, client in enumerate(ids):
                if client in fresh:
                    after[row] = fresh[client][name]
            return after

        single: dict[str, Any] = {
            name: tuple(fresh[i][name] if i in fresh else getattr(self, name)[places[i]] for i in ids)
            for name in SINGLE
        }
        columns: dict[str, Any] = {name: joined(name) for name in COLUMNS if name != "ids"}
        after = replace(self, ids=torch.tensor(ids, dtype=torch.int64), **single, **columns)
        return after._recalled([client for client in self.merged[:, 0].tolist() if client in fresh])

    def _knows_better(self, one: News) -> bool:
        """Whether a client's later visit is known already."""
        place = self.place(one.client)
        return place is not None and int(self.visits[place]) > one.round_number

    def _row(self, one: News) -> dict[str, Tensor]:
        size, place, like = self.size, self.place(one.client), self.moves
        matrix, known, told = one.matrix, like.new_ones(size), one.round_number
        if matrix is None and place is not None:  # as it told before
            matrix, known, told = self.matrices[place], self.known[place], int(self.rounds[place])
        elif matrix is None:
            matrix, known, told = self.kept.reshape(0, 0), like.new_zeros(size), UNTOLD
        return {
            "examples": torch.tensor(one.examples), "visits": torch.tensor(one.round_number),
            "rounds": torch.tensor(told), "losses": like.new_tensor(math.nan if one.loss is None else one.loss),
            "updates": self._own(one.update), "matrices": self._own(matrix),
            "moments": like.new_zeros(size) if one.moment is None else one.moment,
            "moves": like.new_zeros(size) if one.moves is None else one.moves, "known": known,
        }  # fmt: skip

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy to keep: products with it must not depend on how it came."""
        return tensor.to(self.kept.dtype, copy=True, memory_format=torch.contiguous_format)

    def _recalled(self, clients: Sequence[int]) -> Quadratics:
        """After some of those who were merged have come back: what is left counts for the others."""
        place = self.place(OTHERS)
        if not clients or place is None:
            return self
        back = torch.isin(self.merged[:, 0], torch.tensor(list(clients)))
        examples = self.examples.clone()
        examples[place] -= self.merged[back, 1].sum()  # as they were when they were merged
        after = replace(self, examples=examples, merged=self.merged[~back])
        return after if len(after.merged) else after.without([OTHERS])

    def within(
        self, limit: int | None, basis: Basis, now: int, discount: float = 1.0, trained: bool = False
    ) -> Quadratics:
        """At most so many rows: those seen longest ago become one, at the present model."""
        if limit is None or len(self) <= limit:
            return self
        rows = sorted(
            range(len(self)), key=lambda i: (int(self.ids[i]) != OTHERS, int(self.visits[i]), int(self.ids[i]))
        )
        old = sorted(rows[: len(self) - limit + 1])
        part = self._at(torch.tensor(old))
        weights, examples = part.weights(now, discount), part._counted()
        update, moment = part.pull(basis, weights, trained)
        w, none = weights.to(part.moves), torch.zeros_like(part.moves[0])
        one = {
            "ids": torch.tensor(OTHERS), "examples": examples.sum(), "rounds": part.rounds.max(),
            "visits": (weights @ part.visits.double()).round().long(), "losses": (w * part.predicted(basis)).sum(),
            "moments": moment if trained else none, "moves": none, "known": w @ part.known,
        }  # fmt: skip
        alone = {"updates": update, "matrices": part._mean_matrix(w)}
        gone = set(old)
        stay = self._at(torch.tensor([i for i in range(len(self)) if i not in gone], dtype=torch.int64))
        leave = [[i, n] for i, n in zip(part.ids.tolist(), examples.tolist(), strict=True) if i != OTHERS]
        joined: dict[str, Any] = {
            name: torch.cat([row[None].to(getattr(self, name)), getattr(stay, name)]) for name, row in one.items()
        }
        merged = torch.tensor(sorted([*self.merged.tolist(), *leave]), dtype=torch.int64).reshape(-1, 2)
        single: dict[str, Any] = {name: (self._own(first), *getattr(stay, name)) for name, first in alone.items()}
        return replace(self, **joined, **single, merged=merged)

    @property
    def _hearsay(self) -> Tensor:
        """Who is known from a warm-up only."""
        return (self.rounds == UNTOLD) & self.losses.isnan()

    def _counted(self) -> Tensor:
        """How many examples each counts for once they are one, which is no hearsay if any of them has told more."""
        fewer = (HEARSAY * self.examples).round().clamp(min=1).to(self.examples)
        return self.examples if bool(self._hearsay.all()) else torch.where(self._hearsay, fewer, self.examples)

    def _at(self, places: Tensor) -> Quadratics:
        """Some of the rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[places] for name in COLUMNS}
        single: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in places.tolist()) for name in SINGLE}
        return replace(self, **columns, **single)

    def without(self, clients: Sequence[int]) -> Quadratics:
        """Without clients that have left for good."""
        stay = ~torch.isin(self.ids, torch.tensor(list(clients), dtype=self.ids.dtype))
        after = self._at(stay.nonzero()[:, 0])
        return after if after.place(OTHERS) is not None else replace(after, merged=self.merged[:0])

    def since(self, round_number: int) -> Quadratics:
        """Without those whose last visit was before a round."""
        return self.without(self.ids[self.visits < round_number].tolist())

    def widened(self, size: int) -> Quadratics:
        """In a basis with more columns, of which these clients have told nothing."""
        extra = size - self.size
        pad = torch.nn.functional.pad
        wider: dict[str, Any] = {name: pad(getattr(self, name), (0, extra)) for name in ("moments", "moves", "known")}
        return replace(self, **wider)

    def turned(self, turn: Tensor, gram: Tensor) -> Quadratics:
        r"""In the basis $Q R$, where $Q^\top Q$ was `gram`."""
        R = turn.to(self.moves)

        def seen(S: Tensor) -> Tensor:
            rows = R[: len(S)]
            return (rows.T @ S.to(R) @ rows).to(S.dtype)

        matrices = (seen(S) if len(S) else S for S in self.matrices)
        return replace(
            self, matrices=tuple(matrices), moments=self.moments @ R, moves=self.moves @ (gram.to(R) @ R),
            known=(self.known @ R.square()).clamp(0, 1),
        )  # fmt: skip

    def moved(self, step: Tensor) -> Quadratics:
        r"""After the model has moved by Q times `step` (k)."""
        return replace(self, moves=self.moves + step.to(self.moves))

    def weights(self, now: int, discount: float = 1.0) -> Tensor:
        """Shares that add up to 1: examples, times `discount` to the power of the rounds since a client's visit.

        The update of a warm-up is far shorter than a gradient: a client that is known by that alone counts for less.
        """
        raw = self.examples.double() * discount ** (now - self.visits).double()
        raw = torch.where(self._hearsay, HEARSAY * raw, raw)
        return raw / raw.sum()

    def pull(self, basis: Basis, weights: Tensor, trained: bool) -> tuple[Tensor, Tensor]:
        r"""Where all clients together pull the present model: an update (p), and its moment (k).

        Of clients that send gradients the moment is empty, and the update their mean gradient's opposite.
        """
        w = weights.to(self.moves)
        bent = self.moves.new_zeros(self.size)
        for share, own in zip(w, self._bent(), strict=True):
            bent[: len(own)].add_(share * own)
        update, columns = self.mean_update(weights), basis.columns.to(bent)
        if not trained:
            return update - spanned(columns, bent), bent.new_zeros(0)
        return update - spanned(columns, w @ self.moves), w @ self.moments - bent

    def mean_update(self, weights: Tensor) -> Tensor:
        """The weighted mean (p) of the updates as they were told."""
        return _mean(weights.to(self.moves), self.updates)

    def curvature(self, weights: Tensor) -> Tensor:
        r"""The mean curvature (k x k, double precision).

        Columns that only some clients know would look flat: $D^{-1/2} (\sum_m w_m S_m) D^{-1/2}$ with the share of the
        clients that know a column on the diagonal of D takes the mean, on the diagonal, of those who know. A column
        that nobody knows is as steep as the steepest.
        """
        w = weights.to(self.moves)
        total = self._mean_matrix(w).double()
        share = (w @ self.known).double()
        scale = torch.where(share > 0, share.clamp(min=1e-12).rsqrt(), 0.0)
        found = scale[:, None] * total * scale[None, :]
        return found + torch.diag(torch.where(share > 0, 0.0, found.diagonal().max() if self.size else 0.0))

    def _mean_matrix(self, weights: Tensor) -> Tensor:
        """The weighted sum of the clients' curvatures (k x k)."""
        total = self.moves.new_zeros(self.size, self.size)
        for weight, S in zip(weights.tolist(), self.matrices, strict=True):
            total[: len(S), : len(S)].add_(S.to(total), alpha=weight)
        return total

    def _bent(self) -> Iterator[Tensor]:
        """By how much each client's gradient has changed since it was asked, in the columns that it told of."""
        for S, move in zip(self.matrices, self.moves, strict=True):
            yield S.to(move) @ move[: len(S)]

    def only(self, clients: Iterable[int]) -> Quadratics:
        """The rows of these clients, as far as they are known."""
        return self._at(torch.isin(self.ids, torch.tensor(list(clients), dtype=torch.int64)).nonzero()[:, 0])

    def predicted(self, basis: Basis) -> Tensor:
        """Each client's loss at the present model, as its quadratic has it (M); NaN where it never told one."""
        columns, found, bent = basis.columns.to(self.moves), [], torch.zeros_like(self.moves)
        for row, own in zip(bent, self._bent(), strict=True):
            row[: len(own)] = own
        for start in range(0, len(self), AT_ONCE):  # of what is in low precision, only these are copied
            rows = slice(start, start + AT_ONCE)
            moves, updates = self.moves[rows], torch.stack(self.updates[rows])
            found.append(self.losses[rows] + ((bent[rows] / 2 - inside(columns, updates.to(moves))) * moves).sum(1))
        return torch.cat(found) if found else self.losses

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        single = {
            f"{name}.{i}": t for name in SINGLE for i, t in zip(self.ids.tolist(), getattr(self, name), strict=True)
        }
        return {name: getattr(self, name) for name in (*COLUMNS, "merged", "kept")} | single

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Quadratics:
        """What `tensors` gave."""
        places = {name: [f"{name}.{i}" for i in tensors["ids"].tolist()] for name in SINGLE}
        whole = (*COLUMNS, "merged", "kept")
        if not {*whole, *chain(*places.values())} <= set(tensors):
            raise FipaError("what is remembered of clients was written by another version of fipa: begin the run anew")
        single: dict[str, Any] = {name: tuple(aligned(tensors[key]) for key in keys) for name, keys in places.items()}
        columns: dict[str, Any] = {name: aligned(tensors[name]) for name in whole}
        return cls(**columns, **single)


def _mean(weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """A weighted sum of rows, one after the other: of rows in low precision no copy is made."""
    total = torch.zeros(rows[0].shape, dtype=weights.dtype, device=weights.device)
    for weight, row in zip(weights.tolist(), rows, strict=True):
        total.add_(row.to(total), alpha=weight)
    return total
