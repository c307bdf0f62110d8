import itertools
import json
import math
import re

import pytest

from fipa.errors import FipaError
from fipa.report.data import load_results
from fipa.report.page import write_page
from fipa.report.verdict import verdict
from report import example

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    directory = tmp_path_factory.mktemp("full")
    run = example.write(directory / "run", example.full(), example.views())
    return write_page([run], directory / "report" / "index.html")


def page(tmp_path, content, views=None):
    return write_page([example.write(tmp_path / "run", content, views)], tmp_path / "page.html")


@pytest.fixture
def opened(browser, full):
    """The full page, loaded once: a test puts back what it changes."""
    if not browser.shows(full):
        browser.open(full)
        browser.unfold()
    return browser


@pytest.fixture(autouse=True)
def _quiet(request):
    """No test leaves an error on the console, and no page asks the network for anything."""
    yield
    if "browser" in request.fixturenames:
        browser = request.getfixturevalue("browser")
        assert browser.messages() == []
        assert [url for url in browser.requests() if url.startswith(("http", "ws"))] == []


def medians(browser, chart="metric"):
    return {t["name"]: t for t in browser.traces(chart) if t["kind"] == "median"}


def maps(browser, what):
    """Something of every map, in JavaScript."""
    return browser.run(f"return [...document.querySelectorAll('.maps > div')].map(d => d.{what})")


def test_sections_stand_in_order(opened, full):
    assert opened.texts("h1") == ["sin(2 pi x) from two halves"]
    assert opened.texts("h2") == ["Test MSE", "The arms, best first", "Details", "How this was made"]
    assert opened.texts("summary h3") == [
        "In words",
        "All numbers",
        "What it takes",
        "Round by round",
        "Spectra of the clients",
        "Ranks and local steps of the clients",
        "Step control",
        "Gap to the reference trajectory",
        "Fit after the last round",
        "Gaussian mixture",
        "Events",
    ]
    assert opened.texts("p.verdict") == [verdict(load_results(full.parent.parent / "run"))]
    assert opened.texts("p.summary")[0].startswith("FIPA adaptive ends with the lowest median test MSE")
    levels = opened.run("return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))


def test_axis_buttons_change_the_data_and_the_title(opened):
    assert opened.texts("[data-axis]") == [
        "rounds",
        "seconds",
        "uplink",
        "uplink + downlink",
    ]  # a loss opens with rounds
    seconds, rounds = ("seconds", "seconds", "seconds", 0, 9), ("rounds", "rounds", "communication round", 0, 30)
    uplink = ("uplink", "uplink", "uplink of all clients, MiB, log scale", 6, 180)
    traffic = ("traffic", "uplink + downlink", "up + down of all clients, MiB, log scale", 6.5, 195)
    for name, button, title, first, last in (seconds, uplink, traffic, rounds):
        opened.click(f"[data-axis={name}]")
        assert opened.axis("metric", "xaxis") == (title, "log" if name in ("uplink", "traffic") else "linear")
        x = medians(opened)["FIPA low rank"]["x"]
        assert (x[0], x[-1]) == pytest.approx((first, last))
        assert opened.texts("[data-axis][aria-pressed=true]") == [button]


def test_the_start_has_no_place_among_bytes_in_any_kind_of_line(opened):
    opened.click("[data-axis=uplink]")
    opened.click("input[data-seeds]")
    lines = opened.traces("metric")
    assert {t["kind"] for t in lines} == {"median", "band", "seed"}
    assert all(x is None or x > 0 for t in lines for x in t["x"])
    assert all(len(t["x"]) == len(t["y"]) for t in lines)
    byte, rounds = medians(opened)["FedAvg"]["y"], len(medians(opened)["FedAvg"]["x"])
    opened.click("input[data-seeds]")
    opened.click("[data-axis=rounds]")
    assert medians(opened)["FedAvg"]["y"][1:] == byte
    assert rounds == 30


def test_an_accuracy_opens_with_uplink(browser, tmp_path):
    content = example.images()
    content["arms"]["pooled"] = {"0": example.record([50.0], initial=40.0, uplink_bytes=[0], downlink_bytes=[0])}
    for record in content["arms"]["FedProx"].values():
        record["downlink_bytes"] = []  # as in older runs
    browser.open(page(tmp_path, content))
    assert browser.texts("[data-axis]")[:3] == ["uplink", "uplink + downlink", "rounds"]
    assert browser.texts("[data-axis][aria-pressed=true]") == ["uplink"]
    assert browser.axis("metric", "xaxis")[1] == "log"
    assert medians(browser)["FIPA"]["x"] == list(range(1, 16))
    assert "pooled" not in medians(browser)  # it sends nothing
    browser.click("[data-axis=traffic]")
    assert medians(browser)["FIPA"]["x"][-1] == pytest.approx(22.5)
    assert "FedProx" not in medians(browser)
    browser.click("[data-axis=rounds]")
    assert {"pooled", "FedProx"} <= medians(browser).keys()


def test_what_it_takes_is_folded_and_sorts(browser, tmp_path):
    browser.open(page(tmp_path, example.images()))
    browser.run("document.querySelector('details.reached').open = true")
    told = browser.texts("details.reached > details > summary")
    assert told[1] == "test accuracy, % 50 or more: 3 of 5 arms, FIPA with the fewest bytes up, 3 MiB"
    assert not browser.run("return [...document.querySelectorAll('table.reach')].some(t => t.checkVisibility())")
    browser.run("document.querySelectorAll('details.reached > details')[1].open = true")
    table = "details.reached > details:nth-of-type(2) table.reach"
    assert browser.run("return document.querySelector(arguments[0]).checkVisibility()", table)
    heads = ["arm", "round", "uplink MiB", "uplink + downlink MiB", "seconds", "seeds"]
    assert browser.texts(f"{table} thead th") == heads
    browser.click(f"{table} thead th:nth-child(3) button")
    arms = browser.texts(f"{table} tbody th")
    assert (arms[0], set(arms[-2:])) == ("FIPA", {"FedAvg", "FedProx"})
    assert browser.texts(f"{table} tbody tr:last-child td")[:4] == ["-"] * 4
    with browser.width(400):
        browser.open(tmp_path / "page.html")
        browser.unfold()
        assert browser.run("return document.documentElement.scrollWidth") <= 400


def test_scale_buttons(opened):
    assert opened.axis("metric", "yaxis") == ("test MSE", "log")
    opened.click("[data-scale=linear]")
    assert opened.axis("metric", "yaxis") == ("test MSE", "linear")
    opened.click("[data-scale=log]")
    assert opened.axis("metric", "yaxis") == ("test MSE", "log")


def test_band_and_single_seeds_toggle(opened):
    def kinds():
        return [t["kind"] for t in opened.traces("metric")]

    assert (kinds().count("band"), kinds().count("seed")) == (5, 0)
    opened.click("input[data-band]")
    opened.click("input[data-seeds]")
    assert (kinds().count("band"), kinds().count("seed")) == (0, 15)
    opened.click("input[data-band]")
    opened.click("input[data-seeds]")
    assert (kinds().count("band"), kinds().count("seed")) == (5, 0)


def test_legend_greys_an_arm_and_hides_it_in_other_charts(opened):
    opened.click(".legend button:nth-child(2)")
    assert "FIPA low rank" not in {t["name"] for t in opened.traces("series")}
    kinds = [t["kind"] for t in opened.traces("metric") if t["name"] == "FIPA low rank"]
    assert kinds == ["muted"]  # no band
    opened.click("input[data-others]")
    assert "FIPA low rank" not in {t["name"] for t in opened.traces("metric")}
    opened.click("input[data-others]")
    assert opened.texts(".legend [aria-pressed=false]") == ["FIPA low rank"]
    opened.click(".legend button:nth-child(2)")
    assert "FIPA low rank" in medians(opened)


def test_other_series(opened):
    opened.choose("[data-series]", "loss")
    assert opened.axis("series", "yaxis") == ("training loss", "log")
    opened.choose("[data-series]", "cosine_with_fedavg")
    assert opened.axis("series", "yaxis") == ("cosine with the FedAvg step", "linear")
    assert set(medians(opened, "series")["FedAvg"]["y"]) == {1}


def test_spectra_schedules_and_step_control(opened):
    opened.choose("[data-block=spectra] [data-round]", "1")
    first = opened.traces("spectra")
    assert [t["name"] for t in first] == ["client 0", "client 1"]
    assert first[0]["y"][0] == 1
    opened.choose("[data-block=spectra] [data-round]", "30")
    assert opened.traces("spectra")[0]["y"][0] == pytest.approx(1 / 30)
    assert len(opened.traces("schedule")) == 4
    assert [t["name"] for t in opened.traces("steering")] == ["damping", "rejected", "trials", "rejected"]


def test_gap_fit_and_maps(opened):
    guides = [t for t in opened.traces("gap") if t["kind"] == "guide"]
    assert len(guides) == 2
    assert guides[0]["y"][0] == pytest.approx(10 * guides[0]["y"][9])
    assert [t["name"] for t in opened.traces("fit-0")] == ["FedAvg", "FIPA low rank", "FIPA adaptive", "target"]
    assert maps(opened, "layout.title.text") == ["target", "FIPA adaptive", "error of FIPA adaptive"]
    assert "peak memory MiB" not in opened.texts("thead th")  # it was not measured


@pytest.fixture(scope="module")
def equation(tmp_path_factory):
    return page(tmp_path_factory.mktemp("equation"), example.pde_results("pde1d"), example.pde_views())


@pytest.fixture
def pde(browser, equation):
    """Loaded once, too, for tests that stand side by side."""
    if not browser.shows(equation):
        browser.open(equation)
        browser.unfold()
    return browser


def test_pointwise_errors_share_the_colours_and_the_legend(pde):
    assert "Pointwise error: solution after the last round" in pde.texts("h3")
    assert pde.axis("error-0", "yaxis") == ("pointwise error", "log")
    colours = "return document.querySelector(`[data-chart='${arguments[0]}']`).data.map(t => [t.name, t.line.color])"
    *arms, target = pde.run(colours, "fit-0")
    assert pde.run(colours, "error-0") == arms
    assert target[0] == "exact solution"
    errors = {t["name"]: t["y"] for t in pde.traces("error-0")}
    assert max(errors["FedAvg"]) == pytest.approx(2000 * max(errors["FIPA"]), rel=1e-3)
    regions = "return document.querySelector(\"[data-chart='error-0']\").layout.annotations.map(a => a.text)"
    assert pde.run(regions) == ["client 0", "client 1", "client 2"]
    pde.click(".legend button:nth-child(1)")
    assert "FedAvg" not in {t["name"] for t in pde.traces("error-0")}
    pde.click(".legend button:nth-child(1)")


def test_maps_of_the_chosen_arm(pde):
    menu = "[data-block=maps-0] [data-arm]"
    assert pde.texts(f"{menu} option") == ["FedAvg", "FIPA low rank", "FIPA", "centralised"]
    assert maps(pde, "layout.title.text") == ["exact solution", "FIPA", "error of FIPA"]  # the best one first
    before, scales = maps(pde, "data[0].z"), maps(pde, "data[0].zmax")
    pde.choose(menu, "FedAvg")
    assert maps(pde, "layout.title.text") == ["exact solution", "FedAvg", "error of FedAvg"]
    after = maps(pde, "data[0].z")
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert max(map(max, after[2])) == pytest.approx(max(map(max, before[2])) + math.log10(0.2 / 1e-4), abs=1e-2)
    assert maps(pde, "data[0].zmax") == scales  # so that arms can be compared
    assert maps(pde, "layout.xaxis.title.text") == ["t"] * 3
    assert maps(pde, "layout.yaxis.title.text") == ["y"] * 3
    assert maps(pde, "layout.shapes.length") == [3] * 3
    assert maps(pde, "layout.annotations.map(a => a.text)") == [["client 0", "client 1", "client 2"], [], []]


def test_peak_memory_is_a_column_if_it_was_measured(pde):
    column = pde.texts(".final thead th").index("peak memory MiB") + 1
    assert pde.texts(f".final tbody td:nth-child({column})") == ["201", "241", "281", "321"]  # of the second seed
    assert any("Peak memory: resident" in note for note in pde.texts(".note"))


def test_views_without_a_target_show_the_solutions(browser, tmp_path):
    views = {name: view | {"target": None} for name, view in example.pde_views().items()}
    views["curves"]["regions"] = [[0.5, 1], [0, 0.5]]
    views["maps"]["boxes"] = [None, [0, 1, -1, 1]]
    browser.open(page(tmp_path, example.pde_results("pde2d"), views))
    browser.unfold()
    assert browser.messages() == []
    assert [t["name"] for t in browser.traces("fit-0")] == ["FedAvg", "FIPA low rank", "FIPA", "centralised"]
    names = "return document.querySelector(\"[data-chart='fit-0']\").layout.annotations.map(a => [a.text, a.x])"
    assert browser.run(names) == [["client 0", 0.75], ["client 1", 0.25]]
    assert maps(browser, "layout.title.text") == ["FIPA"]
    assert maps(browser, "layout.annotations[0].text") == ["client 1"]
    assert not browser.texts("[data-chart=error-0]")


def test_maps_without_arms_are_the_target(browser, tmp_path):
    views = example.pde_views()
    views["maps"]["arms"] = {}
    browser.open(page(tmp_path, example.pde_results("pde2d"), views))
    browser.unfold()
    assert maps(browser, "layout.title.text") == ["exact solution"]


def test_clicking_a_head_sorts_the_table(opened):
    def arms():
        return opened.texts(".final tbody th")

    heads = opened.texts(".final thead th")
    column = heads.index("final test MSE, median [range]") + 1
    opened.click(f".final thead th:nth-child({column}) button")
    ascending = ["centralised GN", "FIPA adaptive", "FIPA low rank", "FedAvg", "FIPA as published"]
    assert arms() == ascending
    opened.click(f".final thead th:nth-child({column}) button")
    assert arms() == ascending[::-1]
    assert opened.run("return document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"
    opened.click(".final thead th:last-child button")  # the control has no value there: last
    assert arms()[-1] == "FedAvg"


def test_nothing_can_be_uploaded(opened):
    assert opened.run("return document.querySelectorAll('.modebar-btn').length") > 0
    titles = opened.run("return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert not [title for title in titles if re.search("share|cloud|upload", title, re.IGNORECASE)]


def test_the_page_fits_a_phone(browser, full):
    with browser.width(400):
        browser.open(full)
        assert browser.run("return innerWidth") == 400
        assert browser.run("return document.documentElement.scrollWidth") <= 400
        scrolls = "const box = document.querySelector('.main').parentElement; return box.scrollWidth > box.clientWidth"
        assert not browser.run(scrolls)  # rows are cards there


def many(tmp_path):
    """Fourteen arms, of which the last is the control and one before it the best."""
    arms = {f"arm {k}": {"0": example.record([40.0 + k, 50.0 + k])} for k in range(13)}
    arms["FedAvg"] = {"0": example.record([40.0, 41.0])}
    return page(tmp_path, example.results(arms, metric=dict(example.ACCURACY)))


def test_of_many_arms_the_control_and_the_best_are_in_colour(browser, tmp_path):
    browser.open(many(tmp_path))
    best = ["arm 8", "arm 9", "arm 10", "arm 11", "arm 12", "FedAvg"]
    assert browser.texts(".legend [aria-pressed=true]") == best
    assert browser.texts(".legend button")[:6] == best  # those in grey follow
    assert len(browser.texts(".legend [aria-pressed=false]")) == 8
    assert list(medians(browser)) == best  # drawn above the others
    assert [t["kind"] for t in browser.traces("metric")][:8] == ["muted"] * 8
    looks = browser.run(
        "return document.querySelector('[data-chart=metric]').data.filter(t => t.meta === 'median')"
        ".map(t => `${t.line.color} ${t.line.dash}`)"
    )
    assert len(set(looks)) == 6
    assert all(look.endswith("solid") for look in looks)
    browser.click(".legend button:nth-child(7)")
    assert list(medians(browser)) == ["arm 0", *best]
    browser.click("[data-colour=none]")
    assert not medians(browser)
    browser.click("[data-colour=all]")
    assert len(medians(browser)) == 14
    browser.click("[data-colour=best]")
    assert list(medians(browser)) == best


def test_light_and_dark_by_a_switch_and_white_on_paper(browser, tmp_path):
    paper = "return document.querySelector('[data-chart=metric]')._fullLayout.paper_bgcolor"
    browser.open(many(tmp_path))
    assert browser.texts("[data-theme-choice][aria-pressed=true]") == ["auto"]
    for theme, colour in (("dark", "#15181c"), ("light", "#ffffff"), ("dark", "#15181c")):
        browser.click(f"[data-theme-choice={theme}]")
        assert browser.run(paper) == colour
        assert browser.texts("[data-theme-choice][aria-pressed=true]") == [theme]
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(paper) == "#ffffff"
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(paper) == "#15181c"
    browser.open(tmp_path / "page.html")
    assert browser.run(paper) == "#15181c"  # kept
    browser.click("[data-theme-choice=auto]")
    assert browser.run(paper) == "#ffffff"


def test_all_can_be_reached_by_keyboard(browser, tmp_path):
    from selenium.webdriver import ActionChains, Keys

    def press(*keys):
        ActionChains(browser.driver).send_keys(*keys).perform()

    def focused():
        return browser.run("return document.activeElement.textContent.trim()")

    browser.open(many(tmp_path))
    seen = []
    for _ in range(60):
        press(Keys.TAB)
        seen.append(focused())
        if focused() == "How this was made":
            break
    order = ["Skip to the content", "auto", "dark", "uplink", "rounds", "linear", "arm 12", "FedAvg", "arm 0", "best"]
    places = [seen.index(text) for text in [*order, "In words", "All numbers", "How this was made"]]
    assert places == sorted(places)
    press(Keys.ENTER)
    assert browser.run("return document.querySelector('.provenance').open")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.run("document.querySelector('.legend button').focus()")
    press(Keys.SPACE)
    assert focused() == "arm 8"  # the legend keeps the focus
    assert "arm 8" not in medians(browser)


def test_folded_charts_are_drawn_when_they_are_unfolded(browser, full):
    browser.open(full)
    drawn = "return [...document.querySelectorAll('.chart, .maps > div')].filter(b => b.data).map(b => b.dataset.chart)"
    assert browser.run(drawn) == ["metric"]
    browser.unfold()
    assert len(browser.run(drawn)) > 6
    browser.click("[data-block=series] summary")
    browser.click(".legend button:nth-child(2)")
    browser.click("[data-block=series] summary")
    wait = "return !document.querySelector('[data-chart=series]').data.some(t => t.name === 'FIPA low rank')"
    for _ in range(100):  # the event that unfolds comes later
        if browser.run(wait):
            break
    assert browser.run(wait)
    browser.click(".legend button:nth-child(2)")


def test_names_from_the_data_are_text(browser, tmp_path):
    content = example.full(2, 6)
    content["arms"][HOSTILE] = content["arms"].pop("FIPA adaptive")
    views = example.views()
    views["curves"]["error"] = True
    for view in views.values():
        view["target_label"] = view["x_label"] = HOSTILE
        view["arms"][HOSTILE] = view["arms"].pop("FIPA adaptive")
    for key in ("title", "description", "command", "config_toml", "experiment"):
        content[key] = f"{HOSTILE} & </pre> <!-- {key}"
    content["metric"]["name"] = HOSTILE
    content["arms"]["FedAvg"]["0"]["events"] = [{"round": 1, "client": None, "text": HOSTILE}]
    written = page(tmp_path, content, views)
    browser.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "window.alerts = []; window.alert = (m) => alerts.push(m)"}
    )
    browser.open(written)
    browser.unfold()
    assert browser.run("return window.alerts") == []
    assert browser.texts("h1") == [f"{HOSTILE} & </pre> <!-- title"]
    assert HOSTILE in browser.texts("tbody th")
    assert HOSTILE in browser.texts(".legend button")
    assert HOSTILE in browser.texts(".ytitle")  # as drawn by plotly
    assert HOSTILE in browser.texts("[data-block=schedule] option")
    assert browser.texts(".maps .gtitle") == [HOSTILE, HOSTILE, f"error of {HOSTILE}"]
    assert HOSTILE in browser.texts(".maps .xtitle")
    assert browser.texts("pre") == [f"{HOSTILE} & </pre> <!-- config_toml"]
    assert len(browser.texts("script")) == 3


def test_runs_with_the_same_metric_share_the_charts(browser, tmp_path):
    first = example.write(tmp_path / "first", example.full(2, 6))
    second = example.write(tmp_path / "second", example.full(1, 9) | {"experiment": "fit-sin4"}, example.views())
    browser.open(write_page([first, second], tmp_path / "two.html"))
    browser.unfold()
    assert browser.texts("h1") == ["2 runs side by side"]
    assert len(browser.texts("[data-section]")) == 1
    assert {"fit-sin2: FedAvg", "fit-sin4: FedAvg"} <= medians(browser).keys()
    assert len(browser.texts("p.verdict")) == 2
    assert len(browser.texts("p.summary")) == 2
    assert len(browser.texts(".final tbody tr")) == 10
    assert {t["kind"] for t in browser.traces("metric") if t["name"] == "fit-sin4: FIPA as published"} == {"muted"}
    assert "fit-sin4: FIPA adaptive" in {t["name"] for t in browser.traces("fit-1")}


def test_runs_of_one_experiment_are_told_apart_by_their_directories(browser, tmp_path):
    runs = [example.write(tmp_path / name, example.full(1, 4)) for name in ("old", "new")]
    browser.open(write_page(runs, tmp_path / "two.html"))
    assert {"old: FedAvg", "new: FedAvg"} <= medians(browser).keys()


def test_other_metrics_get_a_section_of_their_own(browser, tmp_path):
    accuracy = example.full(2, 4) | {
        "experiment": "images",
        "metric": {"name": "accuracy", "goal": "max", "scale": "linear"},
    }
    runs = [example.write(tmp_path / "a", example.full(2, 4)), example.write(tmp_path / "b", accuracy)]
    browser.open(write_page(runs, tmp_path / "two.html"))
    assert len(browser.texts("[data-section]")) == 2
    assert {"Test MSE", "Accuracy"} <= set(browser.texts("h2"))
    assert browser.run("return document.querySelectorAll('[data-chart=metric]')[1].layout.yaxis.type") == "linear"


def test_nulls_one_seed_and_nothing_optional(browser, tmp_path):
    arms = {"A": {"0": {"metric": [0.3, None, 0.1]}}, "B": {"0": {"metric": [None], "status": "diverged"}}}
    browser.open(page(tmp_path, example.results(arms, control=None, machine={})))
    assert browser.texts("h2") == ["Test MSE", "The arms, best first", "Details", "How this was made"]
    assert browser.texts("summary h3") == ["In words", "All numbers", "What it takes"]
    assert medians(browser)["A"]["y"] == [None, 0.3, None, 0.1]
    assert browser.texts("[data-axis]") == ["rounds"]
    assert "diverged" in browser.texts(".main tbody tr")[1]
    assert "diverged" in browser.texts(".final tbody tr")[1]
    assert "Diverged: B in 1 of 1 seed." in browser.texts("p.summary")[0]


def test_a_run_in_two_stages(browser, tmp_path):
    browser.open(page(tmp_path, example.images(), example.shares()))
    browser.unfold()
    assert browser.messages() == []
    assert browser.texts("h2") == ["Test accuracy, %", "The arms, best first", "Details", "How this was made"]
    folded = ["In words", "All numbers", "What it takes", "Warm-up", "Round by round", "Classes of the clients"]
    assert browser.texts("summary h3") == folded
    browser.click("[data-axis=rounds]")
    drawn = medians(browser)["FIPA"]
    assert (drawn["x"][0], drawn["x"][-1], drawn["y"][0]) == (1000, 1015, 41.76)
    assert [t["kind"] for t in browser.traces("warmup-0")] == ["seed"] * 3 + ["mean"]
    assert browser.traces("warmup-0")[3]["x"] == list(range(0, 1001, 50))
    assert browser.axis("warmup-0", "yaxis") == ("test accuracy, %", "linear")
    for name, title, first in (("seconds", "seconds", 0), ("uplink", "uplink of all clients, MiB, log scale", 1)):
        browser.click(f"[data-axis={name}]")
        assert browser.axis("metric", "xaxis")[0] == f"{title}<br>since the start of refinement"
        assert medians(browser)["FIPA"]["x"][0] == first
    assert browser.texts("[data-axis]") == ["uplink", "uplink + downlink", "rounds", "seconds"]
    cells, totals = browser.traces("shares-0")
    assert (cells["kind"], totals["kind"]) == ("shares", "totals")
    assert totals["y"] == [sum(row) for row in example.shares()["shares"]["counts"]]
    numbers = browser.run("return document.querySelector(\"[data-chart='shares-0']\").data[0].text")
    assert numbers[0][0] == "125"
    heads = browser.texts(".final thead th")
    assert heads[:7] == ["arm", "rounds", "seeds", "max", "mean", "last 5", "last"]
    browser.click(".final thead th:nth-child(5) button")  # worst first: one that diverged is the worst
    assert browser.texts(".final tbody th") == ["FedFisher", "FedAvg", "FedProx", "FIPA, 200 eigenpairs", "FIPA"]
    with browser.width(400):
        browser.open(tmp_path / "page.html")
        assert browser.run("return document.documentElement.scrollWidth") <= 400


def test_an_ablation_of_100_clients_with_gaps(browser, tmp_path):
    content = example.from_different_rounds()
    for record in content["arms"]["FIPA (from 300)"].values():
        record["metric"] = [v if k % 5 == 4 else None for k, v in enumerate(record["metric"])]
    browser.open(page(tmp_path, content, example.shares(100, 200)))
    browser.unfold()
    browser.click("[data-axis=own]")
    assert browser.axis("metric", "xaxis")[0] == "rounds<br>since the start of refinement"
    arm = {t["kind"]: t for t in browser.traces("metric") if t["name"] == "FIPA (from 300)"}
    assert arm["band"]["x"] == [0, 5, 10, 15, 15, 10, 5, 0, None]  # one outline over the gaps
    assert arm["median"]["y"][1:5] == [None] * 4
    shapes = "return document.querySelector(\"[data-chart='warmup-0']\").layout.shapes.map(s => s.x0)"
    assert browser.run(shapes) == [100, 300]
    assert (
        "Arms start from the model after rounds 100, 300 and 1000." in browser.texts("[data-block=warmup-0] .note")[0]
    )
    assert len(browser.traces("shares-0")[1]["y"]) == 100


def test_many_events_are_counted(tmp_path):
    events = [{"round": r, "client": r % 9, "text": f"local steps {r} clamped to 200"} for r in range(1000)]
    content = example.results({"A": {"0": example.record([0.1], events=events)}})
    text = page(tmp_path, content).read_text()
    assert "A: 1000 events" in text
    assert "<li>1000 times: local steps # clamped to #</li>" in text


def test_few_events_are_listed(tmp_path):
    events = [{"round": 3, "client": 1, "text": "late"}, {"round": 4, "client": None, "text": "rejected"}]
    text = page(tmp_path, example.results({"A": {"0": example.record([0.1], events=events)}})).read_text()
    assert "<li>seed 0, round 3, client 1: late</li><li>seed 0, round 4: rejected</li>" in text


def test_without_toml_the_configuration_is_json(tmp_path):
    content = example.results({"A": {"0": example.record([0.1])}}) | {"config_toml": ""}
    assert "&#34;rounds&#34;: 30" in page(tmp_path, content).read_text()


def test_the_data_are_strict_json_and_plotly_is_embedded_once(full):
    text = full.read_text(encoding="utf-8")
    assert text.count("Copyright 2012") == 1
    (data,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    json.loads(data, parse_constant=pytest.fail)


def test_what_cannot_be_reported(tmp_path):
    with pytest.raises(FipaError, match="at least one run"):
        write_page([], tmp_path / "page.html")
    run = example.write(tmp_path / "run", example.full(1, 2))
    with pytest.raises(FipaError, match="given twice"):
        write_page([run, run], tmp_path / "page.html")
