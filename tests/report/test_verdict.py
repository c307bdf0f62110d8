"""The sentence that a report opens with, and the statistics behind it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fipa.report import data, significance, tables, verdict
from report import example

PERCENT = dict(example.ACCURACY)
FRACTION = {"name": "accuracy", "goal": "max", "scale": "linear"}


def load(tmp_path, arms, **changes):
    return data.load_results(example.write(tmp_path, example.results(arms, **changes)))


def seeds(*finals, **extra):
    return {str(k): example.record([final], **extra) for k, final in enumerate(finals)}


@given(st.floats(-50, 50), st.integers(1, 60))
def test_students_t_is_that_of_scipy(t, freedom):
    assert significance.two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 40])
def test_its_quantile_is_that_of_scipy(freedom):
    assert significance.quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_is_never_below(values):
    names = [str(k) for k in range(len(values))]
    found = significance.holm(dict(zip(names, values, strict=True)))
    corrected = np.array([found[name] for name in names])
    assert (corrected >= np.array(values)).all()
    assert (corrected <= 1).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(corrected[order]) >= 0).all()


def test_a_comparison_is_the_paired_t_test(tmp_path):
    ours, theirs = np.array([57.0, 58.5, 57.9, 59.0]), np.array([46.0, 46.1, 47.5, 46.8])
    found = significance.compare(load(tmp_path, {"FedAvg": seeds(*theirs), "FIPA": seeds(*ours)}, metric=PERCENT))
    expected = stats.ttest_rel(ours, theirs)
    low, high = expected.confidence_interval(0.95)
    assert (found["FIPA"].p, found["FIPA"].pairs) == (pytest.approx(expected.pvalue), 4)
    assert (found["FIPA"].low, found["FIPA"].high) == pytest.approx((low, high))
    assert found.keys() == {"FIPA"}


def test_ratios_are_compared_by_their_logarithms(tmp_path):
    found = significance.compare(load(tmp_path, {"FedAvg": seeds(0.2, 0.4, 0.3), "FIPA": seeds(0.02, 0.01, 0.03)}))
    expected = stats.ttest_rel(np.log([0.2, 0.4, 0.3]), np.log([0.02, 0.01, 0.03]))
    low, high = expected.confidence_interval(0.95)
    assert found["FIPA"].value == pytest.approx((10 * 40 * 10) ** (1 / 3))
    assert (found["FIPA"].low, found["FIPA"].high) == pytest.approx((math.exp(low), math.exp(high)))
    assert found["FIPA"].p == pytest.approx(expected.pvalue)


def test_more_arms_need_more_evidence(tmp_path):
    arms = {"FedAvg": seeds(46.0, 46.2, 45.9), "A": seeds(57.0, 57.9, 57.1)}
    alone = significance.compare(load(tmp_path, arms, metric=PERCENT))["A"].p
    arms |= {f"B{k}": seeds(46.1 + 0.1 * k, 46.0, 46.3) for k in range(4)}
    assert significance.compare(load(tmp_path, arms, metric=PERCENT))["A"].p == pytest.approx(5 * alone)


def test_clearly_better(tmp_path):
    arms = {"FedAvg": seeds(46.0, 46.2, 45.9), "FIPA": seeds(57.0, 57.3, 57.1)}
    text = verdict.verdict(load(tmp_path, arms, metric=PERCENT))
    assert text == (
        "FIPA ends at 57.13 % test accuracy, 11.10 points above the control FedAvg (95 % interval +10.85 to +11.35, "
        "p < 0.001, 3 paired seeds)."
    )


def test_perhaps_chance(tmp_path):
    arms = {"FedAvg": seeds(0.50, 0.60), "FIPA": seeds(0.55, 0.62)}
    text = verdict.verdict(load(tmp_path, arms, metric=FRACTION))
    assert "FIPA ends at accuracy 0.585, 0.035 above the control FedAvg, which may be chance (95 % interval" in text
    assert "p = 0.26, 2 paired seeds)." in text


def test_one_seed_is_too_few(tmp_path):
    text = verdict.verdict(load(tmp_path, {"FedAvg": seeds(0.2), "FIPA": seeds(0.02)}))
    assert text == (
        "FIPA ends at test MSE 0.02, 10 times lower than the control FedAvg; one seed is too few to tell whether that "
        "is chance."
    )


@pytest.mark.parametrize(
    ("arms", "changes", "text"),
    [
        ({"FedAvg": seeds(0.2), "A": seeds(0.3)}, {}, "No arm beats the control FedAvg, which ends at test MSE 0.2."),
        ({"FedAvg": seeds(0.2)}, {}, "FedAvg, the control, ends at test MSE 0.2; no other arm was run."),
        ({"A": seeds(0.2)}, {}, "A is best: it ends at test MSE 0.2; there is no control to compare it with."),
        ({"A": seeds(None), "FedAvg": seeds(None)}, {}, "Every arm diverged."),
        (
            {"A": {"7": example.record([0.1])}, "FedAvg": seeds(0.2)},
            {},
            "A ends at test MSE 0.1, but has no seed in common with the control FedAvg.",
        ),
        (
            {"A": seeds(0.1), "FedAvg": seeds(None)},
            {},
            "A ends at test MSE 0.1, while the control FedAvg diverged.",
        ),
        (
            {"A": seeds(0.1, 0.1, None), "FedAvg": seeds(0.2, 0.2, 0.2)},
            {},
            "A ends at test MSE 0.1, 2 times lower than the control FedAvg, but one of the two diverged on 1 of 3 "
            "seeds.",
        ),
        (
            {"FedAvg": seeds(0.2), "pooled": seeds(0.001)},
            {"config": {"arms": [{"name": "pooled", "centralised": True}]}},
            "No arm beats the control FedAvg, which ends at test MSE 0.2.",
        ),
        (
            {"FedAvg": seeds(0.2), "A": seeds(0.3, status="running")},
            {},
            "So far, no arm beats the control FedAvg, which is at test MSE 0.2.",
        ),
    ],
)
def test_other_verdicts(tmp_path, arms, changes, text):
    assert verdict.verdict(load(tmp_path, arms, **changes)) == text


def test_what_it_rests_on(tmp_path):
    loaded = load(tmp_path, {"FedAvg": seeds(0.2), "A": seeds(0.1, uplink_bytes=[2**22]), "B": seeds(None)})
    told = ["1 seed", "1 round", "A against the control: 4 times the uplink, the same downlink", "1 of 3 arms diverged"]
    assert verdict.facts(loaded) == told
    staged = verdict.facts(data.load_results(example.write(tmp_path, example.images())))
    assert staged[:2] == ["3 seeds", "15 rounds after a warm-up of 1000"]
    assert "FIPA against the control: the same uplink, the same downlink" in staged


def test_the_main_table_is_best_first(tmp_path):
    loaded = data.load_results(example.write(tmp_path, example.images()))
    table = tables.main_table([(loaded, {arm: arm for arm in loaded["arms"]})])
    assert [row[0][1] for row in table.rows] == ["FIPA", "FIPA, 200 eigenpairs", "FedAvg", "FedProx", "FedFisher"]
    cells = dict(zip(table.heads, [text for _, text in table.rows[0]], strict=True))
    assert cells["against the control"] == "+11.10"
    assert (cells["uplink MiB"], cells["downlink MiB"]) == ("15", "7.5")
    assert cells["95 % interval"] == "+9.00 to +13.20"
    assert cells["p"] == "0.006"
    assert [text for _, text in table.rows[-1]][2:5] == ["+4.26", "-", "-"]  # it diverged on a seed
    assert [text for _, text in table.rows[2]][2:5] == ["control", "-", "-"]
    assert "Holm's correction for 3 arms" in tables.main_note([loaded])
    assert "centralised is shown for comparison" in tables.main_note([example.pde_results("pde1d")])


def test_with_many_arms_the_control_and_the_best_are_in_colour(tmp_path):
    arms = {f"A{k}": seeds(50.0 + k) for k in range(12)} | {"FedAvg": seeds(10.0)}
    loaded = load(tmp_path, arms, metric=PERCENT)
    assert verdict.in_colour(loaded) == ["A7", "A8", "A9", "A10", "A11", "FedAvg"]
    assert verdict.in_colour(load(tmp_path, {"A": seeds(1.0), "FedAvg": seeds(2.0)})) == ["A", "FedAvg"]
