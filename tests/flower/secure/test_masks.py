"""Keys, seals and masks."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fipa.flower.secure import SecureAggregationError, masks

KEYS = {client: (masks.new_private_key(), masks.new_private_key()) for client in (1, 2)}
PUBLIC = {client: tuple(map(masks.public_key, pair)) for client, pair in KEYS.items()}
SETTINGS = {"run": "run", "round_number": 1, "threshold": 2, "fraction_bits": 20, "length": 5, "keys": PUBLIC}
BOUND = masks.context(**SETTINGS)


def test_both_sides_agree():
    one = masks.pair_mask_key(KEYS[1][1], PUBLIC[2][1], BOUND, 1, 2)
    assert one == masks.pair_mask_key(KEYS[2][1], PUBLIC[1][1], BOUND, 2, 1)
    assert masks.pair_sign(1, 2) == -masks.pair_sign(2, 1) == 1


def test_purposes_and_directions_have_keys_of_their_own():
    private, public = KEYS[1][0], PUBLIC[2][0]
    keys = {masks.agree(private, public, BOUND, name, *ids) for name in ("a", "b") for ids in ((1, 2), (2, 1))}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "change",
    [{"run": "other"}, {"round_number": 2}, {"threshold": 1}, {"fraction_bits": 2}, {"length": 6}, {"keys": {}}],
)
def test_context_binds_all_settings(change):
    assert masks.context(**{**SETTINGS, **change}) != BOUND


def test_context_does_not_depend_on_the_order_of_clients():
    assert masks.context(**{**SETTINGS, "keys": dict(reversed(PUBLIC.items()))}) == BOUND


def test_key_without_secret_is_refused():
    with pytest.raises(SecureAggregationError, match="clients 1 and 2"):
        masks.agree(KEYS[1][0], bytes(32), BOUND, "channel", 1, 2)


def test_seals_open_only_unchanged_and_with_the_same_context():
    key = bytes(range(32))
    sealed = masks.seal(key, b"share", BOUND)
    assert len(sealed) == len(b"share") + masks.SEALED_EXTRA
    assert masks.unseal(key, sealed, BOUND) == b"share"
    assert masks.unseal(key, sealed, bytes(32)) is None
    assert masks.unseal(bytes(32), sealed, BOUND) is None
    assert masks.unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), BOUND) is None


@pytest.mark.parametrize("length", [0, 1, 5, 2**17, 2**17 + 3, 300_000])
def test_mask_is_the_keystream_and_can_be_taken_away(length):
    key = bytes(range(32))
    keystream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * length))
    vector = np.arange(length, dtype=np.uint64)
    masks.add_mask(vector, key, 1)
    assert np.array_equal(vector, np.arange(length, dtype=np.uint64) + np.frombuffer(keystream, dtype="<u8"))
    masks.add_mask(vector, key, -1)
    assert np.array_equal(vector, np.arange(length))
