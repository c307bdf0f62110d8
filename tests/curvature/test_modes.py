"""Eval mode for a while."""

import pytest
from torch import nn

from fipa.curvature.modes import evaluation_mode


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
