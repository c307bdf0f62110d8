import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.text import Text
from PIL import Image

from fipa.errors import FipaError
from fipa.report.data import load_results
from fipa.report.figures import LAYOUTS, write_figures
from fipa.report.panels import plain
from fipa.report.style import arm_styles
from report import example

EXPECTED = {
    "fit1d": {"test MSE", "seconds", "x", "u(x)", "target", "client 0", "client 1", "FedAvg", "FIPA adaptive"},
    "adaptive": {"communication round", "local steps", "rank", "client 1", "FIPA adaptive, first seed"},
    "gauss-newton": {"communication round K", "gap to the reference parameters", "FedAvg"},
    "fit2d": {"seconds", "target", "error of FedAvg", "error of FIPA adaptive"},
    "pde1d": {"communication round", "seconds", "x", "u(x)", "target", "pointwise error", "client 1", "FIPA adaptive"},
    "pde2d": {"communication round", "seconds", "x", "y", "target", "client 1", "error of FIPA adaptive"},
    "refine": {"communication round", "test MSE", "centralised GN", "FIPA as published"},
    "ablation": {"rounds of the warm-up", "lowest of the arm's rounds", "at the start", "FIPA adaptive"},
    "generic": {"communication round", "seconds", "uplink of all clients, MiB, log scale", "centralised GN"},
}


def texts(path):
    return {"".join(e.itertext()).strip() for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}


def draw(tmp_path, content, views=None):
    png, svg = write_figures(example.write(tmp_path / "run", content, views), tmp_path / "out")
    with Image.open(png) as image:
        assert image.format == "PNG"
        assert round(image.info["dpi"][0]) == 160
        assert len(image.convert("L").getcolors()) > 10  # not an empty sheet
    return svg, texts(svg)


@pytest.mark.long
@pytest.mark.parametrize("layout", EXPECTED)
def test_labels(tmp_path, layout):
    svg, found = draw(tmp_path, example.full(rounds=12) | {"figure": layout}, example.views())
    assert svg.name == "fit-sin2.svg"
    assert EXPECTED[layout] <= found
    assert "sin(2 pi x) from two halves" in found


def test_every_layout_is_tested():
    assert EXPECTED.keys() == LAYOUTS.keys()


def pde(layout, clients=3, **changes):
    """The axes of a PDE figure, by place."""
    views = example.pde_views(clients) | changes
    results = example.pde_results(layout)
    return LAYOUTS[layout](results, views, arm_styles(list(results["arms"]), ["FedAvg"])).axes


def test_pointwise_errors_on_a_log_axis_over_the_regions_of_the_clients():
    *_, solution, error = pde("pde1d")
    assert [axes.get_yscale() for axes in (solution, error)] == ["linear", "log"]
    for axes in (solution, error):
        assert {"client 0", "client 1", "client 2"} == {text.get_text() for text in axes.texts}
        assert [patch.get_x() for patch in axes.patches] == pytest.approx([0, 1 / 3, 2 / 3])
    lines = {line.get_label(): line for line in error.lines}
    assert lines.keys() == {"FedAvg", "FIPA low rank", "FIPA", "centralised"}
    assert max(lines["FedAvg"].get_ydata()) == pytest.approx(2000 * max(lines["FIPA"].get_ydata()))
    low, high = error.get_ylim()
    assert 1e-12 < low < max(lines["centralised"].get_ydata())  # not down to where the error is zero, at both ends
    assert high > max(lines["FedAvg"].get_ydata())


def test_maps_of_the_best_federated_arm_and_the_control():
    _, _, target, solution, error, control, *bars = pde("pde2d")
    titles = [axes.get_title() for axes in (target, solution, error, control)]
    assert titles == ["exact solution", "FIPA", "error of FIPA", "error of FedAvg"]  # not the centralised one
    assert len(bars) == 2
    for axes in (target, solution, error, control):
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("t", "y")
        assert axes.get_aspect() == "auto"  # time and space
        assert len(axes.patches) == 3
    assert [text.get_text() for text in target.texts] == ["client 0", "client 1", "client 2"]
    assert solution.images[0].get_clim() == target.images[0].get_clim()
    assert error.images[0].get_clim() == control.images[0].get_clim()
    assert error.images[0].get_array().max() == pytest.approx(
        control.images[0].get_array().max() + math.log10(1e-4 / 0.2)
    )


def test_a_square_stays_square_and_many_clients_have_no_numbers():
    assert pde("pde2d", maps=example.views()["maps"])[2].get_aspect() == 1
    *_, solution, error = pde("pde1d", clients=10)
    assert [len(axes.texts) for axes in (solution, error, pde("pde2d", clients=10)[2])] == [0, 0, 0]


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ([[0, 0.6], [0.4, 1]], {"client 0": 0.3, "client 1": 0.7}),
        ([[0.5, 1], [0, 0.5]], {"client 0": 0.75, "client 1": 0.25}),
        ([[0, 1], [0, 1], [0.25, 0.5]], {"clients 0, 1": 0.5, "client 2": 0.375}),
    ],
)
def test_every_region_has_the_name_of_its_client(regions, expected):
    for axes in pde("pde1d", curves=example.pde_views()["curves"] | {"regions": regions})[2:]:
        assert {text.get_text(): text.get_position()[0] for text in axes.texts} == pytest.approx(expected)
        assert len(axes.patches) == len(expected)


def test_names_in_the_same_place_stand_in_rows():
    *_, axes = pde("pde1d", curves=example.pde_views()["curves"] | {"regions": [[0, 1], [0.4, 0.6]]})
    first, second = (text.get_position() for text in axes.texts)
    assert first[0] == second[0]
    assert first[1] > second[1]


def test_clients_outside_of_the_plane_keep_their_numbers():
    boxes = [None, [0, 0.5, -1, 1], None, [0.5, 1, -1, 1], [0.5, 1, -1, 1]]
    target, solution, *_ = pde("pde2d", maps=example.pde_views()["maps"] | {"boxes": boxes})[2:]
    assert [text.get_text() for text in target.texts] == ["client 1", "clients 3, 4"]
    assert len(target.patches) == len(solution.patches) == 2


def without_target(name):
    return {name: example.pde_views()[name] | {"target": None}}


def labels(figure):
    """All texts of a figure, before it is drawn, which takes longer than to make it."""
    return {text.get_text() for text in figure.findobj(Text)}


def test_curves_without_a_target_have_no_errors():
    _, _, solution = pde("pde1d", **without_target("curves"))
    assert [line.get_label() for line in solution.lines] == ["FedAvg", "FIPA low rank", "FIPA", "centralised"]
    assert [text.get_text() for text in solution.texts] == ["client 0", "client 1", "client 2"]
    found = labels(solution.figure)
    assert "solution after the last round" in found
    assert not found & {"exact solution", "pointwise error"}


@pytest.mark.parametrize(("layout", "titles"), [("pde2d", ["FIPA", "FedAvg"]), ("fit2d", ["FedAvg", "FIPA"])])
def test_maps_without_a_target_are_the_solutions(layout, titles):
    curves = 2 if layout == "pde2d" else 1
    first, second, *bars = pde(layout, **without_target("maps"))[curves:]
    assert [first.get_title(), second.get_title()] == titles
    assert len(bars) == 1
    assert [text.get_text() for text in first.texts] == ["client 0", "client 1", "client 2"]
    assert first.images[0].get_clim() == second.images[0].get_clim()
    assert set(titles) < labels(first.figure)
    view = without_target("maps")["maps"] | {"arms": {"centralised": example.pde_views()["maps"]["target"]}}
    assert len(pde(layout, maps=view)) == curves


@pytest.mark.parametrize("layout", ["pde1d", "pde2d"])
def test_a_pde_without_pictures_has_the_metric(layout):
    axes = pde(layout, curves=None, maps=None)
    assert [place.get_xlabel() for place in axes] == ["communication round", "seconds"]


def test_models_that_were_not_kept_have_no_map():
    view = example.pde_views()["maps"]
    view["arms"] = {}
    assert [place.get_title() for place in pde("pde2d", maps=view)[2:]] == ["exact solution", ""]  # and its colour bar
    view["arms"] = {"FedAvg": [[None] * 50] * 70}
    assert "error of FedAvg" in [place.get_title() for place in pde("pde2d", maps=view)]


@pytest.mark.long
def test_measured_slope_and_exponent_stand_in_the_legend(tmp_path):
    arms = {
        "GN": {"0": example.record([0.25, 0.125, 0.0625])},
        "FIPA": {"0": example.record([0.4, 0.3, 0.2], gap=[2.0, 1.0, 2 / 3])},
    }
    _, found = draw(tmp_path, example.results(arms, reference="GN", figure="gauss-newton"))
    assert "slope of GN: factor 0.5 per round" in found
    assert {"FIPA: measured exponent -1.00", "2 / K"} <= found


def hostile(layout):
    arms = {"<b> & $x$": {"0": example.record([None])}, "one": {"0": {"metric": [0.4, None, 0.2]}}}
    arms["<b> & $x$"]["0"]["gap"] = [None]
    return example.results(arms, figure=layout, title="100 $ and 50 $", experiment="../a b", control=None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_with_mathematics_null_metrics_and_nothing_optional(tmp_path, layout):
    content = load_results(example.write(tmp_path, hostile(layout)))
    found = labels(LAYOUTS[layout](content, {}, arm_styles(list(content["arms"]), [])))
    assert any(text.startswith(plain("<b> & $x$")) for text in found)
    assert not [text for text in found if "$x$" in text]  # which would be drawn as mathematics


@pytest.mark.long
def test_hostile_names_as_they_are_drawn(tmp_path):
    svg, found = draw(tmp_path, hostile("unknown"))
    assert svg.parent == tmp_path / "out"
    assert re.fullmatch(r"[\w.-]+", svg.name)
    assert {"100 $ and 50 $", "<b> & $x$"} <= found
    assert "uplink of all clients, MiB, log scale" in found  # drawn as the generic one


@pytest.mark.long
def test_the_same_run_gives_the_same_file(tmp_path):
    first = draw(tmp_path / "a", example.full(rounds=5))[0].read_bytes()
    assert draw(tmp_path / "b", example.full(rounds=5))[0].read_bytes() == first


@pytest.mark.long
def test_a_long_legend_stays_inside(tmp_path):
    arms = {f"an arm with quite a long name, number {k}": {"0": example.record([0.4, 0.2])} for k in range(8)}
    run = example.write(tmp_path / "run", example.results(arms, figure="fit1d"))
    with Image.open(write_figures(run, tmp_path)[0]) as image:
        edges = [image.convert("L").crop((x, 0, x + 3, image.height)) for x in (0, image.width - 3)]
    assert [edge.getextrema() for edge in edges] == [(255, 255)] * 2


def test_not_a_run(tmp_path):
    with pytest.raises(FipaError, match="not a run directory"):
        write_figures(tmp_path, tmp_path)
