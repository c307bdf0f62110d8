"""Secret sharing."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fipa.flower.secure import SecureAggregationError
from fipa.flower.secure.shamir import PRIME, SHARE_SIZE, join, split


@st.composite
def chosen_shares(draw):
    count = draw(st.integers(1, 9))
    threshold = draw(st.integers(1, count))
    chosen = draw(st.permutations(range(1, count + 1)))[:threshold]
    return count, threshold, chosen


@given(st.binary(min_size=32, max_size=32), chosen_shares())
def test_any_threshold_shares_give_the_secret(secret, setting):
    count, threshold, chosen = setting
    shares = split(secret, threshold, count)
    assert {len(share) for share in shares} == {SHARE_SIZE}
    assert join({i: shares[i - 1] for i in chosen}) == secret


def test_fewer_give_something_else():
    secret = secrets.token_bytes(32)
    shares = split(secret, 3, 5)
    assert join({1: shares[0], 2: shares[1]}) != secret


def test_a_wrong_share_is_noticed_or_gives_something_else():
    shares = split(bytes(32), 2, 3)
    assert join({1: shares[0], 2: shares[2]}) != bytes(32)


def test_shares_of_a_known_polynomial():
    """Value 5 + 7 x at 2 and 3."""
    shares = {x: (5 + 7 * x).to_bytes(SHARE_SIZE, "big") for x in (2, 3)}
    assert join(shares) == (5).to_bytes(32, "big")


def test_the_same_secret_is_shared_differently_each_time():
    assert split(bytes(32), 2, 2) != split(bytes(32), 2, 2)


def test_prime():
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7))


@pytest.mark.parametrize("threshold", [0, 4])
def test_needs_a_sound_threshold(threshold):
    with pytest.raises(SecureAggregationError, match=f"threshold {threshold} must be between 1 and"):
        split(bytes(32), threshold, 3)


def test_needs_a_secret_of_one_size():
    with pytest.raises(SecureAggregationError, match="32 bytes, not 31"):
        split(bytes(31), 2, 3)
