"""Eval mode for a while."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from curvature.cases import dense, gauss_newton, loss_hessian, make, randn
from fipa.curvature.modes import evaluation_mode
from fipa.curvature.routes import curvature_of


def mixed():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model.train()
    model[1].eval()  # a frozen BatchNorm, as in fine-tuning
    model[2][0].eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


def test_everything_is_in_eval_mode_inside_and_as_before_outside():
    model = mixed()
    before = modes(model)
    assert len(set(before)) == 2
    with evaluation_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_modes_come_back_after_an_exception():
    model = mixed()
    before = modes(model)
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert modes(model) == before


@pytest.mark.parametrize("training", [True, False])
def test_nested(training):
    model = nn.Dropout().train(training)
    with evaluation_mode(model):
        with evaluation_mode(model):
            assert not model.training
        assert not model.training
    assert model.training is training


# --- attention ---------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x, mask=None):
        return self.head(self.layer(x, src_key_padding_mask=mask)[:, 0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x, mask=None):
        return self.head(self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0].mean(1))


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x, mask=None):
        parts = [layer(x)[:, None] for layer in (self.queries, self.keys, self.values)]
        allowed = None if mask is None else ~mask[:, None, None, :]
        return self.head(functional.scaled_dot_product_attention(*parts, attn_mask=allowed)[:, 0].mean(1))


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("route", ["rows", "matrix_free", "auto"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("build_model", [Encoder, Attention, Products])
def test_attention_equals_the_dense_oracle(build_model, training, route, masked):
    model, x = make(build_model), randn(5, 4, 4)
    inputs = {"x": x}
    if masked:
        inputs["mask"] = torch.arange(4) >= torch.tensor([4, 3, 2, 4, 1])[:, None]

    def blocks():
        z = model(**inputs)
        return [(z, loss_hessian(z, "cross_entropy", len(x)))]

    expected = gauss_newton(model, blocks)
    model.train(training)
    with curvature_of(model, inputs if masked else x, "cross_entropy", route=route) as (operator, _, _):
        H = dense(operator)
    torch.testing.assert_close(H, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fused_attention_flag_comes_back(enabled):
    model = nn.Linear(2, 2)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with evaluation_mode(model):
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is enabled
        with pytest.raises(KeyError), evaluation_mode(model):
            raise KeyError
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_the_kernels_of_attention_come_back():
    kernels = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")
    before = [getattr(torch.backends.cuda, name)() for name in kernels]
    with pytest.raises(KeyError), evaluation_mode(nn.Linear(2, 2)):
        raise KeyError
    assert [getattr(torch.backends.cuda, name)() for name in kernels] == before
