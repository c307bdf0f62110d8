"""Layer-wise input covariances, against sums written out by hand."""

import pytest
import torch
from torch import nn

from curvature.cases import MODELS, assert_unchanged, make, model_and_inputs, randn, snapshot
from fipa import FOOF, ClientUpdate, LayoutError, SketchError, aggregate, input_covariance, parameters_of


def outer_mean(vectors):
    return sum(torch.outer(v, v) for v in vectors) / len(vectors)


def test_linear_layers_with_and_without_bias():
    model = make(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)))
    x = randn(300, 3)  # more than one forward batch
    result = input_covariance(model, x)
    assert list(result.layers) == ["0.weight", "2.weight"]
    bias, covariance = result.layers["0.weight"]
    one = torch.ones(1, dtype=torch.float64)
    assert bias == "0.bias"
    torch.testing.assert_close(covariance, outer_mean([torch.cat([v, one]) for v in x]))
    bias, covariance = result.layers["2.weight"]
    assert bias is None
    torch.testing.assert_close(covariance, outer_mean(list(torch.tanh(model[0](x)).detach())))
    assert result.num_examples == 300
    assert result.layout.names == ("0.weight", "0.bias", "2.weight")


def patches_by_hand(x, kernel, stride, padding, dilation):
    """Every patch that the convolution's weight multiplies, channel by channel, by explicit loops."""
    n, channels, height, width = x.shape
    padded = torch.zeros(n, channels, height + 2 * padding[0], width + 2 * padding[1], dtype=x.dtype)
    padded[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width] = x
    span = [dilation[i] * (kernel[i] - 1) for i in (0, 1)]
    return [
        image[:, i : i + span[0] + 1 : dilation[0], j : j + span[1] + 1 : dilation[1]].flatten()
        for image in padded
        for i in range(0, padded.shape[2] - span[0], stride[0])
        for j in range(0, padded.shape[3] - span[1], stride[1])
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((3, 3), (1, 1), (0, 0), (1, 1)), ((3, 2), (2, 1), (1, 0), (1, 1)), ((2, 3), (1, 2), (2, 1), (2, 1))],
)
def test_convolutions(kernel, stride, padding, dilation, bias):
    x = randn(4, 2, 6, 7)
    conv = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=bias)
    model = make(lambda: nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    patches = patches_by_hand(x, kernel, stride, padding, dilation)
    by_patches = torch.stack(patches) @ conv.weight.flatten(1).T  # the patches are the right ones, in the right order
    by_module = nn.functional.conv2d(x, conv.weight, None, stride, padding, dilation).permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(by_patches, by_module)

    name, covariance = input_covariance(model, x).layers["0.weight"]
    assert name == ("0.bias" if bias else None)
    one = torch.ones(1 if bias else 0, dtype=torch.float64)
    torch.testing.assert_close(covariance, outer_mean([torch.cat([v, one]) for v in patches]))


def test_all_positions_of_a_sequence_count():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.Linear(3, 2, bias=False)

        def forward(self, x):
            return self.each(x).mean(dim=1)

    x = randn(4, 5, 3)
    _, covariance = input_covariance(make(Sequence), x).layers["each.weight"]
    torch.testing.assert_close(covariance, outer_mean(list(x.flatten(0, 1))))


def test_only_selected_layers_and_biases():
    model, x = model_and_inputs("frozen")
    assert list(input_covariance(model, x).layers) == ["2.weight", "4.weight"]
    result = input_covariance(model, x, params=["0.*", "4.weight"])
    assert {name: bias for name, (bias, _) in result.layers.items()} == {"0.weight": "0.bias", "4.weight": None}
    assert result.layout.names == ("0.weight", "0.bias", "4.weight")


def test_layers_that_have_none():
    # tied weights, grouped convolutions and normalisation are left to plain averaging, but stay in the layout
    tied, x = model_and_inputs("tied")
    assert list(input_covariance(tied, x).layers) == ["first.weight", "last.weight"]
    aliased, x = model_and_inputs("aliased")
    assert list(input_covariance(aliased, x).layers) == ["first.weight", "last.weight"]
    grouped = make(
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    )
    result = input_covariance(grouped, randn(3, 2, 4, 4))
    assert list(result.layers) == ["3.weight"]
    assert "0.weight" in result.layout.names


def test_batch_norm_and_dropout_are_in_eval_mode():
    model, x = model_and_inputs("normed")
    expected = outer_mean([torch.cat([v, v.new_ones(1)]) for v in model[:4](x).detach()])
    model.train()
    before, random_state = snapshot(model), torch.get_rng_state()
    _, covariance = input_covariance(model, x).layers["4.weight"]
    torch.testing.assert_close(covariance, expected)
    assert_unchanged(model, before)
    assert torch.equal(random_state, torch.get_rng_state())


def test_max_examples():
    model, x = make(MODELS["mlp"]), randn(6, 3)
    first, again, other = (input_covariance(model, x, max_examples=2, seed=seed) for seed in (0, 0, 3))
    assert first.num_examples == 2
    assert torch.equal(first.layers["0.weight"][1], again.layers["0.weight"][1])
    assert not torch.equal(first.layers["0.weight"][1], other.layers["0.weight"][1])


def test_batches_of_unequal_shape():
    model = make(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    small, large = randn(2, 1, 4, 4), randn(3, 1, 5, 6)
    patches = [
        patch for x in (small, large) for patch in patches_by_hand(x, (3, 3), (1, 1), (0, 0), (1, 1))
    ]  # every patch has the same weight
    torch.testing.assert_close(input_covariance(model, [small, large]).layers["0.weight"][1], outer_mean(patches))


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_layers_that_are_not_called_have_no_covariance():
    found = input_covariance(make(Idle), randn(4, 3))
    assert list(found.layers) == ["used.weight"]
    assert "idle.weight" in found.layout.names  # and will be averaged
    assert list(input_covariance(make(Idle), randn(4, 3), params="used.*").layers) == ["used.weight"]
    same = make(lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding="same"), nn.Flatten()))
    mirrored = make(lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.Flatten()))
    for model in (same, mirrored):
        before = snapshot(model)
        with pytest.raises(SketchError, match=r"Conv2d.*zero padding given in numbers"):
            input_covariance(model, randn(2, 1, 4, 4))
        assert_unchanged(model, before)
    with pytest.raises(SketchError, match="empty"):
        input_covariance(make(Idle), [])
    with pytest.raises(LayoutError, match="matches no parameter"):
        input_covariance(make(Idle), randn(4, 3), params="nothing")


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(SketchError, match="not finite"):
        input_covariance(make(MODELS["mlp"]), randn(5, 3) * float("nan"))


class Attention(nn.Module):
    """Calls its first and last layer; attention uses the weight of its projection without calling the module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def test_attention_leaves_its_projections_to_averaging():
    model = make(Attention)  # and its outputs have three axes
    updates, deltas = [], []
    for seed, examples in ((0, 4), (1, 12)):
        x = randn(examples, 5, 3, seed=seed)
        found = input_covariance(model, x)
        assert {name: bias for name, (bias, _) in found.layers.items()} == {
            "first.weight": "first.bias",
            "last.weight": "last.bias",
        }
        assert "attention.out_proj.weight" in found.layout.names
        flat = torch.cat([x.flatten(0, 1), torch.ones(5 * examples, 1, dtype=torch.float64)], dim=1)
        torch.testing.assert_close(found.layers["first.weight"][1], outer_mean(list(flat)))
        deltas.append({name: randn(*t.shape, seed=seed + 7) for name, t in parameters_of(model).items()})
        updates.append(ClientUpdate(deltas[-1], examples, found))
    theta = parameters_of(model)
    result = aggregate(theta, updates, FOOF()).theta
    for name in theta:
        mean = theta[name] + 0.25 * deltas[0][name] + 0.75 * deltas[1][name]
        averaged = torch.allclose(result[name], mean, rtol=1e-9, atol=1e-12)
        assert averaged is (not name.startswith(("first", "last"))), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype(dtype):
    model, x = model_and_inputs("mlp")
    found = input_covariance(model, x, dtype=dtype)
    expected = input_covariance(model, x)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    for name, (bias, covariance) in found.layers.items():
        assert covariance.dtype == dtype
        assert bias == expected.layers[name][0]
        torch.testing.assert_close(covariance.double(), expected.layers[name][1], rtol=1e-5, atol=1e-6)
