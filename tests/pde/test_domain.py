"""Boxes, regions, and who owns what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fipa.errors import FipaError
from fipa.pde import Box, Region, grid_split
from fipa.pde.domain import check_split

BOX = Box((0.0, -1.0, 2.0), (0.5, 1.0, 5.0))
SQUARE = Box.cube(2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- points ---


def test_points_fill_the_box_and_nothing_else() -> None:
    x = BOX.uniform(4000, generator())
    assert x.shape == (4000, 3)
    assert x.dtype == torch.float64
    low, high = torch.tensor(BOX.low), torch.tensor(BOX.high)
    assert bool(((x >= low) & (x <= high)).all())
    torch.testing.assert_close(x.mean(dim=0), ((low + high) / 2).double(), rtol=0, atol=0.08)
    torch.testing.assert_close(x.var(dim=0), ((high - low) ** 2 / 12).double(), rtol=0.1, atol=0)
    assert torch.equal(BOX.uniform(4000, generator()), x)


@pytest.mark.parametrize("face", BOX.faces, ids=str)
def test_points_on_a_face(face: tuple[int, str]) -> None:
    axis, side = face
    x = BOX.on_face(face, 200, generator())
    assert x.shape == (200, 3)
    expected = (BOX.low if side == "low" else BOX.high)[axis]
    assert set(x[:, axis].tolist()) == {expected}
    for other in {0, 1, 2} - {axis}:
        length = BOX.high[other] - BOX.low[other]
        assert BOX.low[other] <= float(x[:, other].min()) < BOX.low[other] + 0.1 * length
        assert BOX.high[other] - 0.1 * length < float(x[:, other].max()) <= BOX.high[other]


def test_the_face_of_an_interval_is_one_point() -> None:
    assert Box((2.0,), (3.0,)).on_face((0, "high"), 20, generator()).tolist() == [[3.0]]
    assert Box((2.0,), (3.0,)).on_face((0, "low"), 20, generator()).tolist() == [[2.0]]


def test_faces() -> None:
    assert SQUARE.faces == ((0, "low"), (0, "high"), (1, "low"), (1, "high"))
    assert [BOX.end(face) for face in BOX.faces] == [0.0, 0.5, -1.0, 1.0, 2.0, 5.0]


def test_grid_has_the_ends_and_the_first_axis_fastest() -> None:
    grid = Box((0.0, 10.0), (1.0, 30.0)).grid([3, 2])
    assert grid.tolist() == [[0.0, 10.0], [0.5, 10.0], [1.0, 10.0], [0.0, 30.0], [0.5, 30.0], [1.0, 30.0]]
    assert Box((0.0,), (1.0,)).grid([5])[:, 0].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert BOX.grid([2, 3, 4]).shape == (24, 3)


def test_contains() -> None:
    assert SQUARE.contains(SQUARE)
    assert SQUARE.contains(Box((0.0, 0.2), (0.5, 1.0)))
    assert not SQUARE.contains(Box((0.0, 0.2), (0.5, 1.1)))
    assert not SQUARE.contains(Box((-0.1, 0.2), (0.5, 1.0)))
    assert not Box((0.0, 0.2), (0.5, 1.0)).contains(SQUARE)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ((), (), "low and a high end for each axis"),
        ((0.0,), (1.0, 2.0), "low and a high end for each axis"),
        ((0.0, 1.0), (1.0, 1.0), r"low < high on every axis, got \(0.0, 1.0\)"),
        ((0.0,), (-1.0,), "low < high on every axis"),
        ((math.nan,), (1.0,), "low < high on every axis"),
    ],
)
def test_no_box(low: tuple[float, ...], high: tuple[float, ...], message: str) -> None:
    with pytest.raises(FipaError, match=message):
        Box(low, high)
    with pytest.raises(FipaError, match=message):
        check_split(Box.cube(1), [Region(low, high)], [])


# --- splits ---


def corners(regions: Sequence[Region]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    return [(region.low, region.high) for region in regions]


def test_strips() -> None:
    parts = grid_split(Box((0.0,), (2.0,)), [[0.5, 1.5]])
    assert corners(parts) == [((0.0,), (0.5,)), ((0.5,), (1.5,)), ((1.5,), (2.0,))]
    assert corners(grid_split(SQUARE, [[], [0.25]])) == [((0.0, 0.0), (1.0, 0.25)), ((0.0, 0.25), (1.0, 1.0))]
    assert all(part.boundary for part in parts)


def test_boxes_count_along_the_first_axis_first() -> None:
    assert corners(grid_split(SQUARE, [[0.5], [0.25]])) == [
        ((0.0, 0.0), (0.5, 0.25)),
        ((0.5, 0.0), (1.0, 0.25)),
        ((0.0, 0.25), (0.5, 1.0)),
        ((0.5, 0.25), (1.0, 1.0)),
    ]


@pytest.mark.parametrize("cuts", [[], [[]], [[], []]])
def test_no_cuts_no_split(cuts: list[list[float]]) -> None:
    assert corners(grid_split(SQUARE, cuts)) == [(SQUARE.low, SQUARE.high)]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([[0.5, 0.3]], r"problem.cuts\[0\] must rise within \(0, 1\), got \[0.5, 0.3\]"),
        ([[], [0.5, 0.5]], r"problem.cuts\[1\] must rise within \(0, 1\), got \[0.5, 0.5\]"),
        ([[0.0]], r"problem.cuts\[0\] must rise within \(0, 1\)"),
        ([[1.0]], r"problem.cuts\[0\] must rise within \(0, 1\)"),
        ([[], [1.5]], r"problem.cuts\[1\] must rise within \(0, 1\), got \[1.5\]"),
        ([[-0.5]], r"problem.cuts\[0\] must rise"),
        ([[0.5], [], [0.5]], "problem.cuts has 3 entries, but the domain has 2 axes"),
    ],
)
def test_wrong_cuts(cuts: list[list[float]], message: str) -> None:
    with pytest.raises(FipaError, match=message):
        grid_split(SQUARE, cuts)


def rising(low: float, high: float) -> st.SearchStrategy[list[float]]:
    inner = st.floats(low, high, exclude_min=True, exclude_max=True, allow_subnormal=False)
    return st.lists(inner, max_size=3, unique=True).map(sorted)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_cuts_always_split_the_domain(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 3))
    low = [data.draw(st.floats(-2, 0)) for _ in range(d)]
    high = [data.draw(st.floats(0.5, 3)) for _ in range(d)]
    domain = Box(tuple(low), tuple(high))
    cuts = [data.draw(rising(low[i], high[i])) for i in range(data.draw(st.integers(0, d)))]
    regions = grid_split(domain, cuts)
    check_split(domain, regions, domain.faces)
    assert len(regions) == math.prod(len(line) + 1 for line in cuts)
    volumes = [math.prod(b - a for a, b in zip(r.low, r.high, strict=True)) for r in regions]
    assert math.fsum(volumes) == pytest.approx(math.prod(b - a for a, b in zip(low, high, strict=True)))
    if len(regions) > 1:  # without any one of them, there is a hole
        missing = data.draw(st.integers(0, len(regions) - 1))
        with pytest.raises(FipaError, match="without an owner"):
            check_split(domain, regions[:missing] + regions[missing + 1 :], ())


@settings(max_examples=30, deadline=None)
@given(rising(0, 1), st.data())
def test_every_condition_has_an_owner_and_inner_regions_own_none(cuts: list[float], data: st.DataObject) -> None:
    regions = grid_split(Box.cube(1), [cuts])
    owned = [region.faces(Box.cube(1), Box.cube(1).faces) for region in regions]
    expected: list[list[tuple[int, str]]] = [[] for _ in regions]
    expected[0].append((0, "low"))
    expected[-1].append((0, "high"))
    assert owned == expected


def test_regions_own_the_faces_that_they_touch() -> None:
    faces = SQUARE.faces
    corner, middle = Region((0.0, 0.0), (0.5, 0.5)), Region((0.25, 0.25), (0.5, 0.5))
    assert corner.faces(SQUARE, faces) == [(0, "low"), (1, "low")]
    assert corner.faces(SQUARE, [(1, "high"), (1, "low")]) == [(1, "low")]
    assert middle.faces(SQUARE, faces) == []
    assert Region((0.0, 0.0), (1.0, 1.0)).faces(SQUARE, faces) == list(faces)
    assert Region((0.0, 0.0), (0.5, 0.5), boundary=False).faces(SQUARE, faces) == []


# --- what a split must be ---


def test_overlaps_and_clients_without_a_boundary() -> None:
    whole = Region((0.0, 0.0), (1.0, 1.0))
    inner = Region((0.2, 0.2), (0.8, 0.8))
    check_split(SQUARE, [whole, inner], SQUARE.faces)
    check_split(SQUARE, [inner, whole], SQUARE.faces)
    check_split(SQUARE, [whole, whole], SQUARE.faces)
    left, right = Region((0.0, 0.0), (0.7, 1.0)), Region((0.3, 0.0), (1.0, 1.0))
    check_split(SQUARE, [left, right], SQUARE.faces)
    ring = [
        *(Region((0.0, 0.0), (0.2, 1.0)), Region((0.8, 0.0), (1.0, 1.0))),
        *(Region((0.2, 0.0), (0.8, 0.2)), Region((0.2, 0.8), (0.8, 1.0))),
    ]
    check_split(SQUARE, [*ring, Region((0.2, 0.2), (0.8, 0.8), boundary=False)], SQUARE.faces)
    check_split(SQUARE, [Region((0.0, 0.0), (1.0, 1.0), boundary=False)], ())  # no condition anywhere
    halves = [Region((0.0, 0.0), (0.5, 1.0)), Region((0.5, 0.0), (1.0, 1.0), boundary=False)]
    check_split(SQUARE, halves, [(0, "low")])


def part(*ends: tuple[float, float], boundary: bool = True) -> Region:
    return Region(tuple(a for a, _ in ends), tuple(b for _, b in ends), boundary)


ALL, LOW, HIGH = (0.0, 1.0), (0.0, 0.5), (0.5, 1.0)
WRONG: dict[str, tuple[list[Region], str]] = {
    "nobody": ([], "a split needs at least one region"),
    "hole": (
        [part((0.0, 0.4), ALL), part((0.5, 1.0), ALL)],
        r"the split leaves \[0.4, 0.5\] x \[0, 1\] without an owner",
    ),
    "hole in a corner": (
        [part(LOW, ALL), part(HIGH, (0.0, 0.75))],
        r"the split leaves \[0.5, 1\] x \[0.75, 1\] without an owner",
    ),
    "hole in the middle": (
        [part((0.0, 0.25), ALL), part((0.75, 1.0), ALL), part(ALL, (0.0, 0.25)), part(ALL, (0.75, 1.0))],
        r"the split leaves \[0.25, 0.75\] x \[0.25, 0.75\] without an owner",
    ),
    "not up to the end": ([part((0.0, 0.9), ALL)], r"leaves \[0.9, 1\] x \[0, 1\] without an owner"),
    "outside": (
        [part(ALL, ALL), part((0.5, 1.5), ALL)],
        r"region 1, \[0.5, 1.5\] x \[0, 1\], is no part of the domain \[0, 1\] x \[0, 1\]",
    ),
    "beside": ([part((2.0, 3.0), ALL)], r"region 0, \[2, 3\] x \[0, 1\], is no part"),
    "too few axes": ([part(ALL)], r"region 0, \[0, 1\], is no part of the domain \[0, 1\] x \[0, 1\]"),
    "too many axes": ([part(ALL, ALL, ALL)], r"region 0, \[0, 1\] x \[0, 1\] x \[0, 1\], is no part"),
    "boundary of nobody": (
        [part(LOW, ALL), part(HIGH, ALL, boundary=False)],
        r"nobody owns the condition on the face x1 = 1 next to \[0.5, 1\] x \[0, 1\]: set boundary = true",
    ),
    "part of a boundary of nobody": (
        [part(ALL, LOW), part(LOW, HIGH), part(HIGH, HIGH, boundary=False)],
        r"nobody owns the condition on the face x1 = 1 next to \[0.5, 1\] x \[0.5, 1\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_splits(name: str) -> None:
    regions, message = WRONG[name]
    with pytest.raises(FipaError, match=message):
        check_split(SQUARE, regions, SQUARE.faces)


def test_cells_of_many_clients() -> None:
    """Ten strips, each over its neighbours' ends."""
    edges = [i / 10 for i in range(11)]
    strips = [part((max(0.0, a - 0.05), min(1.0, b + 0.05)), ALL) for a, b in pairwise(edges)]
    check_split(SQUARE, strips, SQUARE.faces)
