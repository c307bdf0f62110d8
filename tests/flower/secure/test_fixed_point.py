"""Real numbers in the ring of integers modulo 2^64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fipa.flower.secure import SecureAggregationError
from fipa.flower.secure.fixed_point import FRACTION_BITS, decode, encode

NUMBERS = st.floats(-1e6, 1e6)


@given(arrays(np.float64, 20, elements=NUMBERS), st.integers(0, FRACTION_BITS))
def test_there_and_back(values, bits):
    assert np.abs(decode(encode(values, bits, clients=10), bits) - values).max() <= 0.5 * 2.0**-bits


@given(arrays(np.float64, (3, 5), elements=NUMBERS))
def test_sums_are_exact(values):
    encoded = [encode(row, FRACTION_BITS, clients=3) for row in values]
    rounded = np.rint(values * 2.0**FRACTION_BITS).astype(np.int64).sum(axis=0)
    assert np.array_equal(decode(sum(encoded), FRACTION_BITS), rounded / 2.0**FRACTION_BITS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(value):
    with pytest.raises(SecureAggregationError, match=r"entry 2 of the vector is -?(nan|inf)"):
        encode(np.array([0.0, 1.0, value, np.nan]), 20, clients=2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_refuses_what_could_overflow_in_the_sum(sign):
    values = np.array([1.0, sign * 2.0**33])
    encode(values, 28, clients=3)
    with pytest.raises(SecureAggregationError, match=r"largest entry 8.59e\+09 .* 4 clients .* fraction_bits=27"):
        encode(values, 28, clients=4)
    encode(values, 27, clients=4)


def test_advice_when_no_fraction_helps():
    with pytest.raises(SecureAggregationError, match="send smaller values, for example by clipping"):
        encode(np.array([1e300]), 28, clients=4)


def test_leaves_its_input_alone():
    values = np.array([0.3, -0.7])
    encode(values, 10, clients=2)
    assert values.tolist() == [0.3, -0.7]


def test_empty():
    assert decode(encode(np.zeros(0), 10, clients=2), 10).size == 0
