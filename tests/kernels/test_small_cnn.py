"""The loops for small CNNs against torch's convolutions and autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fipa import Layout, parameters_of
from fipa.data import Augment
from fipa.kernels.small_cnn import BLOCK, SmallCNN, View, classifier
from fipa.models import cnn
from kernels.cases import images, network, rng, small

pytest.importorskip("numba")


def close(found: Tensor, expected: Tensor) -> None:
    """Within some roundings of the largest entry: sums of float32 in another order."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 2e-6 * max(1.0, float(expected.abs().max()))


def check(model: nn.Module, x: Tensor, y: Tensor, view: View | None = None, seen: Tensor | None = None) -> None:
    """`seen` is what `view` shows of x."""
    net, flat = small(model)
    assert net is not None
    seen = x if seen is None else seen
    loss = cross_entropy(model(seen), y)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    close(net.gradient(flat, View.of(x) if view is None else view, y), expected)
    close(net.logits(flat, seen), model(seen).detach())
    close(net.loss(flat, seen, y), loss.detach())


@pytest.mark.parametrize(
    ("channels", "pooled", "shape"),
    [
        ([4, 8], [True, True], (3, 8, 8)),
        ([1], [True], (1, 4, 4)),
        ([3], [False], (2, 5, 5)),
        ([5, 7, 3], [True, False, True], (1, 8, 8)),
        ([15, 2], [False, True], (3, 6, 4)),
        ([3, 3], [True, True], (1, 7, 9)),  # pooling leaves a row and a column out
    ],
)
@pytest.mark.parametrize("n", [1, 7, 10, 23])
def test_logits_loss_and_gradient(channels: list[int], pooled: list[bool], shape: tuple[int, int, int], n: int) -> None:
    check(network(channels, pooled, shape), *images(n, shape))


@pytest.mark.parametrize("n", [1, BLOCK, BLOCK + 3])
def test_a_classifier_is_the_model(n: int) -> None:
    model, (x, _) = network([4, 3], [True, False], (2, 6, 6)), images(n, (2, 6, 6))
    logits = classifier(model)
    assert logits is not model
    close(logits(x), model(x).detach())


def test_what_the_loops_cannot_classify_is_left_to_torch() -> None:
    other, broken = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), network([2], [True], (1, 4, 4))
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    for model in (other, broken, nn.Identity()):
        assert classifier(model) is model


@pytest.mark.parametrize("widths", [(3,), (4, 3), (6, 5, 3)])
def test_number_of_linear_layers(widths: tuple[int, ...]) -> None:
    check(network([2], [True], (1, 4, 4), widths), *images(3, (1, 4, 4)))


def test_the_papers_network() -> None:
    check(cnn([4, 8], 16, generator=rng()), *images(12, (3, 32, 32), 10))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 3))
    channels = data.draw(st.lists(st.integers(1, 15), min_size=depth, max_size=depth))
    pooled = data.draw(st.lists(st.booleans(), min_size=depth, max_size=depth))
    least = 2 ** sum(pooled)
    shape = tuple(data.draw(st.tuples(st.integers(1, 4), st.integers(least, 9), st.integers(least, 9))))
    check(network(channels, pooled, shape), *images(data.draw(st.integers(1, 21)), shape))


@pytest.mark.parametrize("n", [1, 4, 13])
@pytest.mark.parametrize("augment", [Augment(2, False), Augment(3, True), Augment(0, True), Augment(9, True)])
def test_examples_of_a_batch_are_moved_as_augment_moves_them(n: int, augment: Augment) -> None:
    x, y = images(20, (3, 8, 8))
    index = torch.randperm(20, generator=rng(3))[:n]
    view = View.of(x, index, augment.moves(n, rng(4)))
    check(network([4, 8], [True, True], (3, 8, 8)), x, y[index], view, augment(x[index], rng(4)))


@pytest.mark.parametrize("n", [BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7, 5 * BLOCK])
def test_more_images_than_are_taken_at_once(n: int) -> None:
    check(network([2], [True], (1, 4, 4)), *images(n, (1, 4, 4)))


def test_an_example_may_occur_twice() -> None:
    x, y = images(3, (1, 4, 4))
    index = torch.tensor([2, 0, 2, 2])
    check(network([3], [True], (1, 4, 4)), x, y[index], View.of(x, index), x[index])


def test_batches_of_many_sizes_share_one_network() -> None:
    """Memory is kept for the last few shapes: what one batch leaves there does not show in the next."""
    model = network([4, 3], [True, False], (2, 6, 6))
    net, flat = small(model)
    x, y = images(12, (2, 6, 6))
    expected = {n: SmallCNN.of(model, Layout.of(parameters_of(model))).gradient(flat, View.of(x[:n]), y[:n])
                for n in (1, 2, 3, 4, 5, 12)}  # fmt: skip
    for n in (12, 1, 2, 3, 4, 5, 12, 1):
        assert torch.equal(net.gradient(flat, View.of(x[:n]), y[:n]), expected[n])
        net.gradient(100 * flat, View.of(x[:n]), y[:n])


def head(*layers: nn.Module, classes: int = 3, features: int = 4 * 16) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes, bias=False))


def conv(**changes: object) -> nn.Conv2d:
    return nn.Conv2d(**({"in_channels": 1, "out_channels": 4, "kernel_size": 3, "padding": 1, "bias": False} | changes))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "bias": lambda: head(conv(bias=True), nn.ReLU()),
    "bias of a linear layer": lambda: nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
    "stride": lambda: head(conv(stride=2), nn.ReLU()),
    "no padding": lambda: head(conv(padding=0), nn.ReLU()),
    "padding by reflection": lambda: head(conv(padding_mode="reflect"), nn.ReLU()),
    "dilation": lambda: head(conv(dilation=2, padding=2), nn.ReLU()),
    "groups": lambda: head(conv(), nn.ReLU(), conv(in_channels=4, groups=2), nn.ReLU()),
    "5x5": lambda: head(conv(kernel_size=5, padding=2), nn.ReLU()),
    "many channels": lambda: head(conv(out_channels=16), nn.ReLU(), features=256),
    "batch norm": lambda: head(conv(), nn.BatchNorm2d(4), nn.ReLU()),
    "group norm": lambda: head(conv(), nn.GroupNorm(2, 4), nn.ReLU()),
    "dropout": lambda: head(conv(), nn.ReLU(), nn.Dropout()),
    "no ReLU": lambda: head(conv()),
    "tanh": lambda: head(conv(), nn.Tanh()),
    "ReLU before pooling": lambda: head(conv(), nn.ReLU(), nn.MaxPool2d(2), features=16),
    "average pooling": lambda: head(conv(), nn.AvgPool2d(2), nn.ReLU(), features=16),
    "no convolution": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)),
    "no linear layer": lambda: nn.Sequential(conv(), nn.ReLU(), nn.Flatten()),
    "no flattening": lambda: nn.Sequential(conv(), nn.ReLU(), nn.Linear(4, 3, bias=False)),
    "double": lambda: head(conv(), nn.ReLU()).double(),
    "not sequential": lambda: nn.ModuleDict({"0": conv()}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_networks_are_refused(name: str) -> None:
    assert small(REFUSED[name]())[0] is None


def test_the_networks_above_differ_from_these_in_one_respect() -> None:
    for model in (head(conv(), nn.ReLU()), head(conv(), nn.MaxPool2d(2), nn.ReLU(), features=16),
                  head(conv(padding="same"), nn.ReLU()), head(conv(), nn.ReLU(), conv(in_channels=4), nn.ReLU()),
                  head(conv(out_channels=15), nn.ReLU(), features=240)):  # fmt: skip
        assert small(model)[0] is not None


def test_all_parameters_or_none() -> None:
    model = network([4, 3], [True, True], (1, 8, 8))
    for params in ("0.*", "*.weight"):
        assert (small(model, params)[0] is None) == (params == "0.*")
    model[0].weight.requires_grad_(False)
    assert small(model)[0] is None


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fipa.kernels.small_cnn.COMPILED", False)
    model = network([4], [True], (1, 4, 4))
    assert small(model)[0] is None


# --- networks that look like one of ours, but are not ---


def threes(out: int, width: int = 3) -> nn.Conv2d:
    return nn.Conv2d(width, out, 3, padding=1, bias=False)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


SHARED_POOL, SHARED = nn.MaxPool2d(2), threes(3)
LOOKALIKES: dict[str, nn.Module] = {
    "pool of 4": nn.Sequential(threes(4), nn.MaxPool2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3, bias=False)),
    "overlapping pool": nn.Sequential(
        threes(4), nn.MaxPool2d(2, stride=1), nn.ReLU(), nn.Flatten(), nn.Linear(196, 3, bias=False)
    ),
    "ReLU at the end": nn.Sequential(threes(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3, bias=False), nn.ReLU()),
    "a layer twice": nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.ReLU(), nn.Flatten(), nn.Linear(192, 3, bias=False)),
    "its own forward": Doubled(threes(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3, bias=False)),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_left_to_torch(name: str) -> None:
    model = LOOKALIKES[name]
    assert SmallCNN.of(model, Layout.of(parameters_of(model))) is None


def test_a_hook_is_respected() -> None:
    model = nn.Sequential(threes(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3, bias=False))
    assert SmallCNN.of(model, Layout.of(parameters_of(model))) is not None
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    assert SmallCNN.of(model, Layout.of(parameters_of(model))) is None


def test_a_pool_that_is_used_twice() -> None:
    layers = [threes(4), SHARED_POOL, nn.ReLU(), threes(6, 4), SHARED_POOL, nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(24, 3, bias=False))
    layout = Layout.of(parameters_of(model))
    small, x = SmallCNN.of(model, layout), torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert small is not None
    torch.testing.assert_close(small.logits(layout.flatten(parameters_of(model)), x), model(x))


def test_images_in_any_order_of_memory() -> None:
    model = nn.Sequential(threes(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3, bias=False))
    layout = Layout.of(parameters_of(model))
    flat, small = layout.flatten(parameters_of(model)), SmallCNN.of(model, layout)
    assert small is not None
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for seen in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(small.logits(flat, seen), model(x))


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_with_its_own_forward_is_left_to_torch() -> None:
    layers = [Standardised(3, 4, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3, bias=False)]
    model = nn.Sequential(*layers)
    assert SmallCNN.of(model, Layout.of(parameters_of(model))) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_loss(bad: float) -> None:
    """The loops' maxima would hide it."""
    model = nn.Sequential(threes(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3, bias=False))
    layout = Layout.of(parameters_of(model))
    flat, small = layout.flatten(parameters_of(model)), SmallCNN.of(model, layout)
    assert small is not None
    x, y = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(5, dtype=torch.int64)
    assert bool(small.loss(flat, x, y).isfinite())
    for place in (0, -1):
        broken = flat.clone()
        broken[place] = bad
        assert bool(small.loss(broken, x, y).isnan())
    x[1, 2, 3, 4] = bad
    assert bool(small.loss(flat, x, y).isnan())
