"""Gauss-Newton: one local step that solves the client's linearised problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fipa.clients.rule import LocalRule, LocalWork
from fipa.curvature.sketch import Sketch
from fipa.errors import FipaError


@dataclass(frozen=True)
class GaussNewton(LocalRule):
    r"""One local Gauss-Newton step $\Delta\theta_m = -(\hat H_m + \mu I)^\dagger g_m$, in the span of $\hat H_m$.

    $\hat H_m$ is the sketch that the client sends. A client that sends none takes all of its curvature: without damping
    the exact, minimum-norm solution of its linearised problem. For the paper's rule the two are the same: the server
    sees an update only through the sketch.

    Where the server's rule has a `floor`, the clients are told so, and step outside of the span as well,
    $-(\hat H_m + \mu I)^{-1} g_m$ with the floor as $\mu$: the server then has the whole gradient to work with.

    Parameters
    ----------
    damping
        $\mu$, for servers without a floor.
    cutoff
        Eigenvalues below this share of the largest count as zero.
    """

    needs_curvature: ClassVar[bool] = True

    damping: float = 0.0
    cutoff: float = 0.0

    def __post_init__(self) -> None:
        if self.damping < 0 or self.cutoff < 0:
            raise FipaError("GaussNewton: damping and cutoff must not be negative")

    def check_floor(self, floor: float) -> None:
        """Refuse a damping beside the floor of the server's rule."""
        if floor and self.damping:
            raise FipaError(
                f"gauss-newton clients with damping = {self.damping:g}, and a rule with floor = {floor:g}: the rule's "
                "floor is the clients' damping, leave theirs out"
            )

    def __call__(self, sketch: Sketch, gradient: Tensor, floor: float = 0.0) -> Tensor:
        """The update (p)."""
        self.check_floor(floor)
        kept = sketch.eigenvalues > self.cutoff * sketch.eigenvalues[:1]
        inside = sketch.eigenvectors.T @ gradient
        if not floor:
            inverse = torch.where(kept, 1 / (sketch.eigenvalues + self.damping), 0)
            return -(sketch.eigenvectors @ (inverse * inside))
        inverse = torch.where(kept, 1 / (sketch.eigenvalues + floor), 1 / floor)
        return -(sketch.eigenvectors @ ((inverse - 1 / floor) * inside) + gradient / floor)

    def train(self, work: LocalWork) -> list[Tensor]:  # noqa: D102
        assert work.gradients is not None
        pairs = zip(work.sketches, work.gradients, strict=True)
        return [self(sketch, gradient, work.floor) for sketch, gradient in pairs]
