"""Preconditioned mixing as in FedPM: layer by layer, weighted by the covariance of the layer's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative
from fipa.curvature.covariance import CovariancePlan, InputCovariance
from fipa.errors import FipaError, UpdateError


@dataclass(frozen=True)
class FOOF:
    r"""For every linear or convolutional layer (weights by rows, bias as a last column)

    $$D = \gamma \Big(\sum_m w_m D_m (C_m + \beta I)\Big) \Big(\sum_m w_m (C_m + \beta I)\Big)^{-1},$$

    with $C_m$ the mean outer product of the layer's inputs; parameters of other layers are averaged.

    Parameters
    ----------
    damping
        $\beta > 0$, relative to the mean eigenvalue of the layer's averaged covariance. Large: FedAvg.
    step
        $\gamma$.
    """

    damping: float = 1e-3
    step: float = 1.0

    needs = CovariancePlan

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping, step=self.step)
        if self.damping == 0:
            raise FipaError("FOOF(damping=0): covariances of few examples are singular, use a positive damping")

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        covariances = cohort.require(InputCovariance, "FOOF")
        layout = covariances[0].layout
        d = cohort.mean_delta
        # each client's own part of d; they sum to d
        parts = [w * delta for w, delta in zip(cohort.weights, cohort.deltas, strict=True)]
        rank, condition = 0.0, 1.0
        slices = layout.slices
        for client, c in zip(cohort.clients, covariances, strict=True):
            odd = set(c.layers) ^ set(covariances[0].layers)
            if odd:
                raise UpdateError(
                    f"{client} and {cohort.clients[0]} differ in the covariance of {min(odd)!r}: use one params=..."
                )
        for weight_name, (bias_name, first) in covariances[0].layers.items():
            for client, c in zip(cohort.clients, covariances, strict=True):
                if c.layers[weight_name][1].shape != first.shape:
                    raise UpdateError(
                        f"{client} sent no covariance of the shape {tuple(first.shape)} for {weight_name!r}: "
                        "train and send the same weights and biases everywhere"
                    )
            matrices = [c.layers[weight_name][1] for c in covariances]
            mean = sum(w * C for w, C in zip(cohort.weights, matrices, strict=True))
            assert isinstance(mean, Tensor)
            where = [slices[weight_name]] + ([slices[bias_name]] if bias_name else [])
            rows = layout.shapes[layout.names.index(weight_name)][0]
            beta = self.damping * float(mean.diagonal().mean()) or 1.0  # no input at all: plain averaging
            eye = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
            factor, failed = torch.linalg.cholesky_ex(mean + beta * eye)
            if failed:
                raise FipaError(f"the covariance of {weight_name!r} is singular in {mean.dtype}: raise FOOF's damping")
            inverse = torch.cholesky_inverse(factor)
            total = torch.zeros(rows, len(mean), dtype=d.dtype, device=d.device)
            for w, C, delta, part in zip(cohort.weights, matrices, cohort.deltas, parts, strict=True):
                D = torch.cat([delta[s].reshape(rows, -1) for s in where], dim=1)
                own = torch.cholesky_solve(w * (D @ C + beta * D).T, factor).T
                _scatter(part, where, own)
                total += own
            _scatter(d, where, total)
            rank += rows * (len(mean) - beta * float(inverse.trace()))
            norm = float(torch.linalg.matrix_norm(mean + beta * eye, ord=1))
            condition = max(condition, norm * float(torch.linalg.matrix_norm(inverse, ord=1)))
        return Step(self.step * d, rank, condition, [float(part @ d) for part in parts])


def _scatter(flat: Tensor, where: list[slice], matrix: Tensor) -> None:
    """Write the columns of a layer back: the weight's, then the bias."""
    start = 0
    for s in where:
        columns = (s.stop - s.start) // len(matrix)
        flat[s] = matrix[:, start : start + columns].reshape(-1)
        start += columns
