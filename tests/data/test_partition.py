"""Every partitioner deals out every example once, whatever the labels; each keeps its own promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter
from torch import Tensor

from fipa.data.partition import (
    IID,
    BalancedDirichlet,
    Dirichlet,
    Indices,
    Partition,
    QuantitySkew,
    Shards,
    dirichlet,
    histogram,
)
from fipa.errors import FipaError

alphas = st.floats(-6, 6).map(lambda exponent: 10**exponent)
smallest = st.integers(1, 3)
partitions = st.one_of(
    st.builds(BalancedDirichlet, alpha=alphas),
    st.builds(Dirichlet, alpha=alphas, smallest=smallest),
    st.builds(Shards, per_client=st.integers(1, 3)),
    st.builds(QuantitySkew, alpha=alphas, smallest=smallest),
    st.just(IID()),
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lists(parts: list[Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def needed(partition: Partition) -> int:
    """Examples each client must have."""
    if isinstance(partition, Shards):
        return partition.per_client
    return getattr(partition, "smallest", 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Partition, Tensor, int]:
    """Often with as few examples as will do, and with classes that do not occur."""
    partition = draw(partitions)
    clients = draw(st.integers(1, 8))
    size = clients * needed(partition) + draw(st.sampled_from([0, 0, 1, 5, 40]))
    labels = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    return partition, torch.tensor(labels), clients


@given(cases(), st.integers(0, 99))
@settings(deadline=None)
@example((Dirichlet(alpha=1e-6, smallest=3), torch.full((24,), 6), 8), 0)  # all to one client, at first
@example((QuantitySkew(alpha=1e-6, smallest=3), torch.full((24,), 6), 8), 0)
def test_every_example_once(case: tuple[Partition, Tensor, int], seed: int) -> None:
    partition, labels, clients = case
    parts = partition.split(labels, clients, rng(seed))
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    for part in parts:
        assert part.dtype == torch.int64
        assert part.tolist() == sorted(part.tolist())
        assert len(part) >= needed(partition)
    assert lists(parts) == lists(partition.split(labels, clients, rng(seed)))
    if isinstance(partition, BalancedDirichlet | IID):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    if isinstance(partition, Shards):
        assert max(map(len, parts)) - min(map(len, parts)) <= partition.per_client


@pytest.mark.parametrize("partition", [BalancedDirichlet(), Dirichlet(), Shards(), QuantitySkew(), IID()])
def test_the_seed_decides(partition: Partition) -> None:
    labels = torch.arange(200) % 10
    assert lists(partition.split(labels, 5, rng(0))) != lists(partition.split(labels, 5, rng(1)))


@pytest.mark.parametrize(
    ("alpha", "golden"),
    [
        (0.3, [[0, 4, 8, 12, 16], [1, 2, 6, 10, 20], [3, 7, 11, 18, 19], [5, 13, 15, 21, 23], [9, 14, 17, 22]]),
        (1e-3, [[0, 4, 8, 12, 20], [1, 9, 13, 17, 21], [2, 6, 10, 14, 18], [5, 11, 15, 16, 22], [3, 7, 19, 23]]),
        (1e2, [[7, 9, 16, 18, 23], [0, 1, 5, 6, 19], [12, 13, 15, 21, 22], [2, 4, 8, 11, 17], [3, 10, 14, 20]]),
    ],
)
def test_the_balanced_dirichlet_of_earlier_runs(alpha: float, golden: list[list[int]]) -> None:
    assert lists(BalancedDirichlet(alpha=alpha).split(torch.arange(24) % 4, 5, rng())) == golden


def test_balanced_dirichlet_with_large_alpha_is_nearly_iid() -> None:
    labels = torch.arange(10_000) % 10
    counts = histogram(labels, BalancedDirichlet(alpha=1e6).split(labels, 10, rng()), 10)
    assert int((counts - 100).abs().max()) < 50  # five standard deviations


def test_balanced_dirichlet_with_small_alpha_takes_one_class_while_it_lasts() -> None:
    labels = torch.arange(10_000) % 2  # a class is five shares
    counts = histogram(labels, BalancedDirichlet(alpha=1e-6).split(labels, 10, rng()), 2)
    assert counts.max(1).values.tolist() == [1000] * 10
    labels = torch.arange(12_000) % 4  # two shares and a half: what is missing comes from the rest
    counts = histogram(labels, BalancedDirichlet(alpha=1e-6).split(labels, 10, rng()), 4)
    assert int((counts.max(1).values == 1200).sum()) >= 4
    assert int(counts[0].max()) == 1200


def test_dirichlet_limits() -> None:
    labels = torch.arange(1000) % 4
    even = histogram(labels, Dirichlet(alpha=1e6).split(labels, 5, rng()), 4)
    assert int((even - 50).abs().max()) <= 2
    one_owner = histogram(labels, Dirichlet(alpha=1e-6).split(labels, 5, rng()), 4)
    assert bool((one_owner.max(0).values >= 245).all())  # but for what was moved to the empty-handed


def test_dirichlet_cuts_each_class_in_its_own_proportions() -> None:
    labels = torch.tensor([2] * 300 + [5] * 100)  # classes 0, 1, 3 and 4 do not occur
    counts = histogram(labels, Dirichlet(alpha=1.0).split(labels, 3, rng(3)), 6)
    again = rng(3)
    for label, size in ((2, 300), (5, 100)):
        torch.randperm(size, generator=again)
        expected = dirichlet(1.0, 3, again) * size
        assert float((counts[:, label] - expected).abs().max()) <= 1
    assert counts.sum(0).tolist() == [0, 0, 300, 0, 0, 100]


def test_only_what_is_missing_is_moved() -> None:
    labels = torch.zeros(1000, dtype=torch.int64)
    before = [len(part) for part in Dirichlet(alpha=0.1, smallest=1).split(labels, 6, rng(1))]
    after = [len(part) for part in Dirichlet(alpha=0.1, smallest=20).split(labels, 6, rng(1))]
    assert min(before) < 20
    for had, has in zip(before, after, strict=True):
        assert has == 20 if had < 20 else has <= had
    assert max(after) == after[before.index(max(before))] == max(before) - sum(max(0, 20 - n) for n in before)


def test_shards_hold_few_classes_each() -> None:
    labels = torch.arange(1000)[torch.randperm(1000, generator=rng())] % 10
    parts = Shards(per_client=2).split(labels, 50, rng())
    assert [len(part) for part in parts] == [20] * 50
    assert int((histogram(labels, parts, 10) > 0).sum(1).max()) <= 2


def test_quantity_skew_leaves_the_classes_alone() -> None:
    labels = torch.arange(20_000) % 2
    counts = histogram(labels, QuantitySkew(alpha=1.0).split(labels, 4, rng()), 2).double()
    sizes = counts.sum(1)
    assert float(sizes.max() / sizes.min()) > 2
    assert bool(((counts[:, 0] / sizes - 0.5).abs() < 2.5 / sizes.sqrt()).all())
    even = QuantitySkew(alpha=1e6).split(labels, 4, rng())
    assert max(abs(len(part) - 5000) for part in even) < 50


def test_indices_as_given(tmp_path: Path) -> None:
    labels = torch.arange(6)
    assert lists(Indices(parts=((4, 0), (3,))).split(labels, 2, rng())) == [[0, 4], [3]]
    file = tmp_path / "parts.json"
    file.write_text(json.dumps([[5, 2, 1], [0, 3, 4]]))
    assert lists(Indices(file=str(file), complete=True).split(labels, 2, rng())) == [[1, 2, 5], [0, 3, 4]]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (((0, 1), ()), "client 1 has no examples in parts"),
        (((0, 1), (2, 6)), "index 6 of client 1 in parts is out of range: there are 6 examples"),
        (((0, -1), (2,)), "index -1 of client 0"),
        (((0, 1), (2, 1)), "index 1 is twice in parts, for clients 0 and 1"),
        (((0, 0), (2,)), "index 0 is twice in parts, for clients 0 and 0"),
        (((0,), (1,), (2,)), "parts has 3 lists, but there are 2 clients"),
        (((0, 1), (2, 3)), "parts leaves out 2 of 6 examples"),
    ],
)
def test_bad_indices(parts: tuple[tuple[int, ...], ...], reason: str) -> None:
    with pytest.raises(FipaError, match=reason):
        Indices(parts=parts, complete=True).split(torch.arange(6), 2, rng())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot read .*parts.json: No such file"),
        ("[[0, 1], [2", "parts.json is not JSON"),
        ('{"0": [0, 1]}', "must hold a list of lists of integers"),
        ("[0, 1]", "must hold a list of lists of integers"),
        ("[[0], [1.0]]", "must hold a list of lists of integers"),
        ("[[0], [true]]", "must hold a list of lists of integers"),
        ("[[0], [0]]", "index 0 is twice in .*parts.json"),
        ("[]", "has 0 lists, but there are 2 clients"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "parts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FipaError, match=reason):
        Indices(file=str(file)).split(torch.arange(6), 2, rng())


def test_file_or_parts() -> None:
    for both_or_none in ({}, {"file": "x.json", "parts": ((0,),)}):
        with pytest.raises(FipaError, match="file or parts, one of the two"):
            Indices(**both_or_none)


@pytest.mark.parametrize("kind", [BalancedDirichlet, Dirichlet, QuantitySkew])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(kind: type, alpha: float) -> None:
    with pytest.raises(FipaError, match="alpha must be positive"):
        kind(alpha=alpha)


def test_sizes_must_be_positive() -> None:
    for kind in (Dirichlet, QuantitySkew):
        with pytest.raises(FipaError, match="smallest must be at least 1, got 0"):
            kind(smallest=0)
    with pytest.raises(FipaError, match="per_client must be at least 1, got 0"):
        Shards(per_client=0)


@pytest.mark.parametrize("partition", [BalancedDirichlet(), Dirichlet(), Shards(per_client=1), QuantitySkew(), IID()])
def test_too_few_examples(partition: Partition) -> None:
    with pytest.raises(FipaError, match="3 examples are too few for 4 clients"):
        partition.split(torch.zeros(3, dtype=torch.int64), 4, rng())
    with pytest.raises(FipaError, match="at least 1 client, got 0"):
        partition.split(torch.zeros(3, dtype=torch.int64), 0, rng())
    with pytest.raises(FipaError, match="0 examples are too few"):
        partition.split(torch.zeros(0, dtype=torch.int64), 1, rng())


@pytest.mark.parametrize("partition", [Dirichlet(smallest=5), Shards(per_client=5), QuantitySkew(smallest=5)])
def test_too_few_examples_for_the_least(partition: Partition) -> None:
    with pytest.raises(FipaError, match="19 examples are too few for 4 clients with at least 5 each"):
        partition.split(torch.zeros(19, dtype=torch.int64), 4, rng())


def test_histogram() -> None:
    labels = torch.tensor([0, 2, 2, 1])
    assert histogram(labels, [torch.tensor([1, 2]), torch.tensor([0, 3])], 4).tolist() == [[0, 0, 2, 0], [1, 1, 0, 0]]
    with pytest.raises(FipaError, match="none of the 2 classes"):
        histogram(labels, [torch.tensor([0])], 2)


@pytest.mark.parametrize(
    "partition",
    [
        BalancedDirichlet(alpha=0.5),
        Dirichlet(smallest=4),
        Shards(per_client=3),
        QuantitySkew(alpha=2.0),
        IID(),
        Indices(parts=((0, 1), (2,))),
    ],
)
def test_told_apart_by_name(partition: Partition) -> None:
    tables: TypeAdapter[Partition] = TypeAdapter(Annotated[Partition, Field(discriminator="name")])
    assert tables.validate_json(tables.dump_json(partition), strict=True) == partition
