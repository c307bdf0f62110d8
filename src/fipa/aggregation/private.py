r"""Rules with client-level differential privacy: clip what each client sends, add Gaussian noise to the sum.

Central model: the server is trusted, or sees sums only. All clients weigh the same, since the influence of a number of
examples would have no bound, and what a client would have sent counts as zero in the neighbouring round, so that the
number of clients is the same in both and may be known. One client then changes the sum of updates that are clipped to
norm C by at most C, and noise of standard deviation $z C$ makes it a Gaussian mechanism with multiplier z:
`fipa.privacy.epsilon` tells what that is worth over all rounds.

`Diagnostics` of these rules are made from what is released, and the clients' shares are all alike. There is one
exception, `cosine_with_fedavg`: it knows the mean of the raw updates, and is for the server's own eyes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fipa.aggregation.additive import nystrom
from fipa.aggregation.cohort import Cohort
from fipa.aggregation.fipa import CUTOFF, filtered_inverse
from fipa.aggregation.rule import Step, check_not_negative
from fipa.curvature.additive import AdditivePlan, AdditiveStatistics, random_test_matrix
from fipa.errors import FipaError, UpdateError
from fipa.linalg import eigh
from fipa.randomness import generator_for

DOUBLE = torch.float64
Normal = Callable[[torch.Size], Tensor]


@dataclass(frozen=True)
class PrivateFedAvg:
    r"""$d = \frac{\gamma}{M} \big( \sum_m \mathrm{clip}_C(\Delta\theta_m) + z C \xi \big)$, $\xi$ standard normal.

    Parameters
    ----------
    clip
        C: longer updates are scaled down to this norm.
    noise
        z: the noise multiplier. Zero only clips, and promises nothing.
    step
        $\gamma$.
    seed
        None draws the noise from the operating system. A number makes it repeatable, for experiments: whoever knows
        the number can take the noise off again. Rounds differ by the counter in the rule's state.
    """

    clip: float = 1.0
    noise: float = 1.0
    step: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_not_negative(self, noise=self.noise, step=self.step)
        check_positive(self, clip=self.clip)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        check_alike(cohort, "PrivateFedAvg")
        normal, state = next_round(self.seed, state)
        mean = noisy_mean(cohort.deltas, self.clip, self.noise, normal)
        return Step(self.step * mean, float(mean.numel()), 1.0, [1.0] * len(cohort.ids), state)


@dataclass(frozen=True)
class PrivateAdditiveFIPA:
    r"""`AdditiveFIPA` from noisy means of the clients' products $H_m \Omega$, responses and updates.

    A client releases three parts, each clipped to a norm $C_i$ of its own, the products in the Frobenius norm. Part i
    gets noise of standard deviation $z_i C_i$ with $z_i = z / \sqrt{s_i}$, where the `split` $s_i$ sums to 1. In units
    of the noise, one client changes all parts together by at most

    $$\sqrt{\sum_i (C_i / (z_i C_i))^2} = \sqrt{\sum_i 1 / z_i^2} = \sqrt{\sum_i s_i / z^2} = 1 / z :$$

    one Gaussian mechanism with multiplier z, as private as `PrivateFedAvg` with the same `noise`.

    The curvature is that of `denoised_nystrom`: directions that noise alone would explain are dropped, where the
    completed rule moves as `PrivateFedAvg` does.

    Parameters
    ----------
    clip, clip_products, clip_response
        $C_i$ of $\Delta\theta_m$, $H_m \Omega$ and $H_m \Delta\theta_m$.
    noise, seed
        As for `PrivateFedAvg`.
    damping, step, cutoff, completed
        As for `AdditiveFIPA`. The rule that is not completed has no use for the updates and does not release them.
    split
        Shares of the budget for updates, products and responses; scaled to a sum of 1 over the parts released.
    """

    clip: float = 1.0
    clip_products: float = 1.0
    clip_response: float = 1.0
    noise: float = 1.0
    damping: float = 0.1
    step: float = 1.0
    cutoff: float = CUTOFF
    completed: bool = True
    split: tuple[float, float, float] = (0.5, 0.25, 0.25)
    seed: int | None = None

    needs = AdditivePlan

    def __post_init__(self) -> None:
        check_not_negative(self, noise=self.noise, damping=self.damping, step=self.step, cutoff=self.cutoff)
        check_positive(self, clip=self.clip, clip_products=self.clip_products, clip_response=self.clip_response)
        if len(self.split) != 3 or not all(0 < share < math.inf for share in self.split):
            raise FipaError(f"PrivateAdditiveFIPA(split={self.split}): needs three positive shares of the budget")

    @property
    def multipliers(self) -> dict[str, float]:
        """Noise multiplier $z_i$ of each part that is released."""
        shares = dict(zip(("delta", "products", "response"), self.split, strict=True))
        if not self.completed:
            del shares["delta"]
        total = sum(shares.values())
        return {part: self.noise / math.sqrt(share / total) for part, share in shares.items()}

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        check_alike(cohort, "PrivateAdditiveFIPA")
        statistics = cohort.require(AdditiveStatistics, "PrivateAdditiveFIPA")
        first = statistics[0]
        for client, one, delta in zip(cohort.clients, statistics, cohort.deltas, strict=True):
            flaw = first.mismatch(one)
            if not torch.equal(one.delta, delta):
                flaw = "sent statistics of another update than the one it sent: compute them with the same delta"
            if flaw:
                raise UpdateError(f"{client} {flaw}")
        normal, state = next_round(self.seed, state)
        z = self.multipliers
        products = noisy_mean([one.products for one in statistics], self.clip_products, z["products"], normal)
        response = noisy_mean([one.response for one in statistics], self.clip_response, z["response"], normal)
        if self.noise:
            omega = random_test_matrix(len(products), first.width, first.test_seed, products.dtype)
            values, U = denoised_nystrom(
                products, omega.to(products.device), z["products"] * self.clip_products / len(statistics)
            )
        else:
            values, U = nystrom(replace(first, products=products))
        inverse, effective_rank, condition_number = filtered_inverse(
            values.double(), self.damping, self.cutoff, noise=len(values) * torch.finfo(values.dtype).eps
        )
        inverse = inverse.to(U.dtype)
        if self.completed:
            delta = noisy_mean(cohort.deltas, self.clip, z["delta"], normal)
            d = delta + U @ (inverse * (U.T @ response - values * (U.T @ delta)))
        else:
            d = U @ (inverse * (U.T @ response))
        return Step(self.step * d, effective_rank, condition_number, [1.0] * len(cohort.ids), state)


def clipped_sum(parts: Sequence[Tensor], clip: float) -> Tensor:
    """Sum of tensors that are scaled down to a norm of at most `clip`; in double precision, so that it is one."""
    total = torch.zeros_like(parts[0], dtype=DOUBLE)
    for part in parts:
        part = part.to(DOUBLE)
        total.add_(part, alpha=clip / max(clip, float(torch.linalg.vector_norm(part))))
    return total


def noisy_mean(parts: Sequence[Tensor], clip: float, multiplier: float, normal: Normal) -> Tensor:
    """Clipped sum, with noise of standard deviation `multiplier` x `clip`, over the number of clients."""
    total = clipped_sum(parts, clip)
    if multiplier:
        total.add_(normal(total.shape).to(total.device), alpha=multiplier * clip)
    return total.div_(len(parts)).to(parts[0].dtype)


def denoised_nystrom(products: Tensor, omega: Tensor, deviation: float) -> tuple[Tensor, Tensor]:
    r"""Eigenvalues (descending) and eigenvectors of what is left of $\hat H$ when $Y = H \Omega$ is noisy.

    Noise makes the core $\Omega^\top Y$ indefinite, and its small eigenvalues, which Nystrom's formula divides by,
    meaningless. Its standard deviation $\sigma$ is known, so what it can do is known as well:

    1. The largest singular value of a p x L matrix of noise is close to $\sigma (\sqrt p + \sqrt L)$. Of
       $Y = U \Sigma V^\top$ only the k singular values above are kept: the test matrix becomes $A = \Omega V_k$.
    2. The core $A^\top Y V_k$ is made symmetric. Noise then adds a random symmetric k x k matrix, of norm close to
       $\sqrt{2 k} \sigma |A|$. Only eigenvalues above are kept, and these are positive.

    An eigenvalue that is kept comes out too large rather than too small, by the noise's energy: steps get shorter.

    Parameters
    ----------
    products, omega
        Noisy Y, and $\Omega$ (both p x L).
    deviation
        $\sigma$ of each entry of Y.
    """
    p, width = products.shape
    U, sigma, Vt = torch.linalg.svd(products.to(DOUBLE), full_matrices=False)
    rounding = torch.finfo(products.dtype).eps * max(p, width) * float(sigma[0])
    noise = deviation * (math.sqrt(p) + math.sqrt(width))
    k = int((sigma > max(noise, rounding)).sum())
    if k == 0:
        return products.new_zeros(0), products.new_zeros(p, 0)
    A, Y = omega.to(DOUBLE) @ Vt[:k].T, U[:, :k] * sigma[:k]
    core = A.T @ Y
    eigenvalues, W = eigh((core + core.T) / 2)
    size = float(torch.linalg.matrix_norm(A, ord=2))
    kept = eigenvalues > size * max(math.sqrt(2 * k) * deviation, rounding)
    basis, root, _ = torch.linalg.svd(Y @ (W[:, kept] / eigenvalues[kept].sqrt()), full_matrices=False)
    return root.square().to(products.dtype), basis.to(products.dtype)


def system_normal(shape: torch.Size) -> Tensor:
    """Standard normal numbers from the operating system's generator, which nobody can guess or rewind.

    52 random bits each, through the inverse of the normal distribution. torch's own generator would not do: its state
    on the CPU grows from 32 bits of the seed.
    """
    words = torch.frombuffer(bytearray(os.urandom(8 * shape.numel())), dtype=torch.int64)
    bits = (words & (2**52 - 1)).to(DOUBLE)
    return torch.special.ndtri((bits + 0.5) / 2**52).reshape(shape)


def next_round(seed: int | None, state: Mapping[str, Tensor]) -> tuple[Normal, dict[str, Tensor]]:
    """Where this round's noise comes from, and the state with one release more."""
    before = int(state.get("releases", 0))
    new = {"releases": torch.tensor(before + 1)}
    if seed is None:
        return system_normal, new
    generator = generator_for(seed, "noise", before + 1)
    return lambda shape: torch.randn(shape, generator=generator, dtype=DOUBLE), new


def check_alike(cohort: Cohort, rule: str) -> None:
    """Refuse weights that clients or the caller chose."""
    examples = sum(cohort.num_examples)
    by_examples = tuple(n / examples for n in cohort.num_examples)
    if cohort.weights != by_examples and len(set(cohort.weights)) > 1:
        raise UpdateError(f"{rule} weighs all clients alike, or one could outvote the noise: leave weight=... out")


def check_positive(rule: object, **values: float) -> None:
    """Refuse settings of a rule that are not positive."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise FipaError(f"{type(rule).__name__}({name}={value}): must be a positive, finite number")
