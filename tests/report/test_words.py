import pytest

from fipa.report import data
from fipa.report.words import against_control, describe, number
from report import example


def told(tmp_path, arms, **changes):
    loaded = data.load_results(example.write(tmp_path, example.results(arms, **changes)))
    return describe(loaded, data.summary(loaded))


def seeds(*finals, **extra):
    return {str(k): example.record([final], **extra) for k, final in enumerate(finals)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.2e-6, "2.20e-06"), (0.31234, "0.312"), (1030.4, "1030"), (12345.0, "1.23e+04"), (-0.5, "-0.5")],
)
def test_numbers(value, text):
    assert number(value) == text


def test_the_best_arm_and_its_ratio(tmp_path):
    text = told(tmp_path, {"FedAvg": seeds(0.2, 0.4), "FIPA": seeds(0.02, 0.01, uplink_bytes=[2**22])})
    assert "FIPA ends with the lowest median test MSE: 0.015 [0.01, 0.02] after 1 rounds." in text
    assert "20 times better than the control FedAvg (geometric mean, range 10 to 40)" in text
    assert "better in 2 of 2 common seeds" in text
    assert "Against the control: 4 times the uplink, the same downlink." in text
    assert "2 seeds per arm" in text


def test_arms_that_are_as_good_are_named(tmp_path):
    arms = {"A": seeds(0.2), "B": seeds(0.2000001), "C": seeds(0.21), "D": seeds(None)}
    assert "Within 1% of it: B." in told(tmp_path, arms)


def test_what_is_not_flattering_is_said(tmp_path):
    arms = {"FedAvg": seeds(0.2, 0.4), "published": seeds(0.1, None), "other": seeds(0.9, 0.9, status="running")}
    text = told(tmp_path, arms)
    assert text.startswith("FedAvg ends with the lowest")
    assert "It is the control: no other arm ends better." in text
    assert "Diverged: published in 1 of 2 seeds." in text
    assert "Ends worse than it started: other in 2 of 2 seeds." in text
    assert "Worse than the control in the median: published and other." in text
    assert "Still running, so the numbers will change: other." in text


def test_one_seed_and_no_control(tmp_path):
    text = told(tmp_path, {"A": seeds(0.2)}, control=None)
    assert "No control arm was run." in text
    assert "one seed only" in text


def test_everything_diverged(tmp_path):
    assert told(tmp_path, {"A": seeds(None), "FedAvg": seeds(None)}).startswith("Every arm diverged.")


def test_accuracies_are_compared_by_difference(tmp_path):
    metric = {"name": "accuracy", "goal": "max", "scale": "linear"}
    text = told(tmp_path, {"FedAvg": seeds(0.5), "FIPA": seeds(0.625)}, metric=metric)
    assert text.startswith("FIPA ends at 0.625 after 1 rounds, the highest median accuracy.")
    assert "It ends 0.125 above the control FedAvg; it is better in 1 of 1 common seed." in text


def test_the_cell_of_the_table_says_how_many_pairs_were_finite(tmp_path):
    arms = {"FedAvg": seeds(0.2, 0.2), "FIPA": seeds(0.1, None)}
    loaded = data.load_results(example.write(tmp_path, example.results(arms)))
    control, arm = data.summary(loaded)
    assert against_control(control) == "-"
    assert against_control(arm) == "2 times [2, 2], better in 1/2; over the 1 finite pairs of 2"
