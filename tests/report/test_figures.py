import re
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from fipa.errors import FipaError
from fipa.report.figures import LAYOUTS, write_figures
from report import example

EXPECTED = {
    "fit1d": {"test MSE", "seconds", "x", "u(x)", "target", "client 0", "client 1", "FedAvg", "FIPA adaptive"},
    "adaptive": {"communication round", "local steps", "rank", "client 1", "FIPA adaptive, first seed"},
    "gauss-newton": {"communication round K", "gap to the reference parameters", "FedAvg"},
    "fit2d": {"seconds", "target", "error of FedAvg", "error of FIPA adaptive"},
    "generic": {"communication round", "seconds", "uplink MiB", "centralised GN"},
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


@pytest.mark.parametrize("layout", EXPECTED)
def test_labels(tmp_path, layout):
    svg, found = draw(tmp_path, example.full(rounds=12) | {"figure": layout}, example.views())
    assert svg.name == "fit-sin2.svg"
    assert EXPECTED[layout] <= found
    assert "sin(2 pi x) from two halves" in found


def test_every_layout_is_tested():
    assert EXPECTED.keys() == LAYOUTS.keys()


def test_measured_slope_and_exponent_stand_in_the_legend(tmp_path):
    arms = {
        "GN": {"0": example.record([0.25, 0.125, 0.0625])},
        "FIPA": {"0": example.record([0.4, 0.3, 0.2], gap=[2.0, 1.0, 2 / 3])},
    }
    _, found = draw(tmp_path, example.results(arms, reference="GN", figure="gauss-newton"))
    assert "slope of GN: factor 0.5 per round" in found
    assert {"FIPA: measured exponent -1.00", "2 / K"} <= found


@pytest.mark.parametrize("layout", [*LAYOUTS, "unknown"])
def test_hostile_names_null_metrics_and_nothing_optional(tmp_path, layout):
    arms = {"<b> & $x$": {"0": example.record([None])}, "one": {"0": {"metric": [0.4, None, 0.2]}}}
    arms["<b> & $x$"]["0"]["gap"] = [None]
    content = example.results(arms, figure=layout, title="100 $ and 50 $", experiment="../a b", control=None)
    svg, found = draw(tmp_path, content)
    assert svg.parent == tmp_path / "out"
    assert re.fullmatch(r"[\w.-]+", svg.name)
    assert {"100 $ and 50 $", "<b> & $x$"} <= found
    assert layout != "unknown" or "uplink MiB" in found  # drawn as the generic one


def test_the_same_run_gives_the_same_file(tmp_path):
    first = draw(tmp_path / "a", example.full(rounds=5))[0].read_bytes()
    assert draw(tmp_path / "b", example.full(rounds=5))[0].read_bytes() == first


def test_a_long_legend_stays_inside(tmp_path):
    arms = {f"an arm with quite a long name, number {k}": {"0": example.record([0.4, 0.2])} for k in range(8)}
    run = example.write(tmp_path / "run", example.results(arms, figure="fit1d"))
    with Image.open(write_figures(run, tmp_path)[0]) as image:
        edges = [image.convert("L").crop((x, 0, x + 3, image.height)) for x in (0, image.width - 3)]
    assert [edge.getextrema() for edge in edges] == [(255, 255)] * 2


def test_not_a_run(tmp_path):
    with pytest.raises(FipaError, match="not a run directory"):
        write_figures(tmp_path, tmp_path)
