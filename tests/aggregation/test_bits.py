"""Equal numbers give equal bits, whatever strides and addresses they come with, under every rule.

Processors round matrix products differently by strides and addresses; some agree by luck. So these tests also look at
what rules get, and tests/test_processors.py runs them again where torch and MKL take this processor for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fipa
from aggregation.layouts import FORMS, RULES, formed, odd_address, padded, same_bits, transposed, updates_for
from aggregation.strategies import tensors_in
from fipa.aggregation.registry import RULES as REGISTERED
from fipa.aggregation.rule import Step, aggregator
from fipa.linalg import aligned

DTYPES = [torch.float32, torch.float64]


def is_canonical(t: Tensor) -> bool:
    """Row by row, with the strides that a new tensor has, from an address that 64 divides."""
    return t.stride() == torch.zeros(t.shape).stride() and t.data_ptr() % 64 == 0


# --- every rule, every form ---


def test_every_registered_rule_is_here() -> None:
    assert {type(rule) for rule in RULES.values()} == set(REGISTERED.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_same_bits_in_every_form(rule: fipa.Rule, dtype: torch.dtype) -> None:
    """Two rounds, so that the state is there, and of every form too."""
    assert same_bits(rule, dtype, parameters=901, rank=9) == []


@pytest.mark.parametrize("name", ["fipa", "fipa, floor", "completed-fipa, damped", "additive-fipa, completed", "foof"])
def test_the_same_bits_of_larger_matrices(name: str) -> None:
    assert same_bits(RULES[name], torch.float32, parameters=20_011, rank=33) == []


# --- what a rule gets ---


def spied(theta: Tensor, updates: list[fipa.ClientUpdate], **more: object) -> list[Tensor]:
    """All tensors that a rule sees, its state included."""
    seen: list[Tensor] = []

    def spy(cohort: fipa.Cohort, state: Mapping[str, Tensor]) -> Step:
        seen.extend(tensors_in(cohort))
        seen.extend(state.values())
        return Step(torch.zeros_like(cohort.deltas[0]), 0.0, 1.0, [0.0] * len(cohort.ids))

    aggregator(theta, updates)(spy, **more)
    return seen


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("rule", ["fedavg", "fipa", "additive-fipa", "diagonal-fisher", "foof"])
def test_what_rules_see_is_canonical(rule: str, form: Callable[[Tensor], Tensor]) -> None:
    updates = formed(updates_for(RULES[rule], torch.float32, 901, 9, seed=1), form)
    count = len(tensors_in(updates))
    sent = [t for t in tensors_in(updates) if t.numel() > 1]
    assert any(not is_canonical(t) for t in sent) == (form is not FORMS["as it is"])
    others = {update.client_id: form(2 * update.delta) for update in updates}
    state = {"buffer": form(torch.ones(901)), "count": torch.tensor(3), "nothing": torch.zeros(0)}
    for more in ({"state": state}, {"state": state, "deltas": others}):
        seen = spied(form(torch.zeros(901)), updates, **more)
        assert len(seen) == count + 1 + len(state)  # and the parameters
        assert all(is_canonical(t) for t in seen)


def test_updates_by_name_are_canonical() -> None:
    layout = fipa.Layout(("a", "b"), ((3, 5), (7,)))
    delta = {name: transposed(t) for name, t in layout.unflatten(odd_address(torch.randn(22))).items()}
    theta = {name: torch.zeros_like(t) for name, t in delta.items()}
    assert all(is_canonical(t) for t in spied(theta, [fipa.ClientUpdate(delta, 3)]))


def test_a_state_in_any_form_gives_the_same_bits() -> None:
    """A state that was saved comes back at other addresses."""
    updates = updates_for(fipa.FedAvg(), torch.float32, 901, 9, seed=1)
    theta = torch.zeros(901)
    for rule in (fipa.FedAvgM(), fipa.FedAdam(), fipa.FedVARP()):
        state = fipa.aggregate(theta, updates, rule).state
        expected = fipa.aggregate(theta, updates, rule, state)
        for form in FORMS.values():
            other = fipa.aggregate(theta, updates, rule, {name: form(t) for name, t in state.items()})
            assert torch.equal(other.theta, expected.theta)
            assert all(torch.equal(t, expected.state[name]) for name, t in other.state.items())


# --- the form itself ---


def tensors() -> Iterator[Tensor]:
    numbers = torch.arange(30.0)
    yield numbers.reshape(6, 5)
    yield numbers.reshape(6, 5).T
    yield numbers.reshape(6, 5)[:, :3]
    yield numbers.reshape(6, 5)[:, ::2]
    yield numbers[1:7]
    yield numbers.flip(0)[3:]
    yield numbers[2]
    yield numbers[:0]
    yield numbers.reshape(6, 5)[:, :0]
    yield numbers.reshape(2, 3, 5).permute(2, 0, 1)
    yield numbers[0].expand(4, 3)
    yield torch.arange(9)[1:]


@pytest.mark.parametrize("tensor", list(tensors()), ids=lambda t: f"{tuple(t.shape)} {t.stride()}")
def test_aligned_keeps_the_numbers(tensor: Tensor) -> None:
    before = tensor.clone()
    result = aligned(tensor)
    assert is_canonical(result)
    assert result.dtype == tensor.dtype
    assert torch.equal(result, before)
    assert torch.equal(tensor, before)


def test_aligned_copies_only_what_is_not_so_already() -> None:
    for tensor in (torch.randn(7, 3), torch.randn(5), torch.tensor(2.0), torch.zeros(0, 4), torch.ones(901, 1)):
        assert aligned(tensor) is tensor
    for form in (padded, transposed, odd_address):
        tensor = form(torch.randn(7, 3))
        assert aligned(tensor) is not tensor


def test_strides_of_axes_of_length_one_count() -> None:
    """Torch calls both contiguous, and picks another product for each."""
    column = torch.randn(1, 901).T
    assert column.is_contiguous()
    assert column.stride() == (1, 901)
    assert aligned(column).stride() == (1, 1)


@pytest.mark.parametrize("rank", [1, 9, fipa.RelativeThreshold(0.05)], ids=str)
@pytest.mark.parametrize("solver", ["exact", "krylov", "subspace"])
@pytest.mark.parametrize("examples", [5, 100])
def test_sketches_are_made_canonical(examples: int, solver: str, rank: object) -> None:
    """So that a server need not copy them, and a client does not keep a wider matrix alive."""
    torch.manual_seed(0)
    sketch = fipa.sketch(torch.nn.Linear(8, 3), torch.randn(examples, 8), rank=rank, solver=solver)
    assert all(is_canonical(t) for t in sketch.tensors().values())


def test_an_update_in_canonical_form() -> None:
    """For those who compute with an update before they aggregate it."""
    for rule in RULES.values():
        for update in formed(updates_for(rule, torch.float64, 901, 9, seed=1), padded):
            result = update.canonical()
            assert type(result.sketch) is type(update.sketch)
            assert replace(result, delta=update.delta, sketch=update.sketch).__dict__ == update.__dict__
            pairs = zip(tensors_in(result), tensors_in(update), strict=True)
            assert all(is_canonical(one) and torch.equal(one, other) for one, other in pairs)
    named = fipa.ClientUpdate({"a": transposed(torch.randn(3, 4)), "b": odd_address(torch.randn(5))}, 2).canonical()
    assert list(named.delta) == ["a", "b"]
    assert all(is_canonical(t) for t in named.delta.values())
