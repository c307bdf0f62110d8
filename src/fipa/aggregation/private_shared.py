r"""FIPA in a shared basis with client-level differential privacy.

A client releases its gradient (p numbers) and its matrix in the basis (k (k + 1) / 2 numbers), each clipped to a norm
of its own and under noise: see `fipa.aggregation.private` for what that promises. The basis is made of what earlier
rounds released, so all that clients are sent is as private as the models are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.private import DOUBLE, Normal, check_alike, check_positive, next_round, noisy_mean
from fipa.aggregation.rule import Step, aggregator, check_not_negative
from fipa.aggregation.shared import ClientMemory, SharedFIPA
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.basis import BasisCurvature, pack, unpack
from fipa.errors import FipaError, UpdateError
from fipa.linalg import eigh

RELEASES = ClientMemory(discount=0.8)


@dataclass(frozen=True)
class PrivateSharedFIPA(SharedFIPA):
    r"""`SharedFIPA` from noisy means of the clients' gradients and of their matrices in the basis.

    Gradients are clipped to $C_1$ and matrices, in the Frobenius norm, to $C_2$. Part i gets noise of standard
    deviation $z_i C_i$ with $z_i = z / \sqrt{s_i}$, where the `split` $s_i$ sums to 1: one Gaussian mechanism with
    multiplier z, as private as `PrivateFedAvg` with the same `noise`. Of a symmetric matrix the diagonal and $\sqrt 2$
    times the half below it are released, a vector that is as long as the matrix.

    Eigenvalues of the noisy matrix that noise alone would explain count as zero: there the step is that of gradient
    descent, $-g / \beta$, so `damping` must be positive. In the rounds of a federation, each round's release is
    remembered as a quadratic, whose weight is multiplied by `memory.discount` in each round after it. That averages
    noise out and costs no privacy.

    Parameters
    ----------
    clip, clip_matrix
        $C_1$ of the gradient, and $C_2$ of the matrix.
    noise, seed
        As for `PrivateFedAvg`.
    split
        Shares of the budget for gradients and matrices; (1, 0) releases no matrix, and is gradient descent.
    damping, radius, columns, weight_decay
        As for `SharedFIPA`. Each round adds one column to the basis: the mean gradient that it released.
    memory
        Of releases, not of clients: `discount` only.
    """

    damping: float = 1.0
    clip: float = 1.0
    clip_matrix: float = 1.0
    noise: float = 1.0
    split: tuple[float, float] = (0.8, 0.2)
    seed: int | None = None
    memory: ClientMemory = RELEASES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, noise=self.noise)
        check_positive(self, clip=self.clip, clip_matrix=self.clip_matrix, damping=self.damping)
        if len(self.split) != 2 or not (0 < self.split[0] < math.inf and 0 <= self.split[1] < math.inf):
            raise FipaError(
                f"PrivateSharedFIPA(split={self.split}): needs two shares of the budget, the first positive"
            )
        if self.parts or self.directions is not None or self.bits == 8:
            raise FipaError(
                "PrivateSharedFIPA: parts, directions and bits=8 are for clients that the server may look at"
            )
        if self.memory != ClientMemory(discount=self.memory.discount):
            raise FipaError("PrivateSharedFIPA remembers releases, not clients: set no memory but its discount")

    @property
    def multipliers(self) -> tuple[float, float]:
        """Noise multipliers $z_i$ of gradients and matrices; infinite for what is not released."""
        total = sum(self.split)
        first, second = (self.noise / math.sqrt(s / total) if s else math.inf for s in self.split)
        return first, second

    def settled(self, dtype: torch.dtype, clients: int | None) -> PrivateSharedFIPA:
        """Gradients and matrices with all of their digits: nobody but the server sees them."""
        return replace(self, parts=0, bits=32)

    @property
    def plain(self) -> SharedFIPA:
        """The step, once noise is in what it is made from."""
        return SharedFIPA(self.damping, self.radius)

    def update(self, updates: Sequence[Tensor], normal: Normal) -> Tensor:
        """The released mean of the clients' updates."""
        return noisy_mean(updates, self.clip, self.multipliers[0], normal)

    def matrix(self, matrices: Sequence[Tensor], clients: int, normal: Normal) -> Tensor:
        """The released mean of the clients' matrices; of those who sent none it is zero. It may be indefinite."""
        k = len(matrices[0])
        if not self.split[1]:
            return torch.zeros_like(matrices[0], dtype=DOUBLE)
        scale = pack(torch.full((k, k), math.sqrt(2), dtype=DOUBLE).fill_diagonal_(1.0))
        halves = [pack(one.to(DOUBLE)) * scale for one in matrices]
        halves += [torch.zeros_like(scale)] * (clients - len(matrices))
        return unpack(noisy_mean(halves, self.clip_matrix, self.multipliers[1], normal) / scale, k)

    def above_noise(self, matrix: Tensor, clients: int, share: float = 1.0) -> Tensor:
        r"""The part of a released matrix that is curvature rather than noise: eigenvalues above $\sigma \sqrt{2 k}$.

        $\sigma = z_2 C_2 / M$ times `share`, which is below 1 for a mean of several releases.
        """
        values, vectors = eigh((matrix + matrix.T) / 2)
        level = 0.0
        if self.noise and self.split[1]:
            level = self.multipliers[1] * self.clip_matrix / clients * share * math.sqrt(2 * len(matrix))
        kept = torch.where(values > level, values, 0.0)
        return (vectors * kept) @ vectors.T

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        check_alike(cohort, "PrivateSharedFIPA")
        summaries = cohort.require(BasisCurvature, "PrivateSharedFIPA")
        first = summaries[0]
        for client, one in zip(cohort.clients, summaries, strict=True):
            if one.basis.shape != first.basis.shape or not torch.equal(one.basis, first.basis):
                raise UpdateError(f"{client} sent a curvature in another basis: send all clients of a round the same")
            if len(one.moment):
                raise UpdateError(f"{client} sent a moment, which has no noise: PrivateSharedFIPA takes gradients only")
        normal, state = next_round(self.seed, state)
        count = len(summaries)
        update = self.update(cohort.deltas, normal)
        matrix = self.above_noise(self.matrix([one.matrix for one in summaries], count, normal), count)
        pooled = replace(first, matrix=matrix.to(first.basis))
        theta = torch.zeros_like(update)
        found = aggregator(theta, [ClientUpdate(update, 1, pooled)])(self.plain, {})
        rank, condition = found.diagnostics.effective_rank, found.diagnostics.condition_number
        return Step(found.theta, rank, condition, [1.0] * count, state)
