"""Trust regions."""

import math

import pytest

from fipa import FipaError
from fipa.federation.trust import TrustRegion


@pytest.mark.parametrize(
    ("ratio", "full", "expected"),
    [
        (-1.0, True, 0.5),
        (0.2, False, 0.5),
        (0.5, True, 1.0),
        (0.9, False, 1.0),
        (0.9, True, 2.0),
        (math.nan, True, 1.0),
    ],
)
def test_the_radius_follows_what_came_true(ratio: float, full: bool, expected: float) -> None:
    assert TrustRegion().adapted(1.0, ratio, full) == expected


def test_news_of_many_rounds_count_as_one_in_so_many() -> None:
    """Else a radius that was too large once would be halved until the last client who saw it is back."""
    radius = 1.0
    for _ in range(20):
        radius = TrustRegion().adapted(radius, 0.0, True, age=20)
    assert radius == pytest.approx(0.5)


@pytest.mark.parametrize("settings", [{"initial": 0.0}, {"bad": 0.8}, {"trials": 0}])
def test_settings_that_make_no_sense(settings: dict[str, float]) -> None:
    with pytest.raises(FipaError, match="trust region"):
        TrustRegion(**settings)  # type: ignore[arg-type]
