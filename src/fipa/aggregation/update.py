"""What a client sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fipa.curvature.summary import CurvatureSummary
from fipa.linalg import aligned


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    r"""One client's part of a round.

    Parameters
    ----------
    delta
        $\Delta\theta_m$, the change that local training made: one flat tensor, or tensors by parameter name.
    num_examples
        $N_m$, the client's weight unless `weight` is given.
    sketch
        What the client reports about its curvature at the broadcast parameters: the result of `fipa.sketch`,
        `fipa.diagonal_fisher`, `fipa.input_covariance`, `fipa.additive_statistics` or `fipa.basis_curvature`, as the
        rule needs.
    client_id
        With ids, clients are reduced in the order of their ids, whatever the order of arrival: results are then
        the same to the last bit. Errors name the client by its id, or else by its place in the list.
    weight
        A positive weight instead of the number of examples: less for an update that comes late, or 1 for all where
        clients were drawn in proportion to their examples.
    """

    delta: Tensor | Mapping[str, Tensor]
    num_examples: int
    sketch: CurvatureSummary | None = None
    client_id: int | str | None = None
    weight: float | None = None

    def canonical(self) -> ClientUpdate:
        """The same update in the one form of memory that every rule works on, whatever way it came here.

        `aggregate` does this by itself. Do it before computing anything else with an update that others repeat.
        """
        return self.map(aligned)

    def map(self, change: Callable[[Tensor], Tensor]) -> ClientUpdate:
        """The same update of changed tensors."""
        delta = self.delta
        delta = change(delta) if isinstance(delta, Tensor) else {name: change(t) for name, t in delta.items()}
        return replace(self, delta=delta, sketch=None if self.sketch is None else self.sketch.map(change))
