"""A run that goes on, watched in a real browser: it is killed, resumed and deleted."""

import re
import shutil
import signal
from html import escape

import pytest
from tiny import OWN_PROBLEM, process, wait_for_rounds, wait_until, write

from serve import example

SLOW = OWN_PROBLEM.replace("lambda model: misfit", "lambda model: __import__('time').sleep(0.1) or misfit")
HOSTILE = "<img src=x onerror=alert(1)>"
ARM = ("--arm", "FedAvg", "--rounds", 3000, "--quiet", "--no-report")


@pytest.fixture(autouse=True)
def _quiet(request):
    """No test leaves an error on the console, but that a connection was lost."""
    yield
    if "browser" in request.fixturenames:
        browser = request.getfixturevalue("browser")
        messages = browser.messages()
        browser.open("about:blank")  # what is left open would go on asking a server that is gone
        assert [text for text in messages if "/events" not in text] == []


def state(browser, selector):
    return browser.run("return document.querySelector(arguments[0])?.dataset.state ?? null", selector)


def rounds(browser, selector):
    text = browser.run("return document.querySelector(arguments[0])?.textContent ?? ''", f"{selector} .rounds")
    found = re.match(r"(\d+) of 3000 rounds", text)
    return int(found[1]) if found else -1


def points(browser):
    return browser.run("return document.querySelector('[data-chart=metric]')?.data?.[0]?.y.length ?? 0")


def test_a_run_from_its_start_to_its_deletion(browser, serving, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    file, run = write(tmp_path, SLOW, "slow.py"), runs / "live"
    row, panel = ".run[data-run=live]", ".panel"
    server = serving(runs)
    browser.open(f"{server.address}/")
    assert browser.run("return !document.getElementById('none').hidden")
    with process("run", file, *ARM, "--out", run) as running:
        wait_until(lambda: state(browser, row) == "running")  # the list hears of it, without being loaded again
        wait_for_rounds(running, run, 1)
        seen = rounds(browser, row)
        wait_until(lambda: rounds(browser, row) > seen)
        browser.driver.get(browser.run("return document.querySelector(arguments[0]).href", f"{row} a"))
        wait_until(lambda: points(browser) > 1)
        browser.run("window.same = true; document.querySelector('.legend button').focus()")
        seen, drawn = rounds(browser, panel), points(browser)
        wait_until(lambda: rounds(browser, panel) > seen and points(browser) > drawn)
        assert "time left" in browser.texts(".panel dt")
        assert browser.run("return document.activeElement.dataset.name") == "FedAvg"  # the focus stays
        running.send_signal(signal.SIGKILL)
        wait_until(lambda: state(browser, panel) == "stopped")
        assert "fipa resume" in browser.texts(".panel .reason")[0]
        seen = rounds(browser, panel)
    with process("resume", run, "--quiet", "--no-report") as running:
        wait_until(lambda: state(browser, panel) == "running")
        wait_until(lambda: rounds(browser, panel) > seen)
        assert browser.run("return window.same")  # the page was never loaded again
        running.send_signal(signal.SIGKILL)
        running.wait()
    shutil.rmtree(run)
    wait_until(lambda: state(browser, panel) == "deleted")
    assert points(browser) > 1  # what was seen last stays
    browser.open(f"{server.address}/")
    assert browser.run("return document.querySelectorAll('.run').length") == 0


def test_choosing_filtering_and_comparing(browser, serving, tmp_path):
    example.finished(tmp_path / "alpha")
    example.finished(tmp_path / HOSTILE, title=HOSTILE)
    example.start(tmp_path / "beta", example.config({"FedAvg": 4}, [0]))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    browser.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "window.alerts = []; window.alert = (m) => alerts.push(m)"}
    )
    server = serving(tmp_path)
    browser.open(f"{server.address}/")
    shown = "return [...document.querySelectorAll('.run:not([hidden])')].map(r => r.dataset.run)"
    wait_until(lambda: len(browser.run(shown)) == 4)
    assert state(browser, ".run[data-run=broken]") == "broken"
    assert browser.run("return document.querySelector('button[type=submit]').disabled")
    browser.choose("#state", "finished")
    assert set(browser.run(shown)) == {"alpha", HOSTILE}
    browser.run("const f = document.getElementById('find'); f.value = 'alp'; f.dispatchEvent(new Event('input'))")
    assert browser.run(shown) == ["alpha"]
    assert browser.texts("#count") == ["1 of 4 runs"]
    browser.click(".run[data-run=alpha] input")
    browser.run("document.querySelector(`.run[data-run='${arguments[0]}'] input`).click()", HOSTILE)
    example.write_rounds(tmp_path / "alpha", 1, "FIPA", 1, 3)
    wait_until(lambda: "15 of 16 rounds" in browser.texts(".run[data-run=alpha]")[0])
    assert browser.run("return document.querySelectorAll('input:checked').length") == 2  # still chosen
    browser.click("button[type=submit]")
    wait_until(lambda: points(browser) > 1)
    names = {trace["name"] for trace in browser.traces("metric") if trace["kind"] == "median"}
    assert names == {f"{run}: {arm}" for run in ("alpha", escape(HOSTILE)) for arm in ("FedAvg", "FIPA")}
    assert browser.texts("h1") == ["2 runs side by side"]
    assert browser.run("return window.alerts") == []
    assert len(browser.texts(".panel")) == 2
    with browser.width(390):
        wait_until(lambda: browser.run("return document.documentElement.scrollWidth") <= 390)
