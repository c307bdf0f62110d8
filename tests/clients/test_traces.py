"""Traces are shared between functions with the same operations, hold no data, and follow what is outside of them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fipa.clients import traces
from fipa.clients.traces import traced

THETAS, X = torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([0.5, 2.0, -1.0])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> dict[object, object]:
    """No traces of other tests."""
    fresh: dict[object, object] = {}
    monkeypatch.setattr(traces, "_known", fresh)
    return fresh


def product(slope: float, shift: Tensor) -> Callable[..., Tensor]:
    return lambda thetas, terms: slope * thetas * terms[0] - shift


def test_the_same_operations_are_traced_once(known: dict[object, object]) -> None:
    """Whatever tensors they take from outside; another number makes another function."""
    for slope, shift, count in [(2.5, 1.0, 1), (2.5, 7.0, 1), (3.5, 1.0, 2)]:
        outside = torch.full((3,), shift)
        run = traced(product(slope, outside), THETAS, (X,))
        assert len(known) == count
        assert all(known.values())  # torch's interpreter took them
        for thetas, x in [(THETAS, X), (-THETAS, X + 1)]:
            assert torch.equal(run(thetas, (x,)), product(slope, outside)(thetas, (x,)))


def test_each_function_follows_its_own_tensor() -> None:
    """As with a coefficient that is changed in place, where a second run begins at the first value again."""
    first = torch.tensor([1.0, 2.0, 3.0])
    old = traced(product(2.0, first), THETAS, (X,))
    second = first.clone()
    first.mul_(10)
    new = traced(product(2.0, second), THETAS, (X,))
    assert torch.equal(old(THETAS, (X,)), 2 * THETAS * X - first)
    assert torch.equal(new(THETAS, (X,)), 2 * THETAS * X - second)


def test_the_default_dtype_is_part_of_a_function(known: dict[object, object]) -> None:
    def function(thetas: Tensor, terms: tuple[Tensor, ...]) -> Tensor:
        return thetas * torch.linspace(0, 1 / 3, 3)

    single = traced(function, THETAS, (X,))(THETAS, (X,))
    torch.set_default_dtype(torch.float64)
    try:
        double = traced(function, THETAS, (X,))(THETAS, (X,))
        assert double.dtype == torch.float64
        assert torch.equal(double, function(THETAS, ()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert single.dtype == torch.float32
    assert len(known) == 2


def test_constants_of_any_dtype() -> None:
    half = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    run = traced(product(2.0, half), THETAS, (X,))
    assert torch.equal(run(THETAS, (X,)), 2 * THETAS * X - half)


def test_no_data_outlive_their_owner(known: dict[object, object]) -> None:
    x, shift = torch.randn(3), torch.randn(3)
    kept = [StorageWeakRef(t.untyped_storage()) for t in (x, shift)]
    run = traced(product(2.0, shift), THETAS, (x,))
    run(THETAS, (x,))
    assert not any(one.expired() for one in kept)
    del run, x, shift
    gc.collect()
    assert len(known) == 1
    assert all(one.expired() for one in kept)


def test_what_cannot_be_traced_runs_as_it_is_and_is_not_tried_again(
    known: dict[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise RuntimeError("an operation that it does not know")

    monkeypatch.setattr(torch.jit, "trace", refuse)
    for shift in (torch.ones(3), torch.zeros(3)):
        run = traced(product(2.0, shift), THETAS, (X,))
        assert torch.equal(run(THETAS, (X,)), 2 * THETAS * X - shift)
    assert len(tried) == 1
    assert list(known.values()) == [None]
