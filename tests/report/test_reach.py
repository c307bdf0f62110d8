"""What it takes to reach a level of the metric."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example as such
from hypothesis import given
from hypothesis import strategies as st

from fipa.report import html, tables
from fipa.report.reach import LEVELS, Reach, levels, reach, round_levels
from report import example


def accuracies(arms, **changes):
    return example.results(arms, metric=dict(example.ACCURACY), **changes)


def seeds(*metrics, **extra):
    return {str(k): example.record(metric, initial=20.0, **extra) for k, metric in enumerate(metrics)}


def test_by_hand():
    up = [3 * 2**20, 2**20, 2**20]  # down is half a MiB each
    arm = seeds([40.0, 50.0, 60.0], [55.0, 40.0, 70.0], [30.0, None, 52.0], uplink_bytes=up, seconds=2.0)
    run = accuracies({"A": arm})
    # 50 in rounds 2, 1 and 3: it stays reached although the second seed falls back
    assert reach(run, "A", 50.0) == Reach(2, 4, 5, 4, reached=3, seeds=3)
    assert reach(run, "A", 20.0) == Reach(0, 0, 0, 0, reached=3, seeds=3)
    assert reach(run, "A", 55.0) == Reach(3, 5, 6.5, 6, reached=2, seeds=3)  # rounds 3, 1 and never
    assert reach(run, "A", 65.0) == Reach(math.inf, math.inf, math.inf, math.inf, reached=1, seeds=3)


def test_half_of_the_seeds_are_not_enough_and_a_seed_that_diverged_has_what_it_reached():
    run = accuracies({"A": seeds([50.0, 60.0], [40.0, 45.0])})
    assert reach(run, "A", 50.0).round == math.inf
    run["arms"]["A"]["1"] = example.record([55.0, None], initial=20.0, status="diverged")
    assert (reach(run, "A", 50.0).round, reach(run, "A", 60.0).reached) == (1, 1)


def test_a_loss_is_reached_from_above():
    run = example.results({"A": {"0": example.record([0.4, 0.2, 0.1])}})
    assert (reach(run, "A", 0.2).round, reach(run, "A", 0.05).reached) == (2, 0)


def test_what_was_not_recorded_is_nan():
    run = accuracies({"A": {"0": {"metric": [50.0], "uplink_bytes": [2**20]}}})
    found = reach(run, "A", 50.0)
    assert (found.round, found.uplink_mib) == (1, 1)
    assert math.isnan(found.total_mib)
    assert math.isnan(found.seconds)


@pytest.mark.parametrize(
    ("worst", "best", "goal", "scale", "expected"),
    [
        (46.0, 57.3, "max", "linear", [45, 50, 55]),
        (90.3, 96.1, "max", "linear", [90, 92, 94, 96]),
        (95.0, 95.9, "max", "linear", [95]),
        (10.0, 97.0, "max", "linear", [0, 20, 40, 60, 80]),
        (0.903, 0.961, "max", "linear", [0.9, 0.92, 0.94, 0.96]),
        (100.0, 100.0, "max", "linear", [100]),
        (0.0, 0.0, "min", "linear", [0]),
        (7.5, 4.0, "min", "linear", [8, 7, 6, 5, 4]),
        (0.3, 0.06, "min", "log", [0.5, 0.2, 0.1]),
        (0.3, 2e-4, "min", "log", [1, 0.1, 0.01, 0.001]),
        (0.5, 3e-9, "min", "log", [1, 1e-2, 1e-4, 1e-6, 1e-8]),
        (0.1, 0.1, "min", "log", [0.1]),
    ],
)
def test_round_levels(worst, best, goal, scale, expected):
    assert round_levels(worst, best, goal, scale) == pytest.approx(expected)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.sampled_from(["linear", "log"]), st.booleans())
@such(244.99999999988358, 244.99999999988358, "linear", True)  # nearly a round number
@such(999.9999999999999, 999.9999999999999, "log", True)
def test_levels_are_few_in_order_and_the_easiest_is_for_all(first, second, scale, high):
    low, top = sorted((first, second))
    goal, (worst, best) = ("max", (low, top)) if high else ("min", (top, low))
    found = np.array(round_levels(worst, best, goal, scale)) * (1 if high else -1)
    assert 1 <= len(found) <= LEVELS
    assert (np.diff(found) > 0).all()
    worst, best = (worst, best) if high else (-worst, -best)
    assert found[0] <= worst + 1e-5 * abs(worst)
    assert found[-1] <= best + 1e-5 * abs(best)


def test_levels_lie_between_the_arms_and_not_at_the_start():
    run = accuracies({"A": seeds([46.0, 44.0]), "B": seeds([50.0, 57.3])})
    assert levels([run]) == [45, 50, 55]
    assert levels([run, accuracies({"C": seeds([71.0])})]) == [40, 50, 60, 70]
    fallen = accuracies({"A": seeds([11.0]), "B": seeds([40.0])})  # both start at 20
    assert levels([fallen]) == [30, 40]  # not 10 and 20
    never = accuracies({"A": {"0": example.record([None], initial=None, status="running")}})
    assert levels([never]) == []


def test_the_tables():
    run = accuracies(
        {
            "FedAvg": seeds([40.0, 46.0]),
            "<FIPA>": seeds([50.0, 56.0], averaged_metric=[40.0, 51.0], uplink_bytes=[2**21] * 2),
        }
    )
    entries = [(arm, run, arm) for arm in run["arms"]]
    first, second = map(rendered, tables.reach_tables(entries, [45.0, 50.0]))
    assert "test accuracy, % 45 or more: 2 of 2 arms, FedAvg with the fewest bytes up, 2 MiB</summary>" in first
    assert "50 or more: 1 of 2 arms, &lt;FIPA&gt; with the fewest bytes up, 2 MiB</summary>" in second
    fedavg, fipa = second.split("<tr>")[2:]
    assert fedavg.count('data-value="inf">-</td>') == 4
    assert '<td data-value="1.0">1<span class="second">2</span></td>' in fipa  # the average a round later
    assert '<td data-value="2.5">2.5<span class="second">5</span></td>' in fipa
    assert "Second line" in tables.reach_note(entries)
    (nothing,) = tables.reach_tables([("FedAvg", run, "FedAvg")], [50.0])
    assert nothing.line.endswith("0 of 1 arms")


def rendered(fold):
    return str(html.environment().get_template("report/macros.html").module.fold(fold))
