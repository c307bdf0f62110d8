"""Seeds are the same everywhere, and different for everything."""

from __future__ import annotations

from itertools import product

import torch

from fipa.randomness import generator_for, seed_for


def test_seeds_are_the_same_on_every_machine_and_in_every_release() -> None:
    """From the command `b2sum -l 64`, without the last bit. Changing these changes all published numbers."""
    assert seed_for(0, "data", client=1) == 1064113181668782066
    assert seed_for(7, "batches", 12, 3) == 1549052304663242878


def test_all_parts_count() -> None:
    cases = list(product(range(3), ("data", "batches"), range(4), range(-1, 12)))
    seeds = {seed_for(*case) for case in cases}
    assert len(seeds) == len(cases)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_generators_start_at_their_seed() -> None:
    first, again = (generator_for(3, "data", 1, 2) for _ in range(2))
    assert torch.equal(torch.rand(3, generator=first), torch.rand(3, generator=again))
    expected = torch.Generator().manual_seed(seed_for(3, "data", 1, 2))
    assert torch.equal(torch.rand(3, generator=generator_for(3, "data", 1, 2)), torch.rand(3, generator=expected))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.rand(3, generator=generator_for(0, "x"))
    assert torch.equal(torch.get_rng_state(), before)
