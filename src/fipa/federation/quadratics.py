r"""What the server remembers of every client: the last quadratic that it told of its loss.

Client m was last seen at $\theta_m$, with loss $f_m$, gradient $g_m$ and curvature $S_m = Q^\top H_m Q$. Since then the
model has moved by $Q z_m$. So its gradient now is about $g_m + Q S_m z_m$, and its loss
$f_m + g_m^\top Q z_m + \frac12 z_m^\top S_m z_m$. Of a client that trains, the update that leads to its minimum is now
$\Delta\theta_m - Q z_m$, and $Q^\top H_m$ times that $h_m - S_m z_m$. A client that answered just now, one that answers
late and one that was not asked for weeks differ in nothing but their age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fipa.federation.basis import Basis

UNTOLD = -1  # the round of a client whose curvature nobody knows


@dataclass(frozen=True, eq=False)
class Quadratics:
    r"""Of M clients, in the order of their ids; a row each.

    Attributes
    ----------
    ids, examples, rounds
        Who they are, their weights, and the round in which each told its curvature, or `UNTOLD`.
    losses, updates
        When they were last seen (M, M x p): $-g_m$, or $\Delta\theta_m$ of clients that train. A loss that nobody told
        is NaN.
    matrices, moments, moves
        $S_m$ (M x k x k), $h_m = Q^\top H_m \Delta\theta_m$ of clients that train, else 0, and $z_m$ (M x k each).
    known
        How much of each column was there when the client told its curvature (M x k), from 0 to 1.
    """

    ids: Tensor
    examples: Tensor
    rounds: Tensor
    losses: Tensor
    updates: Tensor
    matrices: Tensor
    moments: Tensor
    moves: Tensor
    known: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Quadratics:
        """Of no client, for parameters (p) like these."""
        whole = torch.zeros(0, dtype=torch.int64)
        empty = like.new_zeros
        table = empty(0, 0)
        return cls(whole, whole, whole, empty(0), empty(0, len(like)), empty(0, 0, 0), table, table, table)

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, client: int) -> int | None:
        """The row of a client, if it is known."""
        found = (self.ids == client).nonzero()
        return int(found[0, 0]) if len(found) else None

    def told(
        self,
        client: int,
        examples: int,
        round_number: int,
        loss: float | None,
        update: Tensor,
        matrix: Tensor | None,
        moment: Tensor | None = None,
    ) -> Quadratics:
        """With a client's news in the place of what it told before; without a matrix, with the one it told before.

        The update is from the present model. A client's first row without a matrix has no curvature at all.
        """
        size, place = self.matrices.shape[1], self.place(client)
        like = self.updates
        if matrix is None and place is not None:
            matrix, known, told = self.matrices[place], self.known[place], int(self.rounds[place])
        elif matrix is None:
            matrix, known, told = like.new_zeros(size, size), like.new_zeros(size), UNTOLD
        else:
            known, told = like.new_ones(size), round_number
        row = {
            "ids": torch.tensor(client), "examples": torch.tensor(examples), "rounds": torch.tensor(told),
            "losses": like.new_tensor(float("nan") if loss is None else loss), "updates": update,
            "matrices": matrix, "moments": like.new_zeros(size) if moment is None else moment,
            "moves": like.new_zeros(size), "known": known,
        }  # fmt: skip
        before = int((self.ids < client).sum())
        after = before + (place is not None)

        def with_row(name: str) -> Tensor:
            rows: Tensor = getattr(self, name)
            return torch.cat([rows[:before], row[name][None].to(rows), rows[after:]])

        return Quadratics(**{f.name: with_row(f.name) for f in fields(self)})

    def without(self, clients: Sequence[int]) -> Quadratics:
        """Without clients that have left for good."""
        stay = ~torch.isin(self.ids, torch.tensor(list(clients), dtype=self.ids.dtype))
        return Quadratics(**{f.name: getattr(self, f.name)[stay] for f in fields(self)})

    def widened(self, size: int) -> Quadratics:
        """In a basis with more columns, of which these clients have told nothing."""
        extra = size - self.matrices.shape[1]
        pad = torch.nn.functional.pad
        return replace(
            self, matrices=pad(self.matrices, (0, extra, 0, extra)), moments=pad(self.moments, (0, extra)),
            moves=pad(self.moves, (0, extra)), known=pad(self.known, (0, extra)),
        )  # fmt: skip

    def turned(self, turn: Tensor, gram: Tensor) -> Quadratics:
        r"""In the basis $Q R$, where $Q^\top Q$ was `gram`."""
        R = turn.to(self.matrices)
        return replace(
            self, matrices=R.T @ self.matrices @ R, moments=self.moments @ R, moves=self.moves @ (gram.to(R) @ R),
            known=(self.known @ R.square()).clamp(0, 1),
        )  # fmt: skip

    def moved(self, step: Tensor) -> Quadratics:
        r"""After the model has moved by Q times `step` (k)."""
        return replace(self, moves=self.moves + step.to(self.moves))

    def weights(self, now: int, discount: float = 1.0) -> Tensor:
        """Shares that add up to 1: examples, times `discount` to the power of a client's age in rounds."""
        age = torch.where(self.rounds == UNTOLD, 0, now - self.rounds)
        raw = self.examples.double() * discount ** age.double()
        return raw / raw.sum()

    def pull(self, basis: Basis, weights: Tensor, trained: bool) -> tuple[Tensor, Tensor]:
        r"""Where all clients together pull the present model: an update (p), and its moment (k).

        Of clients that send gradients the moment is empty, and the update their mean gradient's opposite.
        """
        w = weights.to(self.updates)
        bent = torch.einsum("m,mkl,ml->k", w, self.matrices, self.moves)
        if not trained:
            return w @ self.updates - basis.columns.to(bent) @ bent, bent.new_zeros(0)
        return w @ self.updates - basis.columns.to(bent) @ (w @ self.moves), w @ self.moments - bent

    def curvature(self, weights: Tensor) -> Tensor:
        r"""The mean curvature (k x k, double precision).

        Columns that only some clients know would look flat: $D^{-1/2} (\sum_m w_m S_m) D^{-1/2}$ with the share of the
        clients that know a column on the diagonal of D takes the mean, on the diagonal, of those who know.
        """
        w = weights.to(self.matrices)
        total = torch.einsum("m,mkl->kl", w, self.matrices).double()
        share = (w @ self.known).double()
        scale = torch.where(share > 0, share.clamp(min=1e-12).rsqrt(), 0.0)
        return scale[:, None] * total * scale[None, :]

    def predicted(self, basis: Basis) -> Tensor:
        """Each client's loss at the present model, as its quadratic has it (M); NaN where it never told one."""
        inside = self.updates @ basis.columns.to(self.updates)
        bend = torch.einsum("mk,mkl,ml->m", self.moves, self.matrices, self.moves)
        return self.losses - (inside * self.moves).sum(dim=1) + bend / 2

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Quadratics:
        """What `tensors` gave."""
        return cls(**{f.name: tensors[f.name] for f in fields(cls)})
