"""Sums of additive statistics that the server learns without seeing any client's part.

The protocol of Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine learning", for a
server that follows the protocol but is curious. Each client hides its vector under one mask of its own and one mask
for each other client; the masks shared by two clients cancel in the sum. All masks can be rebuilt from shares that the
clients hold for each other, so that the sum survives clients that leave.

The server learns the sum, hence also the total number of examples, and who took part. It learns no more together with
fewer than `threshold` clients, but for what these know themselves. Not covered: a server that makes up clients or
swaps keys (nothing here proves who owns a key), false or poisoned vectors, and what the sum itself gives away.
"""

from __future__ import annotations

from fipa.flower.secure.client import SecureClient
from fipa.flower.secure.messages import Message, SecureAggregationError
from fipa.flower.secure.server import SecureServer
from fipa.flower.secure.statistics import flatten, unflatten, vector_length

__all__ = [
    "Message",
    "SecureAggregationError",
    "SecureClient",
    "SecureServer",
    "flatten",
    "unflatten",
    "vector_length",
]
