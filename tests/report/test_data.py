import math

import pytest

from fipa.errors import FipaError
from fipa.report import data
from report import example

ONE = {"A": {"0": example.record([0.4, 0.2])}}


def load(tmp_path, arms, **changes):
    return data.load_results(example.write(tmp_path, example.results(arms, **changes)))


def test_a_directory_without_results_is_named(tmp_path):
    with pytest.raises(FipaError, match=r"results\.json does not exist.*is not a run directory"):
        data.load_results(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object, found list"),
        ('{"format": "other"}', "format is 'other'"),
        ('{"format": "fipa-results-1"}', "'arms' is missing"),
        ('{"format": "fipa-results-1", "arms": {"A": []}}', "arm 'A' is not an object"),
        ('{"format": "fipa-results-1", "arms": {"A": {"3": {}}}}', "arm 'A', seed 3: 'metric' is missing"),
        ('{"format": "fipa-results-1", "arms": {"A": {"0": {"metric": []}}}}', "no arm has finished a round"),
        ('{"format": "fipa-results-1", "arms": {"A": {"0": {"metric": ["x"]}}}}', "not a number"),
        ('{"format": "fipa-results-1", "metric": {"goal": "up"}, "arms": {}}', "goal min or max"),
    ],
)
def test_broken_files_are_named_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(FipaError, match=message) as error:
        data.load_results(tmp_path)
    assert "results.json" in str(error.value)


def test_a_series_of_the_wrong_length_is_named(tmp_path):
    with pytest.raises(FipaError, match=r"arm 'A', seed 0: 'seconds' .* each of 2 rounds"):
        load(tmp_path, {"A": {"0": example.record([0.4, 0.2]) | {"seconds": [0.1]}}})


def test_arms_without_rounds_are_left_out_and_nan_is_null(tmp_path):
    loaded = load(tmp_path, {**ONE, "B": {"0": example.record([])}, "C": {"0": example.record([math.nan])}})
    assert list(loaded["arms"]) == ["A", "C"]
    assert loaded["arms"]["C"]["0"]["metric"] == [None]


def test_minimal_results_get_defaults(tmp_path):
    (tmp_path / "results.json").write_text('{"format": "fipa-results-1", "arms": {"A": {"0": {"metric": [1]}}}}')
    loaded = data.load_results(tmp_path)
    assert loaded["metric"] == {"name": "metric", "goal": "min", "scale": "linear"}
    (row,) = data.summary(loaded)
    assert (row.final_median, row.status) == (1, "finished")
    assert math.isnan(row.seconds)
    assert math.isnan(row.downlink_bytes)


def test_views(tmp_path):
    assert data.load_views(tmp_path) == {}
    (tmp_path / "views.json").write_text('{"curves": {"x": [1], "arms": {}}}')
    with pytest.raises(FipaError, match=r"views\.json: curves lacks target"):
        data.load_views(tmp_path)
    (tmp_path / "views.json").write_text('{"maps": {"extent": [0, 1, 0, 1], "target": [[1]], "arms": {"A": [1]}}}')
    with pytest.raises(FipaError, match=r"maps of arm 'A' has shape \(1,\), its target \(1, 1\)"):
        data.load_views(tmp_path)
    (tmp_path / "views.json").write_text('{"curves": {"x": [1, 2], "target": null, "arms": {"A": [1, 2], "B": [1]}}}')
    with pytest.raises(FipaError, match=r"curves of arm 'B' has shape \(1,\), A \(2,\)"):
        data.load_views(tmp_path)
    (tmp_path / "views.json").write_text('{"maps": {"extent": [0, 1, 0, 1], "target": null, "arms": {}}}')
    assert data.load_views(tmp_path) == {}


@pytest.mark.parametrize("regions", ["[0, 0.4, 1]", "[[0, 0.4], [0.4, 1]]"])
def test_regions_may_be_the_edges_between_them_as_in_older_runs(tmp_path, regions):
    curves = f'{{"x": [1], "target": [1], "arms": {{}}, "regions": {regions}}}'
    (tmp_path / "views.json").write_text(f'{{"curves": {curves}}}')
    assert data.load_views(tmp_path)["curves"]["regions"] == [[0, 0.4], [0.4, 1]]


def test_summary_by_hand(tmp_path):
    arms = {
        "FedAvg": {s: example.record([0.4, f], seconds=0.5) for s, f in zip("012", (0.2, 0.1, 0.4), strict=True)},
        "FIPA": {s: example.record([0.4, f, f]) for s, f in zip("12", (0.05, 0.8), strict=True)},
    }
    control, arm = data.summary(load(tmp_path, arms))
    assert (control.arm, control.seeds, control.rounds) == ("FedAvg", ("0", "1", "2"), 2)
    assert (control.final_median, control.final_min, control.final_max) == (0.2, 0.1, 0.4)
    assert control.final_mean == pytest.approx(0.7 / 3)
    assert control.final_std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.16 - 0.49 / 3) / 2))
    assert control.best == 0.2
    assert control.seconds == 1
    assert (control.uplink_bytes, control.downlink_bytes) == (2 * 2**20, 2**20)
    assert control.ratio_to_control is None
    assert control.difference_to_control is None
    # seeds 1 and 2 are common: 0.1 / 0.05 = 2 and 0.4 / 0.8 = 1/2
    assert arm.ratio_to_control.value == pytest.approx(1)
    assert (arm.ratio_to_control.low, arm.ratio_to_control.high) == pytest.approx((0.5, 2))
    assert (arm.ratio_to_control.wins, arm.ratio_to_control.seeds) == (1, 2)
    assert arm.worse_than_start == 1  # seed 2 started at 0.5
    assert arm.best == pytest.approx((0.05 + 0.4) / 2)


def test_a_linear_metric_is_compared_by_differences(tmp_path):
    arms = {"FedAvg": {"0": example.record([0.5])}, "FIPA": {"0": example.record([0.75])}}
    loaded = load(tmp_path, arms, metric={"name": "accuracy", "goal": "max", "scale": "linear"})
    arm = data.summary(loaded)[1]
    assert arm.ratio_to_control is None
    assert (arm.difference_to_control.value, arm.difference_to_control.wins) == (0.25, 1)
    assert data.best_arm(loaded, data.summary(loaded)) == arm


@pytest.mark.parametrize(("goal", "bad"), [("min", math.inf), ("max", -math.inf)])
def test_diverged_seeds_are_infinitely_bad(tmp_path, goal, bad):
    stopped = example.record([0.1], status="diverged")  # finite to the end, yet it did not survive
    arms = {"A": {"0": example.record([0.4, None]), "1": stopped, "2": example.record([0.4, 0.2])}}
    loaded = load(tmp_path, arms, metric={"name": "m", "goal": goal, "scale": "linear"})
    (row,) = data.summary(loaded)
    assert (row.status, row.diverged) == ("diverged 2/3", 2)
    assert row.final_median == bad
    assert data.best_arm(loaded, [row]) is None
    assert data.metric_table(loaded, "A").tolist() == [[0.5, 0.4, bad], [0.5, 0.1, bad], [0.5, 0.4, 0.2]]


def test_status_of_a_run_in_progress(tmp_path):
    arms = {"A": {"0": example.record([0.4], status="running"), "1": example.record([None])}}
    assert data.summary(load(tmp_path, arms))[0].status == "diverged 1/2, running"
    assert data.summary(load(tmp_path, {"A": {"0": arms["A"]["0"]}}))[0].status == "running"


def test_the_reference_is_not_the_best_arm(tmp_path):
    arms = {"A": {"0": example.record([0.4])}, "GN": {"0": example.record([0.1])}}
    loaded = load(tmp_path, arms, reference="GN")
    assert data.best_arm(loaded, data.summary(loaded)).arm == "A"


def test_the_best_federated_arm_is_neither_control_nor_reference_nor_centralised(tmp_path):
    arms = {name: {"0": example.record([k / 10])} for k, name in enumerate(("pooled", "GN", "FedAvg", "A", "B"), 1)}
    config = {"arms": [{"name": "pooled", "centralised": True}, {"name": "A", "centralised": False}]}
    assert data.best_federated(load(tmp_path, arms, reference="GN", config=config)) == "A"
    assert data.best_federated(load(tmp_path, arms, reference="GN")) == "pooled"  # nothing tells
    assert data.best_federated(load(tmp_path, {"FedAvg": arms["FedAvg"]})) is None


def test_peak_memory_is_the_largest_of_all_rounds_and_seeds(tmp_path):
    seeds = {"0": example.record([1.0, 1.0], peak_memory_mib=[300.0, None]), "1": example.record([1.0])}
    seeds["2"] = example.record([1.0, 1.0], peak_memory_mib=[280.0, 310.5])
    measured, other = data.summary(load(tmp_path, {"A": seeds, "B": {"0": example.record([1.0])}}))
    assert measured.peak_memory_mib == 310.5
    assert math.isnan(other.peak_memory_mib)


def test_running_totals_start_at_zero_and_never_run_backwards(tmp_path):
    arms = {"A": {"0": example.record([1.0, 1.0, 1.0], seconds=1.0), "1": example.record([1.0], seconds=9.0)}}
    loaded = load(tmp_path, arms)
    assert data.cumulative(loaded, "A", "seconds").tolist() == [0, 5, 5, 5]
    assert data.cumulative(loaded, "A", "peak_memory_mib") is None
    assert data.cumulative(loaded, "A", "uplink_bytes", "downlink_bytes")[-1] == 3 * (2**20 + 2**19)
    assert data.cumulative(loaded, "A", "uplink_bytes", "peak_memory_mib") is None


def test_series_of_other_quantities(tmp_path):
    arms = {"A": {"0": example.record([1.0, None]), "1": example.record([3.0, 4.0], damping=[0.1, None])}}
    loaded = load(tmp_path, arms)
    assert data.series_band(loaded, "A", "loss").median.tolist() == [2, math.inf]
    assert data.series_band(loaded, "A", "damping").median[0] == 0.1
    assert data.series_band(loaded, "A", "gap") is None


def test_the_reference_may_have_fewer_rounds(tmp_path):
    loaded = load(tmp_path, {"A": {"0": example.record([1.0, 1.0, 1.0], gap=[0.5])}})
    gap = data.series_band(loaded, "A", "gap").median
    assert gap[0] == 0.5
    assert [math.isnan(v) for v in gap] == [False, True, True]
    with pytest.raises(FipaError, match="'gap' must be"):
        load(tmp_path, {"A": {"0": example.record([1.0], gap=[0.5, 0.5])}})


def test_summary_of_results_that_were_not_loaded_from_a_file():
    rows = data.summary(
        {"metric": {"name": "m", "goal": "min", "scale": "log"}, "arms": {**ONE, "B": {"0": {"metric": []}}}}
    )
    assert [row.arm for row in rows] == ["A"]
