"""A round in a shared basis with noise: all that lasts, and all that clients are sent, is made from releases.

What the memory of `SharedStep` knows of clients, it knows here of rounds: a row is what one round released.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fipa.aggregation.private import DOUBLE, Normal, system_normal
from fipa.aggregation.private_shared import PrivateSharedFIPA
from fipa.aggregation.rule import aggregator
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.basis import BasisCurvature
from fipa.errors import SketchError
from fipa.federation.basis import Basis
from fipa.federation.control import Conversation
from fipa.federation.messages import POOL, Curve, Late, Reply
from fipa.federation.outcome import Outcome
from fipa.federation.quadratics import News, Quadratics
from fipa.federation.shared import Shared, SharedStep
from fipa.randomness import generator_for

if TYPE_CHECKING:
    from fipa.federation.coordinator import _Round

OLDEST = 20  # releases that are remembered


class PrivateStep(SharedStep):
    """The server's part of one round: the only place that looks at single clients, and what it makes has noise."""

    rule: PrivateSharedFIPA

    def __init__(
        self, round_: _Round, rule: PrivateSharedFIPA, replies: Mapping[int, Reply], late: Sequence[Late]
    ) -> None:
        for one in late:
            round_.say(one.update.client_id, "its late answer is not used: nobody has counted its privacy")
        self._asked, self._normal = tuple(replies), _noise(rule.seed, round_.k)
        updates = [reply.update.delta for reply in replies.values()]
        mean = rule.update([update for update in updates if isinstance(update, Tensor)], self._normal)
        super().__init__(round_, rule, {POOL: Reply(ClientUpdate(mean, len(replies)))}, ())

    def _seeded(self) -> Shared:
        """Without a warm-up's updates, which have no noise."""
        return Shared(Basis.empty(len(self.theta)), Quadratics.none(self.theta))

    def _foretold(self) -> tuple[float, float]:
        return math.nan, 1.0

    def _curvatures(self) -> Conversation[None]:
        """The second trip, released; who does not answer it, or with what is no curvature, counts as zero."""
        memory, k, plan = self.memory, self.round.k, self.round.stage.plan
        assert plan is not None
        answers = yield from self.round.ask(self._asked, Curve(self.theta, memory.basis, plan, memory.holds, {}, 32))
        holds = {**memory.holds, **dict.fromkeys(answers.values, memory.basis.version)}
        basis = memory.basis.columns.to(self.theta)
        matrices = [torch.zeros(len(memory.basis), len(memory.basis), dtype=DOUBLE)] * (not answers.values)
        for client, answer in answers.values.items():
            try:
                matrices.append(BasisCurvature.unpacked(answer, basis, self._layout, 32).matrix)
            except SketchError as error:
                self.round.say(client, f"counts as zero: its curvature {error}")
                matrices.append(basis.new_zeros(basis.shape[1], basis.shape[1]))
        matrix = self.rule.matrix(matrices, len(self._asked), self._normal)
        mean = self.replies[POOL].update
        assert isinstance(mean.delta, Tensor)
        clients = memory.clients.told(News(k, 1, k, mean.delta, matrix=matrix.to(self.theta)))
        self.memory = replace(memory, clients=clients.since(k - OLDEST), holds=holds)

    def _pooled(self) -> ClientUpdate:
        """All releases as one, at the present model, without what noise alone would explain of their curvature.

        Gradients of earlier rounds are moved to the present model by the mean curvature of all: that of one release
        has more noise in it than news.
        """
        clients, rule = self.memory.clients, self.rule
        weights = clients.weights(self.round.k, rule.memory.discount)
        w = weights.to(clients.moves)
        root = (w @ clients.known).double().sqrt()  # how well each column is known
        told = root[:, None] * clients.curvature(weights) * root
        told = rule.above_noise(told, len(self._asked), float(weights.norm()))
        matrix = (told / root[:, None] / root).to(self.theta)
        basis = self.memory.basis.columns.to(self.theta)
        update = clients.mean_update(weights) - basis @ (matrix @ (w @ clients.moves)) - rule.weight_decay * self.theta
        matrix = (matrix + matrix.T) / 2 + rule.weight_decay * torch.eye(len(matrix)).to(matrix)
        sketch = BasisCurvature(matrix, matrix.new_zeros(0), basis, self._layout)
        return ClientUpdate(update, len(self._asked), sketch)

    def _controlled(
        self,
        pooled: ClientUpdate,
        radius: float | None,
        ratio: float,
        age: float,
    ) -> Conversation[Outcome]:
        """The step as it is: clients' losses have no noise, so nobody judges it."""
        yield from ()
        rule = self.rule.plain
        return Outcome(aggregator(self.theta, [pooled])(rule, {}), None, 1, rule.damping, radius=rule.radius)


def _noise(seed: int | None, k: int) -> Normal:
    """Where a round's noise comes from."""
    if seed is None:
        return system_normal
    generator = generator_for(seed, "noise", k)
    return lambda shape: torch.randn(shape, generator=generator, dtype=DOUBLE)
