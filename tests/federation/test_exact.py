"""Arithmetic that every party repeats; `test_basis.py` has what it is for."""

from __future__ import annotations

import hashlib

import pytest
import torch

from fipa.federation.exact import BLOCK, gram_of, mark_of
from fipa.threads import threads


@pytest.mark.parametrize("count", [5, 15, 23, 31])
def test_sums_of_any_numbers_do_not_depend_on_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Directions are on no grid, so that their products are rounded."""
    columns = torch.randn(40_000, count, generator=torch.Generator().manual_seed(count))
    found = []
    with threads(1):
        for cores in (1, 2, 5):
            monkeypatch.setattr("fipa.parallel.cores", lambda cores=cores: cores)
            found.append(gram_of(columns))
    torch.testing.assert_close(found[0], columns.double().T @ columns.double())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_checksum_is_one_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and nodes of one version agree on it, whatever their processors."""
    data = torch.arange(40 * BLOCK // 4, dtype=torch.float32)[: 39 * BLOCK // 4 + 3]
    raw = data.numpy().astype("<f4").tobytes()
    digests = [hashlib.sha256(raw[start : start + BLOCK]).digest() for start in range(0, len(raw), BLOCK)]
    for cores in (1, 64):
        monkeypatch.setattr("fipa.parallel.cores", lambda cores=cores: cores)
        assert mark_of(data) == hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def test_the_checksum_of_a_fixed_tensor() -> None:
    assert mark_of(torch.tensor([[1.0, -2.0], [0.5, 0.0]])) == "f6b3dadd27b27e844d82f3f7cadf9a6d"
    assert mark_of(torch.zeros(7, 0)) == "e3b0c44298fc1c149afbf4c8996fb924"
