"""Gradients of single images by the loops, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fipa.kernels.small_cnn import Factors
from fipa.models import cnn
from kernels.cases import images, network, rng, small

pytest.importorskip("numba")


def rows(model: nn.Module, x: Tensor, slopes: Tensor) -> Tensor:
    """By the loops, for slopes at the logits (n x classes x k)."""
    net, flat = small(model)
    assert net is not None
    return expanded(net.factors(flat, x, slopes, lambda z, slopes: slopes))


def expanded(factors: Factors) -> Tensor:
    """The rows (n k x p) that factors stand for."""
    pieces = [factors.convolutions]
    for slopes, incoming in factors.linear:
        pieces.append((slopes[..., None] * incoming[:, None, None]).flatten(0, 1).flatten(1))
    return torch.cat(pieces, dim=1)


def oracle(model: nn.Module, x: Tensor, slopes: Tensor) -> Tensor:
    """One image and one slope after the other."""
    model, found = model.double(), []
    for image, columns in zip(x.double(), slopes.double(), strict=True):
        for slope in columns.T:
            parts = torch.autograd.grad((model(image[None])[0] * slope).sum(), list(model.parameters()))
            found.append(torch.cat([part.reshape(-1) for part in parts]))
    model.float()
    return torch.stack(found)


def close(found: Tensor, expected: Tensor) -> None:
    """Within some roundings of float32 of the largest entry."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 2e-6 * max(1.0, float(expected.abs().max()))


def check(model: nn.Module, x: Tensor, classes: int = 3, k: int = 1) -> None:
    slopes = torch.randn(len(x), classes, k, generator=rng(3))
    close(rows(model, x, slopes), oracle(model, x, slopes))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 3))
    channels = data.draw(st.lists(st.integers(1, 9), min_size=depth, max_size=depth))
    pooled = data.draw(st.lists(st.booleans(), min_size=depth, max_size=depth))
    least = 2 ** sum(pooled)
    shape = tuple(data.draw(st.tuples(st.integers(1, 4), st.integers(least, 9), st.integers(least, 9))))
    widths = data.draw(st.sampled_from([(3,), (5, 3), (6, 5, 3)]))
    x, _ = images(data.draw(st.integers(1, 9)), shape)
    check(network(channels, pooled, shape, widths), x, k=data.draw(st.integers(1, 2)))


def test_the_papers_network() -> None:
    check(cnn([4, 8], 16, generator=rng()), images(7, (3, 32, 32))[0], classes=10)


def test_the_same_bits_wherever_numbers_lie_in_memory() -> None:
    model = network([4, 3], [True, False], (2, 6, 6))
    x, _ = images(9, (2, 6, 6))
    slopes = torch.randn(9, 3, 2, generator=rng(3))
    expected, (net, flat) = rows(model, x, slopes), small(model)
    assert net is not None
    turned = slopes.transpose(0, 2).contiguous().transpose(0, 2)
    for seen in (x.contiguous(), x.transpose(2, 3).contiguous().transpose(2, 3), x.repeat(2, 1, 1, 1)[9:]):
        assert torch.equal(expanded(net.factors(flat, seen, turned, lambda z, slopes: slopes)), expected)
