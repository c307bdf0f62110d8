"""Crops, flips and rotations of small images, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fipa.data import Augment
from fipa.errors import FipaError

IMAGE = torch.arange(9.0).reshape(1, 1, 3, 3)  # rows 0 1 2, 3 4 5, 6 7 8


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shifted(down: int, right: int) -> list[list[float]]:
    """What a window that moves by so much shows; beyond the edge, the nearest pixel."""
    place = [[(min(max(r + down, 0), 2), min(max(c + right, 0), 2)) for c in range(3)] for r in range(3)]
    return [[float(3 * r + c) for r, c in row] for row in place]


def many(augment: Augment, image: Tensor, n: int = 400) -> list[list[list[float]]]:
    """What becomes of n copies of an image."""
    out = augment(image.expand(n, -1, -1, -1), rng())
    assert out.shape == (n, *image.shape[1:])
    return out[:, 0].tolist()


def distinct(found: list[list[list[float]]]) -> set[tuple[tuple[float, ...], ...]]:
    return {tuple(map(tuple, image)) for image in found}


def test_nothing_to_do() -> None:
    images = torch.randn(5, 3, 4, 6, generator=rng(1))
    assert torch.equal(Augment(0, False)(images, rng()), images)


def test_crops_are_all_shifts_and_no_others() -> None:
    expected = [shifted(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    assert shifted(-1, 1) == [[1, 2, 2], [1, 2, 2], [4, 5, 5]]  # the window is one up and one to the right
    assert distinct(many(Augment(1, False), IMAGE)) == distinct(expected)


def test_shifts_beyond_the_image_leave_its_edge() -> None:
    found = distinct(many(Augment(5, False), IMAGE, 3000))
    assert ((0, 0, 0),) * 3 in found
    assert ((8, 8, 8),) * 3 in found
    assert found == distinct([shifted(down, right) for down in range(-5, 6) for right in range(-5, 6)])


def test_flips_are_left_to_right_and_for_half_of_the_images() -> None:
    found = many(Augment(0, True), IMAGE)
    mirrored = [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    assert distinct(found) == distinct([IMAGE[0, 0].tolist(), mirrored])
    assert 150 < found.count(mirrored) < 250  # 200, with a standard deviation of 10


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, [[8, 7, 6], [5, 4, 3], [2, 1, 0]]),  # half a turn
        (0.25, [[6, 3, 0], [7, 4, 1], [8, 5, 2]]),
        (0.5, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (0.75, [[2, 5, 8], [1, 4, 7], [0, 3, 6]]),
        (1.0, [[8, 7, 6], [5, 4, 3], [2, 1, 0]]),
    ],
)
def test_quarters_of_a_turn(monkeypatch: pytest.MonkeyPatch, share: float, expected: list[list[float]]) -> None:
    """The angle lies between minus and plus 180 degrees; `share` tells how far along."""
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.full(size, share))
    assert Augment(0, False, rotation=180.0)(IMAGE, rng())[0, 0].tolist() == expected


def test_rotation_within_its_limit() -> None:
    """By so few degrees that no pixel of a 3 x 3 image is nearer to another place."""
    assert distinct(many(Augment(0, False, rotation=10.0), IMAGE)) == distinct(IMAGE[0].tolist())
    assert len(distinct(many(Augment(0, False, rotation=180.0), IMAGE))) > 4


def test_images_are_varied_one_by_one_and_channels_together() -> None:
    pixels = torch.randn(2, 1, 8, 8, generator=rng(1))
    images = torch.cat([pixels, 2 * pixels, 3 * pixels], dim=1)
    out = Augment(2, True, rotation=30.0)(images.repeat(20, 1, 1, 1), rng())
    assert torch.equal(out[:, 1], 2 * out[:, 0])
    assert torch.equal(out[:, 2], 3 * out[:, 0])
    assert len({tuple(image.flatten().tolist()) for image in out[::2, 0]}) > 15
    for image, origin in zip(out[:, 0], pixels.repeat(20, 1, 1, 1)[:, 0], strict=True):
        assert set(image.flatten().tolist()) <= set(origin.flatten().tolist())


@pytest.mark.parametrize("augment", [Augment(), Augment(1, True, 20.0)])
def test_the_generator_alone_decides(augment: Augment) -> None:
    images = torch.randn(6, 3, 8, 8, generator=rng(1))
    torch.manual_seed(0)
    first = augment(images, rng(5))
    torch.manual_seed(1)
    assert torch.equal(augment(images, rng(5)), first)
    assert torch.equal(augment(images.contiguous(memory_format=torch.channels_last), rng(5)), first)
    assert not torch.equal(augment(images, rng(6)), first)


def test_channels_are_innermost_in_memory_and_types_are_kept() -> None:
    images = torch.randint(256, (4, 3, 5, 7), generator=rng(1), dtype=torch.uint8)
    out = Augment(2)(images, rng())
    assert out.shape == images.shape
    assert out.dtype == torch.uint8
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("settings", [{"crop": -1}, {"rotation": -1.0}, {"rotation": 181.0}])
def test_wrong_settings(settings: dict[str, float]) -> None:
    with pytest.raises(FipaError, match="augment: crop must not be negative"):
        Augment(**settings)
