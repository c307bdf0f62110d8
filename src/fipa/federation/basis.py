r"""The basis Q (p x k) that the server and all clients share: how it grows, turns, and reaches those who were away.

All copies must agree to the last bit, on any processor. So every entry of Q is a multiple of $2^{-23}$, every entry of
a turn a multiple of $2^{-28}$: products of the two, and all sums of such products that can occur, fit the 53 bits of a
double, and a matrix product is exact in whatever order it is computed. Only then it is rounded, back to the grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fipa.errors import FipaError
from fipa.linalg import aligned, eigh

GRID, FINE = 2.0**23, 2.0**28  # steps of 1 in the entries of Q, and of a turn
NEWS = 1e-3  # share of a direction's length that must lie outside of the basis to widen it
ROOM = 0.25  # share of the columns that makes place for new ones when the basis is full


@dataclass(frozen=True, eq=False)
class Move:
    """One change of a basis: columns (p x n) to add, or a turn R (k x k') to multiply from the right.

    `mark` is the checksum of the basis that it is for.
    """

    tensor: Tensor
    turns: bool = False
    mark: str = ""

    def __call__(self, columns: Tensor) -> Tensor:
        """The basis after it, the same bits on every machine."""
        if not self.turns:
            return aligned(torch.cat([columns, self.tensor], dim=1))
        return _on_grid(columns.double() @ self.tensor, GRID).float()

    @property
    def nbytes(self) -> int:
        """As it travels: turns in double precision."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, eq=False)
class Basis:
    r"""Orthonormal columns, to $10^{-6}$.

    Attributes
    ----------
    columns
        Q (p x k), in float32.
    version
        How many moves led here; a client that knows an earlier version needs the moves since.
    moves
        The last ones. Those who know none of the versions that they lead from are sent all columns.
    """

    columns: Tensor
    version: int = 0
    moves: tuple[Move, ...] = ()

    @classmethod
    def empty(cls, parameters: int) -> Basis:
        """Without columns."""
        return cls(torch.zeros(parameters, 0))

    def __len__(self) -> int:
        return self.columns.shape[1]

    @cached_property
    def mark(self) -> str:
        """A checksum of all columns, the same on every machine."""
        return mark_of(self.columns)

    def moved(self, move: Move) -> Basis:
        """After one more move. Moves that are together larger than the basis itself are forgotten."""
        columns, moves, size = move(self.columns), [*self.moves, replace(move, mark=self.mark)], 0
        whole = columns.numel() * columns.element_size()
        kept = 0
        for one in reversed(moves):
            size += one.nbytes
            if size > whole:
                break
            kept += 1
        return Basis(columns, self.version + 1, tuple(moves[len(moves) - kept :]))

    def news(self, version: int | None) -> tuple[Move, ...]:
        """What brings a copy of that version up to date: the moves since, or all columns for one that is empty."""
        behind = len(self.moves) + 1 if version is None else self.version - version
        if not 0 <= behind <= len(self.moves):
            return (Move(self.columns, mark=mark_of(self.columns[:, :0])),)
        return self.moves[len(self.moves) - behind :]

    def widened(self, directions: Sequence[Tensor], generator: torch.Generator, most: int | None = None) -> Basis:
        """With the span of more directions (p each) in it, or with the `most` leading ones of what they add.

        New columns are mixed by a random rotation: none of them is one client's direction.
        """
        found = new_columns(self.columns, directions, most)
        if found.shape[1] == 0:
            return self
        noise = torch.randn(found.shape[1], found.shape[1], generator=generator, dtype=torch.float64)
        rotation, triangle = torch.linalg.qr(noise)
        rotation = rotation * triangle.diagonal().sign()  # all rotations alike
        return self.moved(Move(aligned(_on_grid(found @ rotation, GRID).float())))

    def turn(self, curvature: Tensor, keep: int) -> Move:
        r"""To the `keep` leading eigenvectors of a curvature $Q^\top H Q$ (k x k), orthonormal again on the way."""
        values, vectors = torch.linalg.eigh(_symmetric(self.gram()))
        root = (vectors / values.sqrt()) @ vectors.T
        _, vectors = eigh(_symmetric(root @ aligned(curvature).double() @ root))
        return Move(aligned(_on_grid(root @ vectors.flip(1)[:, :keep], FINE)), turns=True)

    def gram(self) -> Tensor:
        r"""$Q^\top Q$ in double precision."""
        wide = aligned(self.columns).double()
        return wide.T @ wide

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        kinds = torch.tensor([move.turns for move in self.moves], dtype=torch.bool)
        marks = [list(bytes.fromhex(move.mark)) for move in self.moves]
        named = {f"move.{i}": move.tensor for i, move in enumerate(self.moves)}
        named["marks"] = torch.tensor(marks, dtype=torch.uint8)
        return {"columns": self.columns, "version": torch.tensor(self.version), "kinds": kinds, **named}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Basis:
        """What `tensors` gave."""
        pairs = enumerate(zip(tensors["kinds"].tolist(), tensors["marks"].tolist(), strict=True))
        moves = tuple(Move(tensors[f"move.{i}"], kind, bytes(mark).hex()) for i, (kind, mark) in pairs)
        return cls(tensors["columns"], int(tensors["version"]), moves)


def new_columns(columns: Tensor, directions: Sequence[Tensor], most: int | None = None) -> Tensor:
    """Orthonormal columns (p x n, double precision) for what directions add to the span of the others."""
    wide = aligned(columns).double()
    given = torch.stack([direction.double() for direction in directions], dim=1)
    lengths = torch.linalg.vector_norm(given, dim=0)
    given = given[:, lengths > 0] / lengths[lengths > 0]
    for _ in range(2):  # once more for what rounding left
        given = given - wide @ (wide.T @ given)
    given = given[:, torch.linalg.vector_norm(given, dim=0) > NEWS]
    if given.shape[1] == 0:
        return given
    left, values, _ = torch.linalg.svd(given, full_matrices=False)
    new = left[:, values > NEWS][:, :most]
    new = new - wide @ (wide.T @ new)
    return torch.linalg.qr(new)[0]


def _on_grid(matrix: Tensor, steps: float) -> Tensor:
    return (matrix * steps).round() / steps + 0.0  # no negative zero: checksums are of bytes


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def mark_of(columns: Tensor) -> str:
    """A checksum of a basis, the same on every machine."""
    words = columns.contiguous().numpy().astype("<f4", copy=False)
    return hashlib.blake2b(words.tobytes(), digest_size=16).hexdigest()


def follow(columns: Tensor, moves: Sequence[Move]) -> Tensor:
    """A client's copy after some moves."""
    for move in moves:
        if len(move.tensor) != (columns.shape[1] if move.turns else len(columns)):
            raise FipaError("a move of the shared basis does not fit this copy of it: ask for all columns")
        columns = move(columns)
    return columns
