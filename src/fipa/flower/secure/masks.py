"""Keys that two clients agree on, what they encrypt with them, and the masks that grow from a key.

All primitives are those of `cryptography`: X25519, HKDF with SHA-256, ChaCha20 and ChaCha20-Poly1305.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fipa.flower.secure.messages import SecureAggregationError

KEY_SIZE = 32
NONCE_SIZE = 12
SEALED_EXTRA = NONCE_SIZE + 16  # by how much sealing lengthens a text: the nonce and the tag
_BLOCK = 2**20  # bytes of mask made at a time: fits the cache


def new_private_key() -> bytes:
    """A private key for `public_key` and `agree`."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """What others need to know of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def context(
    run: str,
    round_number: int,
    threshold: int,
    fraction_bits: int,
    length: int,
    keys: Mapping[int, tuple[bytes, bytes]],
) -> bytes:
    """A digest of all that the clients of a round must see alike; it enters every key.

    Clients to whom the server shows different lists, rounds or settings cannot read each other's shares.
    """
    members = [[client, *(key.hex() for key in keys[client])] for client in sorted(keys)]
    text = json.dumps([run, round_number, threshold, fraction_bits, length, members])
    return hashlib.sha256(text.encode()).digest()


def agree(private: bytes, public: bytes, bound: bytes, purpose: str, first: int, second: int) -> bytes:
    """The key that two clients share for a purpose, within one `context`.

    Parameters
    ----------
    bound
        The `context`.
    first, second
        The ids of the two, in an order on which both agree.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of low order: the secret would be known to all
        raise SecureAggregationError(f"the public keys of clients {first} and {second} give no secret") from error
    return derive(shared, bound, f"{purpose} {first} {second}")


def derive(secret: bytes, bound: bytes, purpose: str) -> bytes:
    """A key for one purpose and one `context`."""
    return HKDF(SHA256(), KEY_SIZE, salt=bound, info=f"fipa secure sum: {purpose}".encode()).derive(secret)


def commitment(seed: bytes, bound: bytes) -> bytes:
    """Lets the server recognise a seed, not guess it."""
    return derive(seed, bound, "commitment")


def self_mask_key(seed: bytes, bound: bytes) -> bytes:
    """The key of the mask that a client has for itself."""
    return derive(seed, bound, "self mask")


def pair_mask_key(private: bytes, public: bytes, bound: bytes, one: int, other: int) -> bytes:
    """The key of the mask that two clients share; either can make it."""
    return agree(private, public, bound, "pair mask", min(one, other), max(one, other))


def pair_sign(client: int, other: int) -> int:
    """With which sign `client` adds the mask it shares with `other`: plus for the smaller id."""
    return 1 if client < other else -1


def seal(key: bytes, text: bytes, bound: bytes) -> bytes:
    """Encrypt; only who has the key and names the same `bound` can open it."""
    nonce = os.urandom(NONCE_SIZE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, bound)


def unseal(key: bytes, sealed: bytes, bound: bytes) -> bytes | None:
    """The text, or None if it was changed or meant for another purpose."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_SIZE], sealed[NONCE_SIZE:], bound)
    except InvalidTag:
        return None


def add_mask(vector: NDArray[np.uint64], key: bytes, sign: int) -> None:
    """Add the mask of a key to a vector (subtract it if `sign` is negative), in place, modulo 2^64.

    The mask is the ChaCha20 keystream. A key makes one mask only, so its nonce may be constant.
    """
    stream = Cipher(algorithms.ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
    operation = np.add if sign > 0 else np.subtract
    zeros = memoryview(bytes(min(_BLOCK, vector.nbytes)))
    raw = memoryview(bytearray(zeros))
    mask = np.frombuffer(raw, dtype="<u8")  # the same numbers on every machine
    for start in range(0, len(vector), _BLOCK // 8):
        block = vector[start : start + _BLOCK // 8]
        size = 8 * len(block)
        stream.update_into(zeros[:size], raw[:size])
        operation(block, mask[: len(block)], out=block)
