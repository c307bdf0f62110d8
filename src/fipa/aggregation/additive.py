r"""Additive FIPA: the same rule from sums alone.

The server knows $Y = \sum_m w_m H_m \Omega$, $b = \sum_m w_m H_m \Delta\theta_m$ and the test matrix $\Omega$,
and takes the Nystrom approximation $\hat H = Y (\Omega^\top Y)^\dagger Y^\top$, in the stable form of
Tropp et al. (2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.fipa import CUTOFF, filtered_inverse
from fipa.aggregation.rule import Step, check_not_negative
from fipa.curvature.additive import AdditivePlan, AdditiveStatistics, pool, random_test_matrix
from fipa.errors import UpdateError
from fipa.linalg import eigh


@dataclass(frozen=True)
class AdditiveFIPA:
    r"""$d = \gamma (\hat H + \beta I)^\dagger b$ on the range of the Nystrom approximation $\hat H$.

    Equal to `FIPA` (if `completed`, to `CompletedFIPA`) of full-rank sketches when the test matrix spans their range.

    Parameters
    ----------
    damping, step, cutoff
        As for `FIPA`.
    completed
        Move as FedAvg where the approximation knows no curvature.
    """

    damping: float = 0.0
    step: float = 1.0
    cutoff: float = CUTOFF
    completed: bool = False

    needs = AdditivePlan

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step, cutoff=self.cutoff)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        statistics = cohort.require(AdditiveStatistics, "AdditiveFIPA")
        for client, one, count, delta in zip(
            cohort.clients, statistics, cohort.num_examples, cohort.deltas, strict=True
        ):
            flaw = statistics[0].mismatch(one)
            if not torch.equal(one.delta, delta):
                flaw = "sent statistics of another update than the one it sent: compute them with the same delta"
            if one.num_examples != count:
                flaw = f"reports {count} examples, but its statistics {one.num_examples}"
            if flaw:
                raise UpdateError(f"{client} {flaw}")
        shares = tuple(n / sum(cohort.num_examples) for n in cohort.num_examples)
        if cohort.weights != shares:
            raise UpdateError(
                "additive statistics are pooled by number of examples: leave ClientUpdate(weight=...) out"
            )
        total, values, U = cohort.remember(_pooled)
        inverse, effective_rank, condition_number = filtered_inverse(
            values.double(), self.damping, self.cutoff, noise=len(values) * torch.finfo(values.dtype).eps
        )
        inverse = inverse.to(U.dtype)

        def part(response: Tensor, delta: Tensor) -> Tensor:
            if not self.completed:
                return U @ (inverse * (U.T @ response))
            return delta + U @ (inverse * (U.T @ response - values * (U.T @ delta)))

        d = part(total.response, total.delta)
        projections = [
            weight * float(part(one.response, one.delta) @ d)
            for weight, one in zip(cohort.weights, statistics, strict=True)
        ]
        return Step(self.step * d, effective_rank, condition_number, projections)


def _pooled(cohort: Cohort) -> tuple[AdditiveStatistics, Tensor, Tensor]:
    """The clients' sums, with the eigenvalues and eigenvectors of their curvature."""
    statistics = cohort.require(AdditiveStatistics, "AdditiveFIPA")
    total = pool(statistics) if len(statistics) > 1 else statistics[0]
    return total, *nystrom(total)


def nystrom(total: AdditiveStatistics) -> tuple[Tensor, Tensor]:
    r"""Eigenvalues (descending) and eigenvectors (p x L) of $Y (\Omega^\top Y)^\dagger Y^\top$."""
    Y = total.products
    omega = random_test_matrix(len(Y), total.width, total.test_seed, Y.dtype).to(Y.device)
    Y, omega = Y[:, : len(Y)], omega[:, : len(Y)]  # more columns than parameters add nothing
    # An orthonormal basis of the same span: the approximation is the same, the small system well scaled.
    omega, R = torch.linalg.qr(omega)
    Y = torch.linalg.solve_triangular(R, Y, upper=True, left=False)
    shift = torch.finfo(Y.dtype).eps * float(torch.linalg.matrix_norm(Y))
    if shift == 0.0:
        return Y.new_zeros(Y.shape[1]), omega
    Y = Y + shift * omega
    core = omega.T @ Y
    # Symmetric and positive up to rounding: a square root that forgives what rounding made negative.
    eigenvalues, W = eigh((core + core.T) / 2)
    kept = eigenvalues > 0.5 * shift
    B = Y @ (W[:, kept] / eigenvalues[kept].sqrt())
    U, sigma, _ = torch.linalg.svd(B, full_matrices=False)
    return (sigma.square() - shift).clamp(min=0), U
