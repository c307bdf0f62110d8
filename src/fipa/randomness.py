"""All randomness of a run comes from (seed, round, client, purpose), whoever computes what when."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, purpose: str, round_number: int = 0, client: int = -1) -> int:
    """A 63-bit seed that is the same on every machine.

    Examples
    --------
    >>> seed_for(0, "data", client=1) == seed_for(0, "data", client=1) != seed_for(0, "data", client=2)
    True
    """
    text = f"{seed}/{purpose}/{round_number}/{client}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_for(seed: int, purpose: str, round_number: int = 0, client: int = -1) -> torch.Generator:
    """A generator of its own for every purpose."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, round_number, client))
