"""Gradients of single images by the loops, against autograd in float64 and against the rows of `vmap`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature.cases import LargestTensor, operator_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fipa import Layout, Residual, basis_curvature, parameters_of
from fipa.curvature import explicit
from fipa.errors import NotFinite
from fipa.kernels.small_cnn import BLOCK, SmallCNN
from fipa.models import cnn
from kernels.cases import images, network, rng, small

pytest.importorskip("numba")


def rows(model: nn.Module, x: Tensor, slopes: Tensor) -> Tensor:
    """By the loops, for slopes at the logits (n x classes x k)."""
    net, flat = small(model)
    assert net is not None
    out = torch.full((len(x) * slopes.shape[2], len(flat)), torch.nan)
    net.rows(flat, x, slopes, lambda z, slopes: slopes, out)
    return out


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
    wide = torch.empty(18, len(flat) + 3)[:, 1:-2]
    turned = slopes.transpose(0, 2).contiguous().transpose(0, 2)
    for seen in (x.contiguous(), x.transpose(2, 3).contiguous().transpose(2, 3), x.repeat(2, 1, 1, 1)[9:]):
        net.rows(flat, seen, turned, lambda z, slopes: slopes, wide)
        assert torch.equal(wide, expected)


# --- as the rows of a curvature ---


def both(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Any, loss: str, **options: Any) -> tuple[Any, Any]:
    """The operator with the loops, and the one by vmap."""
    fast = operator_of(model, x, loss, **options)
    with monkeypatch.context() as without:
        without.setattr(SmallCNN, "of", staticmethod(lambda model, layout: None))
        slow = operator_of(model, x, loss, **options)
    assert (fast._small is None, slow._small is None) == (False, True)
    return fast, slow


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mse", {}),
    ("cross_entropy", {}),
    *(("cross_entropy", {"sampled_labels": labels}) for labels in (1, 3)),
]


@pytest.mark.parametrize(("loss", "options"), OPTIONS)
@pytest.mark.parametrize("n", [1, BLOCK, 2 * BLOCK + 7])
def test_rows_are_those_of_vmap(monkeypatch: pytest.MonkeyPatch, loss: str, options: dict[str, Any], n: int) -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(n, (1, 5, 6))
    fast, slow = both(monkeypatch, model, x, loss, **options)
    close(fast.matrix, slow.matrix)


@pytest.mark.parametrize(("block_bytes", "n"), [(1, 5), (30_000, 2 * BLOCK + 7), (10**6, 2 * BLOCK + 7)])
def test_rows_that_are_not_held(monkeypatch: pytest.MonkeyPatch, block_bytes: int, n: int) -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(n, (1, 5, 6))
    monkeypatch.setattr(explicit, "BLOCK_BYTES", block_bytes)
    held, streamed = (operator_of(model, x, "mse", hold=hold) for hold in (True, False))
    assert streamed.matrix is None
    assert torch.equal(torch.cat([block for _, block in streamed.blocks()]), held.matrix)
    V = torch.randn(held.parameters, 4, generator=rng(5))
    close(streamed.product(V), held.product(V))


def test_several_batches() -> None:
    model, (x, _) = network([3], [True], (1, 4, 4)), images(20, (1, 4, 4))
    whole, pieces = (operator_of(model, data, "mse") for data in (x, [x[:13], x[13:]]))
    assert torch.equal(whole.matrix, pieces.matrix)


def test_a_matrix_in_a_basis_holds_a_block_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(2 * BLOCK + 7, (1, 5, 6))
    row = 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(explicit, "BLOCK_BYTES", BLOCK * row)
    basis = torch.randn(row // 4, 3, generator=rng(4))
    with LargestTensor() as largest:
        basis_curvature(model, x, basis=basis, sampled_labels=1)
    assert largest.nbytes < len(x) * row


def test_others_are_left_to_vmap() -> None:
    model, (x, _) = network([3], [True], (1, 4, 4)), images(5, (1, 4, 4))
    residual = Residual(lambda u, x: u(x).square(), x)
    cases: list[tuple[nn.Module, Any, str, dict[str, Any]]] = [
        (model, x, "mse", {"dtype": torch.float64}),
        (model, x, "mse", {"params": "0.*"}),
        (model, {"input": x}, "mse", {}),
        (model, residual, "least_squares", {}),
        (network([16], [True], (1, 4, 4)), x, "mse", {}),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3)), x, "mse", {}),
    ]
    for one, data, loss, options in cases:
        assert operator_of(one, data, loss, **options)._small is None
    assert operator_of(model, x, "mse")._small is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("where", ["images", "convolution", "linear"])
def test_what_is_not_finite_is_an_error(bad: float, where: str) -> None:
    """Also what is finite, but so large that outputs are not."""
    model, (x, _) = network([3, 2], [True, False], (1, 5, 6)), images(BLOCK + 7, (1, 5, 6))
    place = {"images": x[-1], "convolution": model[0].weight.data, "linear": model[-1].weight.data}[where]
    place.copy_(torch.randn(place.shape, generator=rng(4)).sign() * bad)
    basis = torch.eye(Layout.of(parameters_of(model)).numel)
    with pytest.raises(NotFinite):
        basis_curvature(model, x, basis=basis, sampled_labels=1)
