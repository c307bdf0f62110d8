"""Real numbers as integers modulo 2^64, so that sums are exact and masks hide them perfectly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fipa.flower.secure.messages import SecureAggregationError

FRACTION_BITS = 28  # steps of 4e-9; sums up to 3e10
MOST_FRACTION_BITS = 52  # more than a float64 can hold of a number near 1


def encode(values: NDArray[np.float64], fraction_bits: int, clients: int) -> NDArray[np.uint64]:
    """Round to multiples of `2**-fraction_bits`; negative numbers wrap around.

    Parameters
    ----------
    clients
        How many such vectors may be added up: their sum must not overflow either.

    Examples
    --------
    >>> encode(np.array([0.5, -0.25]), fraction_bits=2, clients=1)
    array([                   2, 18446744073709551615], dtype=uint64)
    """
    largest = max(float(values.max()), -float(values.min())) if values.size else 0.0
    if not np.isfinite(largest):  # max and min pass NaN on
        place = int(np.argmin(np.isfinite(values)))
        raise SecureAggregationError(
            f"entry {place} of the vector is {values[place]}: a masked sum cannot leave it out, so do not send it"
        )
    # One more half step for the rounding.
    if (largest * 2.0**fraction_bits + 0.5) * clients >= 2.0**63:
        raise SecureAggregationError(
            f"the largest entry {largest:.3g} with {fraction_bits} fraction bits overflows 63 bits when {clients} "
            f"clients are added: {_advice(largest, clients)}"
        )
    scaled = values * 2.0**fraction_bits
    return np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)


def decode(total: NDArray[np.uint64], fraction_bits: int) -> NDArray[np.float64]:
    """The real numbers that a sum of encoded vectors stands for.

    Examples
    --------
    >>> decode(encode(np.array([0.5, -0.25]), 2, 1), 2)
    array([ 0.5 , -0.25])
    """
    values = total.view(np.int64).astype(np.float64)
    values *= 2.0**-fraction_bits
    return values


def _advice(largest: float, clients: int) -> str:
    fitting = 62 - int(np.ceil(np.log2(largest) + np.log2(clients)))
    if fitting < 0:
        return "send smaller values, for example by clipping the update"
    return f"use fraction_bits={min(fitting, MOST_FRACTION_BITS)} or less on all clients, or send smaller values"
