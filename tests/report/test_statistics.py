import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fipa.report import statistics

INF = math.inf
values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=6)


def same(left, right):
    return np.array_equal(np.asarray(left, dtype=float), np.asarray(right, dtype=float), equal_nan=True)


def test_table_pads_a_short_row_and_lets_a_diverged_one_stay_bad():
    table = statistics.table([[1.0, None, 3.0], [4.0], [5.0]], missing=INF, stopped=[False, False, True])
    assert same(table, [[1, INF, 3], [4, math.nan, math.nan], [5, INF, INF]])


def test_band_uses_the_seeds_that_have_the_round():
    band = statistics.band(statistics.table([[1.0, 2.0, 3.0], [5.0, 8.0], [3.0, None]]))
    assert same(band.median, [3, 5, 3])
    assert same(band.low, [1, 2, 3])
    assert same(band.high, [5, 8, 3])


def test_the_median_does_not_improve_when_bad_seeds_stop():
    rows = [[1.0, 0.5], [2.0], [3.0]]
    band = statistics.band(statistics.table(rows, missing=INF, stopped=[False, True, True]))
    assert same(band.median, [2, INF])
    assert same(band.low, [1, 0.5])


def test_a_round_without_any_value_is_nan():
    assert same(statistics.band(statistics.table([[None, 1.0]])).median, [math.nan, 1])


@given(st.lists(values, min_size=1, max_size=5))
def test_low_median_high_are_in_order(rows):
    band = statistics.band(statistics.table(rows))
    known = ~np.isnan(band.median)
    assert (band.low[known] <= band.median[known]).all()
    assert (band.median[known] <= band.high[known]).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_middle_is_numpys_median(numbers):
    assert statistics.middle(np.array(numbers)) == pytest.approx(np.median(numbers))


@pytest.mark.parametrize(("numbers", "expected"), [([1, INF], INF), ([1, 2, INF], 2), ([-INF, -INF], -INF)])
def test_middle_of_infinities(numbers, expected):
    assert statistics.middle(np.array(numbers, dtype=float)) == expected


def test_spread():
    assert statistics.spread(np.array([1.0, 3.0])) == (2.0, pytest.approx(math.sqrt(2)))
    mean, std = statistics.spread(np.array([4.0]))
    assert mean == 4
    assert math.isnan(std)
    mean, std = statistics.spread(np.array([4.0, INF]))
    assert mean == INF
    assert math.isnan(std)


def test_paired_ratio_is_the_geometric_mean_of_control_over_arm():
    paired = statistics.paired_ratio(np.array([1.0, 1.0, 4.0]), np.array([2.0, 8.0, 2.0]), "min")
    # 2, 8 and 1/2: the cube root of 8
    assert (paired.value, paired.low, paired.high) == pytest.approx((2, 0.5, 8))
    assert (paired.wins, paired.finite, paired.seeds) == (2, 3, 3)


def test_paired_ratio_of_a_metric_to_maximise_is_above_one_where_the_arm_is_better():
    paired = statistics.paired_ratio(np.array([3.0]), np.array([2.0]), "max")
    assert paired.value == pytest.approx(1.5)
    assert paired.wins == 1


def test_a_diverged_seed_is_no_pair_and_never_a_win():
    paired = statistics.paired_ratio(np.array([INF, 1.0, INF]), np.array([1.0, INF, INF]), "min")
    assert (paired.wins, paired.finite, paired.seeds) == (1, 0, 3)
    assert math.isnan(paired.value)


@pytest.mark.parametrize(("goal", "wins"), [("max", 2), ("min", 1)])
def test_paired_difference_is_arm_minus_control(goal, wins):
    paired = statistics.paired_difference(np.array([0.7, 0.6, 0.5]), np.array([0.5, 0.5, 0.6]), goal)
    assert (paired.value, paired.low, paired.high) == pytest.approx((0.2 / 3, -0.1, 0.2))
    assert paired.wins == wins


@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)), min_size=1, max_size=6))
def test_swapping_arm_and_control_inverts_the_ratio(pairs):
    arm, control = np.array(pairs).T
    there, back = (statistics.paired_ratio(*pair, "min") for pair in ((arm, control), (control, arm)))
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


def test_geometric_slope_stops_at_the_plateau():
    metric = [0.5, 1.0, *(2.0**-k for k in range(1, 21)), *[2.0**-20] * 50]
    line = statistics.geometric_slope(metric)
    assert line.slope == pytest.approx(math.log(0.5))
    assert line.intercept == pytest.approx(math.log(2))  # one at round 1
    assert line.first == 1
    assert line.last == 20  # 19 of 20 halvings are 95 % of the way


@pytest.mark.parametrize("metric", [[], [1.0], [1.0, 2.0, 3.0], [math.nan, math.nan], [math.nan, 1.0]])
def test_nothing_decreases(metric):
    assert statistics.geometric_slope(metric) is None


def test_power_law_measures_the_exponent_after_the_peak():
    gap = [0.0, 0.1, *(3.0 * k**-1.5 for k in range(3, 40))]
    line = statistics.power_law(gap)
    assert line.slope == pytest.approx(-1.5)
    assert line.first == 2


def test_a_growing_gap_has_a_positive_exponent():
    assert statistics.power_law([float(k) for k in range(1, 20)]).slope == pytest.approx(1)


def test_inverse_guide():
    assert statistics.inverse_guide([2 / k for k in range(1, 9)]) == pytest.approx(2)
    assert statistics.inverse_guide([1.0, 2.0]) == pytest.approx(2)  # the geometric mean of 1 and 4
    assert math.isnan(statistics.inverse_guide([0.0, math.nan]))
    assert statistics.power_law([0.0, math.nan]) is None
