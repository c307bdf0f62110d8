"""Rounds in a shared basis with noise: nothing but releases lasts, and without noise they are plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from federation.cases import START, lines, numbers, run, stage
from fipa import ClientMemory, FedAvg, FipaError
from fipa.aggregation.private_shared import PrivateSharedFIPA
from fipa.clients.descent import SGD
from fipa.clients.gradient import FullGradient
from fipa.curvature.basis import BasisPlan
from fipa.federation.arm import Arm
from fipa.federation.shared import Shared
from fipa.federation.trust import TrustRegion

WIDE: dict[str, Any] = {"clip": 1e9, "clip_matrix": 1e9, "noise": 0.0}
NEWEST = ClientMemory(discount=1e-300)


def private(rounds: int = 1, **settings: Any) -> Any:
    return stage(PrivateSharedFIPA(**settings), rounds=rounds, local=FullGradient(), plan=BasisPlan())


def test_without_noise_a_round_is_a_damped_newton_step_of_equal_clients() -> None:
    """The first along the mean gradient, the second in both dimensions."""
    damping = 0.2
    rounds = run(private(2, damping=damping, memory=NEWEST, **WIDE))
    theta, clients, Q = np.array(START), numbers(lines, 0), np.zeros((2, 0))
    H = sum(c.curvature for c in clients) / 3
    for state, record in rounds:
        g = sum(c.curvature @ theta - c.X.T @ c.y / len(c.y) for c in clients) / 3
        Q, _ = np.linalg.qr(np.column_stack([Q, Shared.of(state.rule_state).basis.columns.numpy()[:, Q.shape[1] :]]))
        theta = theta - Q @ np.linalg.solve(Q.T @ H @ Q + damping * np.eye(Q.shape[1]), Q.T @ g)
        np.testing.assert_allclose(state.theta.numpy(), theta, rtol=1e-4, atol=1e-5)
        assert record["trips"] == 2
    assert Q.shape == (2, 2)


def test_nothing_of_a_single_client_lasts() -> None:
    rounds = run(private(4, noise=1.0, seed=3))
    for k, (state, _) in enumerate(rounds, start=1):
        known = Shared.of(state.rule_state).clients
        assert known.ids.tolist() == list(range(1, k + 1))  # rounds, not clients
        assert known.examples.tolist() == [1] * k
        assert bool(known.losses.isnan().all())


def test_a_warm_up_leaves_nothing() -> None:
    warmup = stage(FedAvg(), rounds=1, local=SGD(lr=0.1, epochs=1))
    (_, _), (state, _) = run(Arm("arm", (warmup, private(noise=1.0, seed=3)), group=1))
    assert len(Shared.of(state.rule_state).basis) == 1
    assert len(Shared.of(state.rule_state).clients) == 1


def test_releases_of_several_rounds_average_noise_out() -> None:
    """Near the optimum of a quadratic, what a round tells holds in all others."""
    settings: dict[str, Any] = {"damping": 1.0, "clip": 3.0, "clip_matrix": 3.0, "noise": 0.3, "seed": 3}
    ends = {}
    for discount in (1e-300, 0.8):
        rounds = run(private(40, memory=ClientMemory(discount=discount), **settings))
        ends[discount] = np.std([state.theta.numpy() for state, _ in rounds[20:]], axis=0).sum()
    assert ends[0.8] < 0.7 * ends[1e-300]


def test_seeds_repeat_runs() -> None:
    one, two, other = (run(private(2, noise=1.0, seed=seed))[-1][0].theta for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("settings", [{"control": TrustRegion()}, {"local": SGD(lr=0.1, epochs=1)}])
def test_what_goes_around_the_noise(settings: dict[str, Any]) -> None:
    with pytest.raises(FipaError, match="PrivateSharedFIPA"):
        stage(PrivateSharedFIPA(), rounds=1, **{"local": FullGradient(), "plan": BasisPlan()} | settings)
