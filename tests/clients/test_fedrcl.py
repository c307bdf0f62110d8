"""FedRCL in local training, against its losses put together in plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clients.feature_cases import LR, STEPS, by_hand, delta, hidden, site
from fipa.clients.contrastive import divergence_penalty, relaxed_contrastive
from fipa.clients.fedrcl import FedRCL
from fipa.federation.messages import Order


@pytest.mark.parametrize("kind", ["relaxed", "supervised"])
@pytest.mark.parametrize("pairs", ["all", "least"])
def test_fedrcl_adds_both_losses_at_every_level(kind: str, pairs: str) -> None:
    place = site()
    rule = FedRCL(
        lr=LR, steps=STEPS, contrast=0.7, penalty=0.4, temperature=0.2, kind=kind, pairs=pairs, levels=("1", "2")
    )

    def extra(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        levels = [model[0](x), hidden(model, x)]
        losses = [
            0.7 * relaxed_contrastive(z, y, 0.2, kind) + 0.4 * divergence_penalty(z, y, 0.7, 0.2, pairs) for z in levels
        ]
        return (losses[0] + losses[1]) / 2

    torch.testing.assert_close(delta(rule, place), by_hand(extra, place.clients[0]), rtol=1e-9, atol=1e-12)


def test_fedrcl_keeps_nothing_and_tells_nothing() -> None:
    place = site()
    (reply,) = place.work((0,), Order(1, place.initial, FedRCL(lr=LR, steps=1)))
    assert (reply.memory, reply.message) == (None, {})
