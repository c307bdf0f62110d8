"""FedVARP against its formula in numpy, over rounds in which some clients are away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from aggregation.strategies import DOUBLE, FAST, SEEDS, generator, normal
from fipa import ClientUpdate, FedAvg, FedAvgM, FedVARP, LayoutError, UpdateError
from fipa.errors import FipaError

P = 5
ZERO = torch.zeros(P, dtype=DOUBLE)


def updates_of(clients: Mapping[int | str, int], rng: torch.Generator) -> list[ClientUpdate]:
    """Random updates; `clients` are numbers of examples by id."""
    return [ClientUpdate(normal(P, rng=rng), n, client_id=i) for i, n in clients.items()]


class Numpy:
    """The rule as the paper has it, with the weights of this library."""

    def __init__(self, population: int | None, step: float = 1.0) -> None:
        self.population, self.step = population, step
        self.y: dict[object, np.ndarray] = {}
        self.n: dict[object, int] = {}

    def __call__(self, updates: Sequence[ClientUpdate]) -> np.ndarray:
        for u in updates:
            self.n[u.client_id] = u.num_examples
            self.y.setdefault(u.client_id, np.zeros(P))
        total = sum(u.num_examples if u.weight is None else u.weight for u in updates)
        weights = [(u.num_examples if u.weight is None else u.weight) / total for u in updates]
        population = self.population or len(self.n)
        mean = sum(self.n[i] * self.y[i] for i in self.y) / (np.mean(list(self.n.values())) * population)
        fresh = sum(w * (u.delta.numpy() - self.y[u.client_id]) for w, u in zip(weights, updates, strict=True))
        for u in updates:
            self.y[u.client_id] = u.delta.numpy()
        return self.step * (fresh + mean)


ROUNDS = ([0, 1, 2], [1, 3], [2], [0, 4], [3, 4], [0, 1, 2, 3, 4], [2, 0])


@pytest.mark.parametrize("population", [None, 5, 8])
@pytest.mark.parametrize("names", [range(5), ["b", "a", "e", "c", "d"], [10, 9, "9", "x'y", 'q"r\\']], ids=str)
def test_several_rounds_with_some_clients_away(names: Sequence[int | str], population: int | None) -> None:
    rng, formula, rule = generator(3), Numpy(population, step=0.7), FedVARP(step=0.7)
    theta, state = ZERO, {}
    for k, present in enumerate(ROUNDS):
        updates = updates_of({names[c]: 5 + 3 * c + k for c in present}, rng)  # their numbers of examples change
        before = theta
        result = fipa.aggregate(theta, updates, rule, state, population=population)
        theta, state = result.theta, result.state
        np.testing.assert_allclose((theta - before).numpy(), formula(updates), rtol=1e-12, atol=1e-13)
    assert len(state) == 2 * len(set(names))


def test_weights_of_late_answers() -> None:
    """A given weight counts in the round; what is remembered weighs by examples."""
    rng, formula, state = generator(4), Numpy(4), {}
    for weights in ((None, 2.5, None), (0.1, None, 7.0)):
        updates = updates_of({0: 4, 1: 10, 2: 30}, rng)
        updates = [
            fipa.ClientUpdate(u.delta, u.num_examples, None, u.client_id, w)
            for u, w in zip(updates, weights, strict=True)
        ]
        result = fipa.aggregate(ZERO, updates, FedVARP(), state, population=4)
        np.testing.assert_allclose(result.theta.numpy(), formula(updates), rtol=1e-12, atol=1e-13)
        state = result.state


@FAST
@given(
    examples=st.dictionaries(st.integers(0, 30) | st.text(max_size=3), st.integers(1, 50), min_size=1, max_size=5),
    rounds=st.integers(1, 4),
    step=st.floats(0.0, 2.0),
    told=st.booleans(),
    seed=SEEDS,
)
def test_with_all_clients_it_is_fedavg(
    examples: dict[int | str, int], rounds: int, step: float, told: bool, seed: int
) -> None:
    rng = generator(seed)
    state: dict[str, Tensor] = {}
    for k in range(rounds):
        updates = updates_of({i: n + k for i, n in examples.items()}, rng)
        population = len(examples) if told else None
        result = fipa.aggregate(ZERO, updates, FedVARP(step), state, population=population)
        plain = fipa.aggregate(ZERO, updates, FedAvg(step))
        torch.testing.assert_close(result.theta, plain.theta, rtol=1e-12, atol=1e-12)
        assert sum(result.diagnostics.shares.values()) == pytest.approx(1.0)
        state = result.state


@pytest.mark.parametrize("population", [None, 3])
def test_the_mean_over_all_choices_of_clients_is_that_of_all(population: int | None) -> None:
    """Clients of one size that do not change: every choice of them makes the same step, the variance is zero."""
    updates = updates_of({0: 6, 1: 6, 2: 6}, generator(1))
    first = fipa.aggregate(ZERO, updates, FedVARP(), population=population)
    for some in (updates[:1], updates[1:], [updates[2], updates[0]]):
        again = fipa.aggregate(ZERO, some, FedVARP(), first.state, population=population)
        torch.testing.assert_close(again.theta, first.theta, rtol=1e-12, atol=1e-13)


def test_clients_never_seen_count_as_zero() -> None:
    """By hand: y_0 = 4, population 2; then client 0 again with 6: (6 - 4) + (4 + 0) / 2 = 4."""
    one = torch.zeros(1)
    first = fipa.aggregate(one, [ClientUpdate(torch.tensor([4.0]), 3, client_id=0)], FedVARP(), population=2)
    assert float(first.theta) == 4.0
    second = fipa.aggregate(
        one, [ClientUpdate(torch.tensor([6.0]), 3, client_id=0)], FedVARP(), first.state, population=2
    )
    assert float(second.theta) == 4.0


def test_shares_are_those_of_the_clients_parts() -> None:
    rng = generator(2)
    state = fipa.aggregate(ZERO, updates_of({0: 3, 1: 5, 2: 9}, rng), FedVARP()).state
    updates = updates_of({0: 3, 2: 9}, rng)
    result = fipa.aggregate(ZERO, updates, FedVARP(), state)
    mean = (3 * state["update.0"] + 5 * state["update.1"] + 9 * state["update.2"]) / 17
    parts = [n / 12 * (u.delta - state[f"update.{u.client_id}"] + mean) for n, u in zip((3, 9), updates, strict=True)]
    d = sum(parts)
    torch.testing.assert_close(result.theta, d, rtol=1e-12, atol=1e-13)
    expected = {i: float(part @ d / (d @ d)) for i, part in zip((0, 2), parts, strict=True)}
    assert result.diagnostics.shares == pytest.approx(expected)


# --- the state ---


def test_the_state_is_in_the_order_of_clients_and_its_own() -> None:
    """Whoever came first; and whatever is done to the updates later."""
    rng, state = generator(1), {}
    for clients in ({10: 1, "b": 2}, {9: 3, "9": 4}):
        updates = updates_of(clients, rng)
        given, state = state, fipa.aggregate(ZERO, updates, FedVARP(), state).state
        assert set(given) <= set(state)
        assert not given or list(given) == ["update.10", "update.'b'", "examples.10", "examples.'b'"]
        kept = {u.client_id: u.delta.clone() for u in updates}
        for update in updates:
            update.delta.fill_(7.0)
        assert all(torch.equal(state[f"update.{i!r}"], delta) for i, delta in kept.items())
    ids = ["9", "10", "'9'", "'b'"]
    assert list(state) == [f"update.{i}" for i in ids] + [f"examples.{i}" for i in ids]
    assert [int(state[f"examples.{i}"]) for i in ids] == [3, 1, 4, 2]


def test_a_state_in_another_order_gives_the_same_bits() -> None:
    """Files do not keep the order of names."""
    rng = generator(5)
    state = fipa.aggregate(ZERO, updates_of(dict.fromkeys(range(12), 3), rng), FedVARP()).state
    updates = updates_of({4: 2, 11: 7}, rng)
    one, other = (fipa.aggregate(ZERO, updates, FedVARP(), given) for given in (state, dict(reversed(state.items()))))
    assert torch.equal(one.theta, other.theta)
    assert list(one.state) == list(other.state)


def test_ids_of_numpy_are_the_same_clients() -> None:
    updates = updates_of({0: 3, 1: 5}, generator(1))
    odd = [ClientUpdate(u.delta, u.num_examples, client_id=np.int64(u.client_id)) for u in updates]
    assert list(fipa.aggregate(ZERO, odd, FedVARP()).state) == list(fipa.aggregate(ZERO, updates, FedVARP()).state)


def test_inside_momentum() -> None:
    rng, inner, outer, v = generator(6), {}, {}, ZERO
    for clients in ({0: 3, 1: 5}, {1: 5}, {0: 3}):
        updates = updates_of(clients, rng)
        alone = fipa.aggregate(ZERO, updates, FedVARP(), inner)
        both = fipa.aggregate(ZERO, updates, FedAvgM(0.5, inner=FedVARP()), outer)
        v, inner, outer = 0.5 * v + alone.theta, alone.state, both.state
        torch.testing.assert_close(both.theta, v)


# --- what it refuses ---


def test_clients_without_ids() -> None:
    updates = [ClientUpdate(torch.ones(2), 3), ClientUpdate(torch.ones(2), 4)]
    with pytest.raises(UpdateError, match=r"client #0 has no id, but FedVARP remembers.*client_id=\.\.\."):
        fipa.aggregate(torch.zeros(2), updates, FedVARP())


def test_a_population_that_is_too_small() -> None:
    updates = updates_of({0: 3, 1: 5, 2: 1}, generator(1))
    with pytest.raises(UpdateError, match=r"population=2, but 3 clients sent updates: count all"):
        fipa.aggregate(ZERO, updates, FedAvg(), population=2)
    state = fipa.aggregate(ZERO, updates[:2], FedVARP(), population=2).state
    with pytest.raises(UpdateError, match=r"population=2, but FedVARP has seen 3 clients: count all.*state=None"):
        fipa.aggregate(ZERO, updates[2:], FedVARP(), state, population=2)


def test_a_state_of_other_parameters() -> None:
    state = fipa.aggregate(ZERO, updates_of({0: 3, 7: 2}, generator(1)), FedVARP()).state
    with pytest.raises(LayoutError, match=r"'update.0' has 5 elements, the update 2: start with state=None"):
        fipa.aggregate(torch.zeros(2), [ClientUpdate(torch.ones(2), 3, client_id=0)], FedVARP(), state)
    with pytest.raises(LayoutError, match=r"'update.7' is torch.float64"):
        fipa.aggregate(torch.zeros(P), [ClientUpdate(torch.ones(P), 3, client_id=1)], FedVARP(), {
            name: t for name, t in state.items() if not name.endswith(".0")
        })  # fmt: skip


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf")])
def test_steps_that_make_no_sense(step: float) -> None:
    with pytest.raises(FipaError, match=r"FedVARP\(step="):
        FedVARP(step=step)
