"""A trust region: how far the server may step, from how well its quadratics foretold the clients' losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.control import LARGEST, SMALLEST


@dataclass(frozen=True)
class TrustRegion:
    r"""Limits the length of a step, and learns the limit.

    If all clients take part, they judge every step: one that raises their loss is not taken, and a shorter one is
    tried. If only some do, nobody is asked twice: clients that come back report their loss anyway, and the server had
    predicted it. In both cases $\rho$ is the actual fall of the loss divided by the predicted one.

    Parameters
    ----------
    initial
        First radius as a share of the parameters' length. Parameters that are all zero have no length: if only some
        clients take part, and nobody can judge yet, only the damping limits the first step.
    bad, good
        Below a $\rho$ of `bad` the radius is halved, above `good` it is doubled if the last step had its full length.
        Clients that were away for n rounds report on n steps, so it takes n such reports to do that.
    trials
        Most steps that are tried in one round, where all clients judge them.
    """

    initial: float = 0.1
    bad: float = 0.25
    good: float = 0.75
    trials: int = 8

    def __post_init__(self) -> None:
        if not self.initial > 0 or not 0 < self.bad < self.good or self.trials < 1:
            raise FipaError("trust region: initial and bad must be positive, bad below good, and trials at least 1")

    def start(self, theta: Tensor) -> float:
        """The first radius; parameters that are all zero have a length of 1 here."""
        return self.initial * (float(theta.norm()) or 1.0)

    def adapted(self, radius: float, ratio: float, full_length: bool, age: float = 1.0) -> float:
        """The radius after a step, or after clients have come back from `age` rounds ago; NaN tells nothing."""
        factor = 2 ** (1 / max(age, 1.0))
        if math.isnan(ratio):
            return radius
        if ratio < self.bad:
            return max(radius / factor, SMALLEST)
        return min(factor * radius, LARGEST) if ratio > self.good and full_length else radius
