r"""The basis Q (p x k) that the server and all clients share: how it grows, turns, and reaches those who were away.

All copies must agree to the last bit, on any processor. So every entry of Q is a multiple of $2^{-23}$, and what it is
multiplied by is on a grid as well: products of the two, and all sums of such products that can occur, fit the 53 bits
of a double, and a matrix product is exact in whatever order it is computed. Only then it is rounded, back to the grid.

New columns travel in 4 bits per entry, or in 2. They need not be exact, only the same for all: every party takes the
codes, subtracts what lies in the span of Q, and makes them orthonormal by a small matrix that travels with them.

When columns are dropped, what is left spans the leading eigenvectors of the curvature: $Q R$ with $R = B (B^\top G
B)^{-1/2}$, $G = Q^\top Q$, and in B each column that stays, plus a combination of those that go. Only these
combinations travel, in 8 bits per entry; the root is found by every party, in steps that are exact on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation import fewbits
from fipa.federation.exact import FINE, gram_of, joined, mark_of, on_grid, outside, powers, turned
from fipa.linalg import aligned, eigh
from fipa.parallel import inside, spanned

ROOT, SMALL = 2.0**26, 2.0**25  # steps of 1 in a root, and in small matrices, whose products are exact
FINEST = 12  # of the binary exponents of shares
CLOSE, MOST = 1e-4, 60  # to orthonormal, for one more step of Newton to be the last; and most of them
NEWS = 1e-3  # share of a direction's length that must lie outside of the basis to widen it
LEFT = 0.1  # share of a coded column's squared length that must be its own
ROOM = 0.25  # share of the columns that makes place for new ones when the basis is full


@dataclass(frozen=True, eq=False)
class Move:
    """One change of a basis, as it travels; what it is shows in the type of its tensor.

    Attributes
    ----------
    tensor
        Columns to add as they are (float32, p x n), columns to add in few bits per entry (uint8, two or four entries of
        a column in each, p/2 x n or p/4 x n), or how much of each column that goes the others take over (int8, d x k').
    root
        Of columns in few bits: what makes them orthonormal (int32, n x n', in steps of $2^{-26}$). Of columns that go:
        their places in order, and minus the binary exponents of their shares (int32, d x 2).
    mark
        The checksum of the basis that it is for.
    """

    tensor: Tensor
    root: Tensor | None = None
    mark: str = ""

    def __call__(self, columns: Tensor) -> Tensor:
        """The basis after it, the same bits on every machine."""
        if self.turns:
            return turned(columns, self.turn(gram_of(columns)))
        if self.root is None:
            return aligned(torch.cat([columns, self.tensor], dim=1))
        return self.added(columns, outside(columns, fewbits.entries(self.tensor, len(columns))))

    def added(self, columns: Tensor, loose: Tensor) -> Tensor:
        """The basis after it, if columns in few bits per entry have that `outside` of it."""
        assert self.root is not None
        return joined(columns, loose, aligned(self.root).double() / ROOT)

    @property
    def turns(self) -> bool:
        """Whether it drops columns, and turns those that stay."""
        return self.tensor.dtype == torch.int8

    def turn(self, gram: Tensor) -> Tensor:
        r"""R (k x k', double precision), which the basis is multiplied by; the same bits on every machine.

        `gram` is the basis' $Q^\top Q$.
        """
        assert self.root is not None
        places, exponents = aligned(self.root).unbind(1)
        stay = torch.ones(len(gram), dtype=torch.bool)
        stay[places.long()] = False
        together = torch.zeros(len(gram), self.tensor.shape[1], dtype=torch.float64)
        together[stay] = torch.eye(self.tensor.shape[1], dtype=torch.float64)
        together[~stay] = aligned(self.tensor).double() * powers(-exponents)[:, None]
        return _orthonormal(together, on_grid(gram, SMALL))

    def fits(self, columns: Tensor) -> bool:
        """Whether a basis of that shape can make it."""
        if self.root is None:
            return not self.turns and len(self.tensor) == len(columns)
        if self.turns:
            places, size = self.root[:, 0], columns.shape[1]
            rising = bool((places.diff() > 0).all()) and bool((places >= 0).all()) and bool((places < size).all())
            return rising and len(self.root) == len(self.tensor) and sum(self.tensor.shape) == size
        return len(self.tensor) in fewbits.lengths(len(columns)) and len(self.root) == self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """As it travels."""
        return sum(t.numel() * t.element_size() for t in (self.tensor, self.root) if t is not None)


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
        return cls(torch.zeros(parameters, 0, dtype=torch.float32))

    def __len__(self) -> int:
        return self.columns.shape[1]

    @cached_property
    def mark(self) -> str:
        """A checksum of all columns, the same on every machine."""
        return mark_of(self.columns)

    def moved(self, move: Move, columns: Tensor | None = None) -> Basis:
        """After one more move, to these columns if they are known already.

        Moves that are together larger than the basis itself are forgotten.
        """
        columns = move(self.columns) if columns is None else columns
        moves, size = [*self.moves, replace(move, mark=self.mark)], 0
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
        behind = self.version - (version or 0)
        if not 0 <= behind <= len(self.moves):
            return (Move(self.columns, mark=mark_of(self.columns[:, :0])),)
        return self.moves[len(self.moves) - behind :]

    def widened(
        self,
        directions: Sequence[Tensor],
        generator: torch.Generator,
        most: int | None = None,
        share: float = 1.0,
        bits: int = 4,
    ) -> Basis:
        """With the span of more directions (p each) in it, nearly.

        Of what they add, the `most` leading ones at most, and no more than hold a `share` of its squared length, in 4
        or 2 bits per entry. New columns are mixed by a random rotation: none of them is one client's direction.
        """
        found = new_columns(self.columns, directions, most, share)
        if found.shape[1] == 0:
            return self
        noise = torch.randn(found.shape[1], found.shape[1], generator=generator, dtype=torch.float64)
        rotation, triangle = torch.linalg.qr(noise)
        found = found @ (rotation * triangle.diagonal().sign()).to(found)  # all rotations alike
        packed = fewbits.pack(found, bits)
        loose = outside(self.columns, fewbits.entries(packed, len(found)))
        values, vectors = torch.linalg.eigh(_symmetric(loose.T @ loose))
        kept = values > LEFT
        if not bool(kept.any()):
            return self
        root = vectors[:, kept] / values[kept].sqrt()
        move = Move(packed, (root * ROOT).round().int())
        return self.moved(move, move.added(self.columns, loose))

    def turn(self, curvature: Tensor, keep: int) -> Move:
        r"""To the span of the `keep` leading eigenvectors of a curvature $Q^\top H Q$ (k x k), nearly.

        Of the others, V, those columns go that V is largest in. Then $B = (I; Y)$ is orthogonal to V if
        $V_{go}^\top Y = -V_{stay}^\top$.
        """
        _, vectors = eigh(_symmetric(aligned(curvature).double()))
        away = vectors[:, : len(self) - keep]
        go = _leading_rows(away)
        stay = [i for i in range(len(self)) if i not in go]
        shares = torch.linalg.solve(away[go].T, -away[stay].T)
        largest = shares.abs().amax(dim=1) if keep else shares.new_ones(len(go))
        exponents = (7 - torch.frexp(largest)[1]).clamp(0, FINEST)
        codes = (shares * powers(exponents)[:, None]).round().clamp(-127, 127)
        return Move(codes.to(torch.int8), torch.stack([torch.tensor(go, dtype=torch.int32), exponents], dim=1))

    def gram(self) -> Tensor:
        r"""$Q^\top Q$ in double precision."""
        return gram_of(self.columns)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        marks = [list(bytes.fromhex(move.mark)) for move in self.moves]
        named = {f"move.{i}": move.tensor for i, move in enumerate(self.moves)}
        named |= {f"root.{i}": move.root for i, move in enumerate(self.moves) if move.root is not None}
        named["marks"] = torch.tensor(marks, dtype=torch.uint8)
        return {"columns": self.columns, "version": torch.tensor(self.version), **named}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Basis:
        """What `tensors` gave."""
        marks = [bytes(mark).hex() for mark in tensors["marks"].tolist()]
        moves = tuple(Move(tensors[f"move.{i}"], tensors.get(f"root.{i}"), mark) for i, mark in enumerate(marks))
        return cls(tensors["columns"], int(tensors["version"]), moves)


def new_columns(columns: Tensor, directions: Sequence[Tensor], most: int | None = None, share: float = 1.0) -> Tensor:
    """Orthonormal columns (p x n) for what directions add to the span of the others, nearly.

    Before use they are rounded to few bits, and only then freed of the others to all digits.
    """
    columns = aligned(columns)
    given = torch.stack([direction.to(columns) for direction in directions])
    lengths = torch.linalg.vector_norm(given, dim=1)
    given = given[lengths > 0] / lengths[lengths > 0, None]
    given = given - spanned(columns, inside(columns, given))
    given = given[torch.linalg.vector_norm(given, dim=1) > NEWS].T
    if given.shape[1] == 0:
        return given
    squares, vectors = (found.flip(-1) for found in eigh(gram_of(given)))  # resolves far less than NEWS
    needed = int((squares.cumsum(0) / squares.sum() < share).sum()) + 1
    kept = slice(min(needed, int((squares > NEWS**2).sum()), len(squares) if most is None else most))
    return given @ (vectors[:, kept] * squares[kept].rsqrt()).to(given)


def _orthonormal(columns: Tensor, gram: Tensor) -> Tensor:
    r"""$B (B^\top G B)^{-1/2}$ by Newton and Schulz, the same bits on every machine; B and G are on the grid.

    All factors are on the grid of small matrices and below 4, so every product of two is exact.
    """
    if columns.shape[1] == 0:
        return columns
    size = columns.abs()
    bound = math.sqrt(float(size.sum(0).max()) * float(size.sum(1).max()))  # of the singular values
    found, one = columns * 0.5 ** math.frexp(bound)[1], torch.eye(columns.shape[1], dtype=torch.float64)
    for _ in range(MOST):
        squares = on_grid(found.T @ on_grid(gram @ found, SMALL), SMALL)
        better = found @ (1.5 * one - 0.5 * squares)
        if float((squares - one).abs().max()) < CLOSE:
            return on_grid(better, FINE)
        found = on_grid(better, SMALL)
    raise FipaError("columns of the shared basis that stay are not independent")


def _leading_rows(vectors: Tensor) -> list[int]:
    """As many rows of a matrix (k x d) as it has columns, as independent as can be; in order."""
    left, found = vectors.clone(), list[int]()
    for _ in range(vectors.shape[1]):
        lengths = torch.linalg.vector_norm(left, dim=1)
        lengths[found] = -1.0
        found.append(int(lengths.argmax()))
        unit = left[found[-1]] / left[found[-1]].norm()
        left = left - torch.outer(left @ unit, unit)
    return sorted(found)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def follow(columns: Tensor, moves: Sequence[Move]) -> Tensor:
    """A client's copy after some moves."""
    for move in moves:
        if not move.fits(columns):
            raise FipaError("a move of the shared basis does not fit this copy of it: ask for all columns")
        columns = move(columns)
    return columns
