"""The digits that come with the package."""

from __future__ import annotations

import pytest
import torch

from fipa.data import load


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return load("digits", tmp_path_factory.mktemp("empty"))


def test_counts(digits):
    assert (len(digits.train), len(digits.test), digits.shape) == (1437, 360, (1, 8, 8))
    # load_digits has these many of each, in training and test together
    both = torch.cat([digits.train.labels, digits.test.labels])
    assert torch.bincount(both).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.bincount(digits.test.labels).min() > 20


def test_seventeen_levels_from_black_to_white(digits):
    levels = digits.train.pixels.unique().tolist()
    assert levels == [round(i * 255 / 16) for i in range(17)]


def test_mean_and_spread(digits):
    pixels = digits.train.pixels.double() / 255
    assert float(pixels.mean()) == pytest.approx(digits.mean[0], abs=1e-4)
    assert float(pixels.std()) == pytest.approx(digits.std[0], abs=1e-4)


def test_labels_belong_to_the_images(digits):
    """The nearest mean of the training images tells nine in ten apart, which no mixed-up labels would allow."""
    train, test = digits.train.pixels.flatten(1).float(), digits.test.pixels.flatten(1).float()
    means = torch.stack([train[digits.train.labels == i].mean(0) for i in range(10)])
    guess = torch.cdist(test, means).argmin(1)
    assert (guess == digits.test.labels).float().mean() > 0.85


def test_no_test_image_is_also_for_training(digits):
    train = {bytes(image.flatten().tolist()) for image in digits.train.pixels}
    assert not any(bytes(image.flatten().tolist()) in train for image in digits.test.pixels)


def test_the_order_never_changes(digits):
    assert digits.train.labels[:12].tolist() == [8, 2, 6, 6, 1, 9, 8, 5, 8, 6, 6, 6]
    assert digits.test.labels[:6].tolist() == [2, 7, 2, 6, 8, 5]


def test_same_as_in_scikit_learn(digits):
    sklearn = pytest.importorskip("sklearn.datasets")
    theirs = sorted(image.astype(int).flatten().tolist() for image in sklearn.load_digits().images)
    pixels = torch.cat([digits.train.pixels, digits.test.pixels]).flatten(1)
    assert sorted(torch.round(pixels.double() * 16 / 255).int().tolist()) == theirs
