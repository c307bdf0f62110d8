"""Additive statistics as a vector, and their sum back again."""

import numpy as np
import pytest
import torch

from fipa import AdditiveStatistics, Layout, UpdateError, pool
from fipa.flower.secure import SecureAggregationError, SecureClient, SecureServer, flatten, unflatten, vector_length

LAYOUT = Layout(("weight", "bias"), ((3, 4), (3,)))
P, L = 15, 4


def statistics(client, dtype=torch.float64):
    generator = torch.Generator().manual_seed(client)
    products, response, delta = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((P, L), (P,), (P,))
    )
    return AdditiveStatistics(products, response, delta, 10 + 7 * client, 5, LAYOUT)


def close(result, expected, atol):
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(getattr(result, name), tensor, rtol=0, atol=atol)
    assert (result.num_examples, result.test_seed, result.layout) == (
        expected.num_examples,
        expected.test_seed,
        expected.layout,
    )


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_sum_of_vectors_is_the_pool(dtype, atol):
    parts = [statistics(client, dtype) for client in range(3)]
    total = sum(flatten(part) for part in parts)
    assert total.shape == (vector_length(P, L),)
    close(unflatten(total, LAYOUT, L, 5, dtype), pool(parts), atol)


def test_masked_sum_is_the_pool_to_fixed_point_accuracy():
    parts = {client: statistics(client) for client in (4, 8, 6)}
    bits = 24
    server = SecureServer(parts, "run", 3, vector_length(P, L), fraction_bits=bits)
    clients = {client: SecureClient(client, "run", 3) for client in parts}
    for _ in range(4):
        for client, request in server.requests().items():
            values = flatten(parts[client]) if request["phase"] == "masked" else None
            server.receive(client, clients[client].reply(request, values))
    expected = pool(parts.values())
    step = 2.0**-bits * len(parts) / 2 / expected.num_examples
    close(unflatten(server.total(), LAYOUT, L, 5, torch.float64), expected, 1.01 * step)


def test_needs_examples():
    one = statistics(0)
    with pytest.raises(UpdateError, match="0 examples"):
        flatten(AdditiveStatistics(one.products, one.response, one.delta, 0, 5, LAYOUT))


def test_needs_the_right_shapes():
    one = statistics(0)
    with pytest.raises(UpdateError, match="response of shape"):
        flatten(AdditiveStatistics(one.products, one.response[1:], one.delta, 3, 5, LAYOUT))


def test_sum_of_another_length():
    with pytest.raises(SecureAggregationError, match="width 3"):
        unflatten(flatten(statistics(0)), LAYOUT, 3, 5)


@pytest.mark.parametrize("count", [0.0, -2.0, 2.5])
def test_sum_with_an_impossible_number_of_examples(count):
    total = np.zeros(vector_length(P, L))
    total[-1] = count
    with pytest.raises(SecureAggregationError, match="examples in all"):
        unflatten(total, LAYOUT, L, 5)
