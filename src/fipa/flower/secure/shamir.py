"""Shamir's secret sharing: any `threshold` shares give the secret, fewer say nothing about it.

A secret is the value at 0 of a random polynomial over the integers modulo a prime, a share its value at 1, 2, ...
Python's integers do not run in constant time: good for parties that see messages, not for ones that time the process.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache

from fipa.flower.secure.messages import SecureAggregationError

PRIME = 2**521 - 1
SHARE_SIZE = 66  # bytes
SECRET_SIZE = 32  # bytes


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares number 1 to `count` of a secret of 32 bytes."""
    if not 1 <= threshold <= count:
        raise SecureAggregationError(f"threshold {threshold} must be between 1 and the number of shares {count}")
    if len(secret) != SECRET_SIZE:
        raise SecureAggregationError(f"a secret has {SECRET_SIZE} bytes, not {len(secret)}")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]  # the highest first
    coefficients.append(int.from_bytes(secret, "big"))
    shares = []
    for point in range(1, count + 1):
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_SIZE, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret, from exactly `threshold` shares by their number, or None if they do not belong together.

    Wrong shares may also give another secret: compare with something known about it.
    """
    points = tuple(sorted(shares))
    numbers = (int.from_bytes(shares[point], "big") for point in points)
    value = sum(weight * number for weight, number in zip(_weights(points), numbers, strict=True)) % PRIME
    return value.to_bytes(SECRET_SIZE, "big") if value < 2 ** (8 * SECRET_SIZE) else None


@lru_cache(maxsize=4)  # the server joins the shares of the same few clients for every secret
def _weights(points: tuple[int, ...]) -> list[int]:
    """What the values at `points` count for in the value at 0 (Lagrange)."""
    weights = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
