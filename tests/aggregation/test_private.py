"""Private rules: equal to the plain ones without noise, bounded in every client, and noisy as stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from aggregation.strategies import DOUBLE, FAST, LAYOUT, SEEDS, generator, normal, orthonormal, statistics
from fipa import AdditiveFIPA, ClientUpdate, FedAvg, FedAvgM, PrivateAdditiveFIPA, PrivateFedAvg, UpdateError
from fipa.aggregation.private import clipped_sum, denoised_nystrom, system_normal

P = LAYOUT.numel
HUGE = 1e9
WIDE = {"clip": HUGE, "clip_products": HUGE, "clip_response": HUGE}
COMPLETED = pytest.mark.parametrize("completed", [False, True], ids=["plain", "completed"])


def clients(seed: int, width: int, count: int = 4, examples: Sequence[int] | None = None) -> list[ClientUpdate]:
    rng = generator(seed)
    updates = []
    for m in range(count):
        root, delta = normal(P, 5, rng=rng), normal(P, rng=rng)
        n = 1 + m if examples is None else examples[m]
        updates.append(ClientUpdate(delta, n, statistics(root @ root.T, delta, n, width=width)))
    return updates


def change(updates: Sequence[ClientUpdate], rule: fipa.Rule, state: dict[str, Tensor] | None = None) -> Tensor:
    return fipa.aggregate(torch.zeros(P, dtype=DOUBLE), updates, rule, state).theta


def alike(updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    """The same clients with one example each."""
    return [replace(u, num_examples=1, sketch=replace(u.sketch, num_examples=1)) for u in updates]


# --- without noise ---


@FAST
@given(seed=SEEDS, step=st.floats(0.1, 2.0))
def test_wide_clip_without_noise_is_fedavg_of_equal_clients(seed: int, step: float) -> None:
    updates = clients(seed, width=3)
    expected = change(alike(updates), FedAvg(step))
    found = change(updates, PrivateFedAvg(HUGE, noise=0.0, step=step))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@COMPLETED
@FAST
@given(seed=SEEDS, width=st.integers(1, 20), damping=st.floats(0.05, 2.0))
def test_wide_clips_without_noise_are_additive_fipa_of_equal_clients(
    completed: bool, seed: int, width: int, damping: float
) -> None:
    updates = clients(seed, width)
    expected = change(alike(updates), AdditiveFIPA(damping, step=0.7, completed=completed))
    rule = PrivateAdditiveFIPA(**WIDE, noise=0.0, damping=damping, step=0.7, completed=completed)
    torch.testing.assert_close(change(updates, rule), expected, rtol=0, atol=1e-8 * max(1.0, float(expected.norm())))


def test_clipping_by_hand() -> None:
    updates = [ClientUpdate(torch.tensor([3.0, 4.0]), 1), ClientUpdate(torch.tensor([0.0, 0.5]), 100)]
    result = fipa.aggregate(torch.zeros(2), updates, PrivateFedAvg(clip=1.0, noise=0.0, step=2.0))
    assert result.theta.tolist() == pytest.approx([0.6, 1.3])  # (0.6, 0.8) + (0, 0.5), over two clients, times 2
    assert result.diagnostics.shares == {0: 0.5, 1: 0.5}  # says nothing about clients


def test_all_three_parts_are_clipped() -> None:
    """What one client sends beyond its clip norms makes no difference."""
    rule = PrivateAdditiveFIPA(0.1, 0.2, 0.3, noise=0.0)
    updates = clients(1, width=5)
    one = updates[0].sketch
    far = 1e3 * one.delta
    sketch = replace(one, products=1e4 * one.products, response=1e5 * one.response, delta=far)
    longer = [ClientUpdate(far, 1, sketch), *updates[1:]]
    torch.testing.assert_close(change(longer, rule), change(updates, rule), rtol=0, atol=1e-10)


# --- one client's influence ---

numbers = st.floats(allow_nan=False, allow_infinity=False)
vectors = st.lists(numbers, min_size=3, max_size=3).map(lambda v: torch.tensor(v, dtype=DOUBLE))


@FAST
@given(
    others=st.lists(vectors, min_size=1, max_size=5), one=vectors, other=vectors, clip=st.floats(1e-3, 1e3), at=SEEDS
)
def test_no_client_moves_the_sum_by_more_than_its_clip(
    others: list[Tensor], one: Tensor, other: Tensor, clip: float, at: int
) -> None:
    place = at % (len(others) + 1)

    def total(client: Tensor | None) -> Tensor:
        return clipped_sum(others[:place] + ([] if client is None else [client]) + others[place:], clip)

    rounding = 1 + 1e-14 * (len(others) + 1)
    assert float((total(one) - total(other)).norm()) <= 2 * clip * rounding
    assert float((total(one) - total(None)).norm()) <= clip * rounding


def test_short_updates_stay_as_they_are() -> None:
    total = clipped_sum([torch.tensor([0.3, 0.4]), torch.zeros(2)], 0.6)
    assert total.dtype == DOUBLE  # the bound must not depend on float32's rounding
    torch.testing.assert_close(total, torch.tensor([0.3, 0.4]).double(), rtol=0, atol=0)


# --- noise ---


@pytest.mark.parametrize("seed", [None, 3])
def test_noise_has_the_stated_deviation(seed: int | None) -> None:
    p, count, clip, z = 40_000, 5, 0.5, 1.5
    updates = [ClientUpdate(torch.zeros(p), 1) for _ in range(count)]
    noise = fipa.aggregate(torch.zeros(p), updates, PrivateFedAvg(clip, z, seed=seed)).theta
    expected = z * clip / count
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * p))  # five standard errors
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(p)


def test_the_systems_numbers_are_normal() -> None:
    n = 200_000
    x = system_normal(torch.Size([n]))
    assert x.isfinite().all()
    assert not torch.equal(x, system_normal(torch.Size([n])))
    for bound in (-2.0, -1.0, 0.0, 1.0, 2.0):
        chance = 0.5 * (1 + math.erf(bound / math.sqrt(2)))
        assert float((x < bound).double().mean()) == pytest.approx(chance, abs=5 * math.sqrt(chance / n))


@COMPLETED
def test_parts_share_one_budget(completed: bool) -> None:
    rule = PrivateAdditiveFIPA(noise=1.7, split=(5.0, 3.0, 2.0), completed=completed)
    z = rule.multipliers
    assert set(z) == {"products", "response"} | ({"delta"} if completed else set())
    assert sum(1 / each**2 for each in z.values()) == pytest.approx(1 / 1.7**2)
    assert z["products"] / z["response"] == pytest.approx(math.sqrt(2 / 3))


def test_updates_of_completed_fipa_have_the_stated_deviation() -> None:
    """Without curvature above the noise the completed rule is the mean of the noisy updates."""
    p, z = 20_000, 2.0
    zero = torch.zeros(p)
    layout = fipa.Layout(("theta",), ((p,),))
    sketch = fipa.AdditiveStatistics(torch.zeros(p, 2), zero, zero, 1, 5, layout)
    rule = PrivateAdditiveFIPA(clip=0.3, clip_products=1e-9, clip_response=1e-9, noise=z, split=(0.5, 0.3, 0.2), seed=1)
    result = fipa.aggregate(zero, [ClientUpdate(zero, 1, sketch)] * 4, rule)
    assert result.diagnostics.effective_rank == 0
    expected = 0.3 * z / math.sqrt(0.5) / 4
    assert float(result.theta.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * p))


RULES = [PrivateFedAvg(noise=0.5, seed=4), PrivateAdditiveFIPA(noise=0.05, seed=4)]


@pytest.mark.parametrize("rule", RULES)
def test_seed_and_state_repeat_the_noise(rule: PrivateFedAvg | PrivateAdditiveFIPA) -> None:
    updates, theta = clients(2, width=4), torch.zeros(P, dtype=DOUBLE)
    first = fipa.aggregate(theta, updates, rule)
    second = fipa.aggregate(theta, updates, rule, first.state)
    assert int(second.state["releases"]) == 2
    resumed = fipa.aggregate(theta, updates, rule, {"releases": torch.tensor(1)})  # as read from a file
    assert torch.equal(resumed.theta, second.theta)
    assert torch.equal(fipa.aggregate(theta, updates, rule).theta, first.theta)
    assert not torch.equal(first.theta, second.theta)
    assert not torch.equal(change(updates, replace(rule, seed=5)), first.theta)
    secret = replace(rule, seed=None)
    assert not torch.equal(change(updates, secret), change(updates, secret))


def test_inside_a_server_optimizer() -> None:
    rule = FedAvgM(inner=PrivateFedAvg(seed=1))
    result = fipa.aggregate(torch.zeros(P, dtype=DOUBLE), clients(3, width=2), rule)
    assert int(result.state["inner.releases"]) == 1


def test_float32_stays_float32() -> None:
    updates = [replace(u, delta=u.delta.float(), sketch=u.sketch.to(torch.float32)) for u in clients(4, width=6)]
    for rule in (*RULES, PrivateAdditiveFIPA(**WIDE, noise=0.0)):
        assert fipa.aggregate(torch.zeros(P), updates, rule).theta.dtype == torch.float32


# --- curvature under noise ---


def noisy_products(p: int, width: int, deviation: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """H with eigenvalues 100, 50, 20, and H Omega with noise."""
    rng = generator(seed)
    basis = orthonormal(p, 3, rng)
    H = basis * torch.tensor([100.0, 50.0, 20.0], dtype=DOUBLE) @ basis.T
    omega = fipa.random_test_matrix(p, width, seed, DOUBLE)
    return H, H @ omega + deviation * normal(p, width, rng=rng), omega


@pytest.mark.parametrize("seed", range(5))
def test_little_noise_keeps_the_curvature(seed: int) -> None:
    H, Y, omega = noisy_products(60, 20, 1e-3, seed)
    values, U = denoised_nystrom(Y, omega, 1e-3)
    assert len(values) == 3
    torch.testing.assert_close(U * values @ U.T, H, rtol=0, atol=0.5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("deviation", [0.1, 1.0, 3.0, 30.0])
def test_noise_never_makes_flat_directions(seed: int, deviation: float) -> None:
    """What is kept is well above the noise, so that its inverse is harmless: at most the three real directions."""
    _, Y, omega = noisy_products(60, 20, deviation, seed)
    values, U = denoised_nystrom(Y, omega, deviation)
    assert len(values) <= 3
    assert bool((values > deviation).all())
    torch.testing.assert_close(U.T @ U, torch.eye(len(values), dtype=DOUBLE), rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_has_no_curvature(seed: int) -> None:
    rng = generator(seed)
    omega = fipa.random_test_matrix(300, 40, seed, DOUBLE)
    assert len(denoised_nystrom(0.9 * normal(300, 40, rng=rng), omega, 1.0)[0]) == 0


@pytest.mark.parametrize("width", [13, 40])
def test_width_beyond_the_number_of_parameters(width: int) -> None:
    rule = PrivateAdditiveFIPA(**WIDE, noise=1e-15, damping=0.5, seed=0)
    updates = clients(5, width)
    torch.testing.assert_close(change(updates, rule), change(updates, replace(rule, noise=0.0)), rtol=0, atol=1e-3)


# --- mistakes ---


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_refused(rule: fipa.Rule) -> None:
    updates = clients(6, width=3)
    with pytest.raises(UpdateError, match=r"weighs all clients alike.*leave weight"):
        change([replace(updates[0], weight=0.5), *updates[1:]], rule)
    change([replace(u, weight=3.0) for u in updates], rule)  # all alike


def test_statistics_are_needed_and_must_fit() -> None:
    updates = clients(7, width=3)
    with pytest.raises(UpdateError, match="PrivateAdditiveFIPA needs a AdditiveStatistics"):
        change([replace(u, sketch=None) for u in updates], PrivateAdditiveFIPA())
    other = replace(updates[1], sketch=replace(updates[1].sketch, test_seed=6))
    with pytest.raises(UpdateError, match="client #1 used the test matrix"):
        change([updates[0], other], PrivateAdditiveFIPA())
    other = replace(updates[1], delta=torch.zeros(P, dtype=DOUBLE))
    with pytest.raises(UpdateError, match=r"client #1 .*another update"):
        change([updates[0], other], PrivateAdditiveFIPA())


@pytest.mark.parametrize("kind", [PrivateFedAvg, PrivateAdditiveFIPA])
@pytest.mark.parametrize(("setting", "value"), [("clip", 0.0), ("clip", math.inf), ("noise", -1.0), ("step", math.nan)])
def test_bad_settings(kind: type, setting: str, value: float) -> None:
    with pytest.raises(fipa.FipaError, match=rf"{kind.__name__}\({setting}={value}\)"):
        kind(**{setting: value})


def test_bad_split() -> None:
    with pytest.raises(fipa.FipaError, match="three positive shares"):
        PrivateAdditiveFIPA(split=(1.0, 0.0, 1.0))
