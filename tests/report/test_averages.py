"""The mean of the last models in tables, figures and on the page; and that all names of series come from one place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from fipa.federation.record import SERIES
from fipa.report.data import averaged_name, load_results, summary
from fipa.report.figures import LAYOUTS
from fipa.report.html import environment
from fipa.report.page import write_page
from fipa.report.panels import AVERAGED, metric_curves
from fipa.report.payload import LABELS, SCHEDULE, STEERING, arm_payload
from fipa.report.style import arm_styles
from fipa.report.tables import Table, final_table, table_note
from report.example import record, results, write

LINEAR = {"name": "test accuracy, %", "goal": "max", "scale": "linear"}
CONFIG = {"arms": [{"name": "FedAvg", "average": 10}, {"name": "FIPA", "average": 10}, {"name": "old", "average": 0}]}


def content(**changes: Any) -> dict[str, Any]:
    """Two arms with averages over two seeds, the second one with a gap and one seed that diverges; one without."""
    return results(
        {
            "FedAvg": {
                "0": record([40.0, 50.0, 60.0], averaged_metric=[40.0, 47.0, 52.0]),
                "1": record([44.0, 54.0, 64.0], averaged_metric=[44.0, 49.0, 56.0]),
            },
            "FIPA": {
                "0": record([50.0, None, 62.0], averaged_metric=[50.0, None, 66.0]),
                "1": record([50.0, None], averaged_metric=[50.0, None], status="diverged"),
            },
            "old": {"0": record([30.0, 31.0, 32.0], averaged_metric=[None] * 3)},
        },
        **{"metric": LINEAR, "config": CONFIG, "figure": "generic", **changes},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", content())


def test_names_of_series_are_those_of_the_record() -> None:
    assert {*LABELS, *STEERING, *SCHEDULE} <= set(SERIES)


def test_summary_has_the_same_numbers_of_the_averages(run: Path) -> None:
    fedavg, fipa, old = summary(load_results(run))
    assert old.averaged is None
    mean = fedavg.averaged
    assert (mean.final_median, mean.final_min, mean.final_max) == (54.0, 52.0, 56.0)
    assert (mean.scores.best.mean, mean.scores.last.mean) == (54.0, 54.0)
    assert mean.scores.mean.mean == pytest.approx((139 / 3 + 149 / 3) / 2)
    assert fipa.averaged.final_median == -math.inf  # one of two diverged
    assert fipa.averaged.scores.best.mean == (66 + 50) / 2
    assert fipa.averaged.difference_to_control.value == 66 - 52  # against the control's average
    assert fipa.difference_to_control.value == 62 - 60


def test_results_of_older_versions_show_nothing(tmp_path: Path) -> None:
    arms = {"FedAvg": {"0": record([0.5, 0.25])}, "FIPA": {"0": record([0.5, 0.1], averaged_metric=[])}}
    path = write(tmp_path / "run", results(arms))
    loaded = load_results(path)
    assert [s.averaged for s in summary(loaded)] == [None, None]
    page = write_page([path], tmp_path / "page.html").read_text()
    assert "mean of the last" not in page.partition("<script")[0]
    assert drawn(loaded)[0] == []


@pytest.mark.parametrize(
    ("arms", "name"),
    [
        (CONFIG["arms"], "mean of the last 10 models"),
        ([{"average": 3}, {"average": 10}], "mean of the last models"),
        ([{"name": "of an older version"}], "mean of the last models"),
        (None, "mean of the last models"),
    ],
)
def test_their_name(arms: Any, name: str) -> None:
    assert averaged_name({"config": {"arms": arms}}) == name


def rendered(table: Table) -> str:
    return str(environment().get_template("report/macros.html").module.table(table))


def test_the_table_has_them_in_the_second_line(run: Path) -> None:
    loaded = load_results(run)
    html = rendered(final_table([(s.arm, loaded, s) for s in summary(loaded)]))
    fedavg, fipa, old = html.split("<tr>")[2:]
    assert '62.00\u00a0±\u00a02.83<span class="second">54.00\u00a0±\u00a02.83</span>' in fedavg
    assert '<td data-value="2">2</td>' in fedavg  # seeds
    assert 'data-value="-inf">diverged<span class="second">diverged</span>' in fipa
    assert "second" not in old
    assert "Second line: the same of the mean of the last 10 models" in table_note([loaded])
    logarithmic = load_results(write(run / "log", content(metric={"name": "e", "goal": "min", "scale": "log"})))
    assert '62 [60, 64]<span class="second">54 [52, 56]</span>' in rendered(
        final_table([(s.arm, logarithmic, s) for s in summary(logarithmic)])
    )


def drawn(loaded: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """The dashed lines of the averages, and the legend."""
    axes: Axes = Figure().subplots()
    metric_curves(axes, loaded, arm_styles(list(loaded["arms"]), ["FedAvg"]), "rounds")
    thin = [line for line in axes.lines if line.get_linewidth() == AVERAGED["linewidth"] and len(line.get_xdata())]
    return thin, axes.get_legend_handles_labels()[1]


def test_figures_draw_them_thin_in_the_colour_of_the_arm(run: Path) -> None:
    loaded = load_results(run)
    lines, legend = drawn(loaded)
    styles = arm_styles(list(loaded["arms"]), ["FedAvg"])
    assert [line.get_color() for line in lines] == [styles["FedAvg"].colour, styles["FIPA"].colour]
    assert list(lines[0].get_ydata())[1:] == [42.0, 48.0, 54.0]
    assert legend == ["FedAvg", "FIPA", "old", "mean of the last 10 models"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_them(layout: str, run: Path) -> None:
    loaded = load_results(run)
    figure = LAYOUTS[layout](loaded, {}, arm_styles(list(loaded["arms"]), ["FedAvg"]))
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert ("mean of the last 10 models" in texts) == (layout != "ablation")  # which has no curves


def test_the_page_shows_and_hides_them(run: Path, browser: Browser, tmp_path: Path) -> None:
    payload = arm_payload(load_results(run), "FedAvg", "FedAvg", arm_styles(["FedAvg"], [])["FedAvg"])
    assert payload["averaged"] == [None, 42.0, 48.0, 54.0]
    browser.open(write_page([run], tmp_path / "page.html"))
    assert browser.messages() == []
    browser.click("[data-axis=rounds]")
    dashed = [trace for trace in browser.traces("metric") if trace["kind"] == "averaged"]
    assert [trace["name"] for trace in dashed] == ["FedAvg", "FIPA"]
    assert dashed[0]["y"] == [None, 42, 48, 54]
    assert any("mean of the last 10 models (dashed)" in text for text in browser.texts("label"))
    browser.click("input[data-averaged]")
    assert not [trace for trace in browser.traces("metric") if trace["kind"] == "averaged"]
