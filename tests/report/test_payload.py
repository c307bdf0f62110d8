import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fipa.report import data, payload
from fipa.report.style import BRIGHT, GREY, Style, arm_styles
from report import example

STYLE = Style("#000000", "solid")


def arm(tmp_path, name, content):
    loaded = data.load_results(example.write(tmp_path, content))
    return payload.arm_payload(loaded, name, name, STYLE)


@given(st.integers(1, 10_000), st.integers(2, 3000))
def test_thinning_keeps_the_ends_and_the_limit(length, limit):
    places = payload.thin(length, limit)
    assert places[0] == 0
    assert places[-1] == length - 1
    assert len(places) == min(length, limit)


def test_numbers_that_json_cannot_hold_are_null():
    assert payload.numbers([1 / 3, math.inf, math.nan, None]) == [0.333333, None, None, None]


def test_long_series_are_thinned(tmp_path):
    long = arm(tmp_path, "A", example.results({"A": {"0": example.record([0.5] * 5000)}}))
    assert len(long["rounds"]) == len(long["metric"]["median"]) == len(long["seconds"]) == payload.POINTS
    assert len(long["series"]["loss"]["median"]) == payload.POINTS - 1
    assert (long["rounds"][0], long["rounds"][-1]) == (0, 5000)
    assert long["seconds"][-1] == pytest.approx(500)


def test_one_seed_has_neither_band_nor_thin_lines(tmp_path):
    single = arm(tmp_path, "A", example.results({"A": {"0": example.record([0.4, None])}}))
    assert single["metric"] == {"median": [0.5, 0.4, None]}
    assert not single.keys() & {"seeds", "spectra", "schedule", "steering", "gap"}


def test_clients_that_take_turns_become_one_series_each():
    record = {"ranks": [[3, 5], [4], [6]], "clients": [[10, 2], [2], [10]]}
    assert payload.by_client(record, "ranks") == {"2": [5, 4, None], "10": [3, None, 6]}
    assert payload.by_client({"ranks": [[1, 2]]}, "ranks") == {"0": [1], "1": [2]}


def test_constant_schedules_are_left_out_and_moving_ones_are_not(tmp_path):
    full = example.full()
    assert not arm(tmp_path, "FedAvg", full).keys() & {"schedule", "steering"}
    adaptive = arm(tmp_path, "FIPA adaptive", full)
    assert adaptive["schedule"]["lines"].keys() == {"ranks", "local_steps"}
    assert adaptive["steering"]["lines"].keys() == {"damping", "trials"}
    assert adaptive["steering"]["accepted"].count(False) == 3
    assert adaptive["gap"]["exponent"] == pytest.approx(-1.2)


def test_errors_are_taken_before_rounding_and_maps_are_thinned():
    target = np.ones((300, 400))
    maps = {"extent": [0, 1, 0, 1], "target": target.tolist(), "arms": {"A": (target + 1e-9).tolist()}}
    view = payload.view_payload({"maps": maps}, {"A": "run: A"})["maps"]
    assert np.shape(view["errors"]["run: A"]) == np.shape(view["target"]) == (payload.PIXELS, payload.PIXELS)
    assert view["errors"]["run: A"][0][0] == pytest.approx(-9)
    low, high = view["range"]
    assert low < high


def test_errors_of_curves_are_there_if_asked_for():
    curves = {"x": [0, 1], "target": [1, 1], "arms": {"A": [1 + 1e-9, 1]}, "regions": [[0, 0.5], [0.5, 1]]}
    assert not payload.view_payload({"curves": curves}, {})["curves"].keys() & {"errors", "range"}
    view = payload.view_payload({"curves": curves | {"error": True}}, {"A": "run: A"})["curves"]
    assert view["errors"] == {"run: A": pytest.approx([1e-9, 1e-16], rel=1e-3)}  # the values have six digits only
    assert view["range"][0] < view["range"][1] == pytest.approx(-9)
    assert (view["names"], view["rows"], view["target_label"]) == (["client 0", "client 1"], [0, 0], "target")
    many = curves | {"regions": [[k / 10, (k + 1) / 10] for k in range(10)]}
    assert payload.view_payload({"curves": many}, {})["curves"]["names"] == []


def test_clients_with_the_same_region_share_a_name():
    boxes = [[0, 1, 0, 1], None, [0, 1, 0, 1], [0, 1, 0, 2]]
    assert payload.client_places(boxes) == {(0, 1, 0, 1): "clients 0, 2", (0, 1, 0, 2): "client 3"}
    assert list(payload.client_places([[0, 1]] * 3).values()) == ["clients 0, 1, 2"]
    assert list(payload.client_places([[0, 1]] * 4).values()) == ["clients 0, 1, ..."]
    maps = payload.view_payload({"maps": example.pde_views()["maps"] | {"boxes": boxes}}, {})["maps"]
    assert maps["boxes"] == [(0, 1, 0, 1), (0, 1, 0, 2)]
    assert maps["names"] == ["clients 0, 2", "client 3"]


def test_without_a_target_there_are_solutions_and_no_errors():
    views = {name: view | {"target": None} for name, view in example.pde_views().items()}
    view = payload.view_payload(views, {}, "FIPA")
    json.dumps(view, allow_nan=False)
    for part, values in (("curves", "arms"), ("maps", "solutions")):
        assert view[part]["target"] is None
        assert not view[part].keys() & {"errors", "range"}
        assert view[part][values].keys() == {"FedAvg", "FIPA low rank", "FIPA", "centralised"}
        assert view[part]["names"] == ["client 0", "client 1", "client 2"]
    arms = [np.asarray(values) for values in views["maps"]["arms"].values()]
    assert view["maps"]["values"] == pytest.approx([np.min(arms), np.max(arms)], rel=1e-3)


def test_maps_have_solutions_labels_and_a_first_arm():
    maps = example.pde_views()["maps"]
    view = payload.view_payload({"maps": maps}, {"FIPA": "run: FIPA"}, "FIPA")["maps"]
    assert (view["x_label"], view["y_label"], view["target_label"]) == ("t", "y", "exact solution")
    assert (view["square"], view["chosen"]) == (False, "run: FIPA")
    assert view["names"] == ["client 0", "client 1", "client 2"]
    assert view["solutions"].keys() == view["errors"].keys() == {"FedAvg", "FIPA low rank", "run: FIPA", "centralised"}
    assert np.allclose(view["solutions"]["FedAvg"], maps["arms"]["FedAvg"], rtol=1e-3)
    assert view["values"] == pytest.approx([np.min(maps["target"]), np.max(maps["target"])], rel=1e-3)
    plain = payload.view_payload({"maps": example.views()["maps"]}, {}, "not kept")["maps"]
    assert (plain["x_label"], plain["y_label"], plain["square"], plain["chosen"]) == ("x", "y", True, None)


def test_nulls_in_views_survive():
    curves = {"x": [0, 1], "target": [0, 1], "arms": {"A": [None, 1]}}
    maps = {"extent": [0, 1, 0, 1], "target": [[0, 1]], "arms": {"A": [[None, None]]}}
    view = payload.view_payload({"curves": curves | {"error": True}, "maps": maps}, {})
    assert view["curves"]["arms"]["A"] == [None, 1]
    assert view["curves"]["errors"]["A"][0] is None
    json.dumps(view, allow_nan=False)


def test_styles_are_distinct_and_controls_are_grey():
    names = [f"arm {k}" for k in range(20)]
    styles = arm_styles([*names, "FedAvg", "other FedAvg"], ["FedAvg", "other FedAvg", None])
    assert len(set(styles.values())) == 22
    assert styles["FedAvg"] == Style(GREY, "solid")
    assert styles["other FedAvg"].colour == GREY
    assert [styles[name].colour for name in names[:6]] == list(BRIGHT)
