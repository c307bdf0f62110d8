"""What the server answers, and to whom."""

import json
import os

import pytest
from report import example as results

from fipa.config.load import tomllib
from serve import example

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path):
    example.finished(tmp_path / "a b")
    example.finished(tmp_path / HOSTILE, title=HOSTILE)
    return tmp_path


def test_the_list(serving, runs):
    page = serving(runs).get("/")
    assert page.status == 200
    assert 'href="/watch?run=a+b"' in page.text
    assert "16 of 16 rounds" in page.text
    assert HOSTILE not in page.text
    assert "&lt;img src=x onerror=alert(1)&gt;" in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-store"


def test_pages_of_runs(serving, runs):
    server = serving(runs)
    one = server.get("/watch?run=a+b")
    assert one.status == 200
    assert "fipa run e --quiet" in one.text
    assert 'href="/report?run=a+b"' in one.text
    two = server.get("/watch?run=a+b&run=%3Cimg+src%3Dx+onerror%3Dalert%281%29%3E")
    assert "2 runs side by side" in two.text
    assert HOSTILE not in two.text
    (data,) = [part.partition("</script>")[0] for part in two.text.split('id="charts">')[1:]]
    arms = [arm["name"] for arm in json.loads(data)["sections"][0]["data"]["arms"]]
    assert arms == ["a b: FedAvg", "a b: FIPA", f"{HOSTILE}: FedAvg", f"{HOSTILE}: FIPA"]
    absent = server.get("/watch?run=../x")
    assert (absent.status, "There is no run ../x" in absent.text) == (404, True)
    assert server.get("/watch").headers["location"] == "/"


def test_settings_as_toml(serving, runs):
    server = serving(runs)
    config = server.get("/config?run=a+b")
    assert config.headers["content-type"].startswith("text/plain")
    assert tomllib.loads(config.text) == example.config({"FedAvg": 4, "FIPA": 4}, [0, 1])
    assert server.get("/config?run=absent").status == 404


def test_a_report_is_made_and_not_kept(serving, runs):
    server = serving(runs)
    before = sorted(path for path in runs.rglob("*"))
    page = server.get("/report?run=a+b")
    assert page.status == 200
    assert 'class="verdict"' in page.text
    assert page.headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert "2 runs side by side" in server.get("/report?run=a+b&run=%3Cimg+src%3Dx+onerror%3Dalert%281%29%3E").text
    assert sorted(path for path in runs.rglob("*")) == before
    (runs / "a b" / "report.html").write_text("as it was written")
    assert server.get("/report?run=a+b").text == "as it was written"
    os.utime(runs / "a b" / "report.html", (1, 1))
    assert 'class="verdict"' in server.get("/report?run=a+b").text  # the run is newer
    example.start(runs / "begun", example.config({"FedAvg": 4}, [0]))
    none = serving(runs).get("/report?run=begun")
    assert (none.status, "no arm has finished a round" in none.text) == (409, True)
    assert server.get("/report?run=absent").status == 404


def test_settings_that_are_null_are_left_out(serving, tmp_path):
    content = example.config({"FedAvg": 4}, [0])
    example.start(tmp_path / "run", content | {"control": None, "data": {"noise": None, "sizes": [1, None]}})
    config = serving(tmp_path).get("/config?run=run")
    del content["control"]
    assert tomllib.loads(config.text) == content | {"data": {"sizes": [1]}}


def test_odd_runs_leave_the_pages_standing(serving, runs):
    (runs / "half").mkdir()
    (runs / "half" / "run.json").write_text("{")
    example.start(runs / "odd", example.config({"FedAvg": 4}, [0], title="\ud800"))
    example.write_rounds(runs / "odd", 0, "FedAvg", 0, 0, example.line(1, seconds=1e308) * 3)
    server = serving(runs)
    page = server.get("/")
    assert (page.status, 'href="/watch?run=a+b"' in page.text) == (200, True)
    assert server.get("/watch?run=odd&run=half").status == 200
    report = server.get("/report?run=half")
    assert (report.status, "run.json is damaged" in report.text) == (409, True)


def test_a_report_with_pictures(serving, tmp_path):
    results.write(tmp_path / "run", results.full(1, 3), results.views())
    assert "Gaussian mixture" in serving(tmp_path).get("/report?run=run").text


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/app.py",
        "/static/",
        "/etc/passwd",
        "//etc/passwd",
        "/arms",
    ],
)
def test_nothing_else_is_served(serving, runs, path):
    assert serving(runs).get(path).status == 404


def test_styles_and_scripts(serving, runs):
    server = serving(runs)
    for name in ("page.css", "serve.css", "theme.js", "figure.js", "live.js", "list.js", "watch.js", "plotly.js"):
        answer = server.get(f"/static/{name}")
        assert answer.status == 200
        kind = "text/css" if name.endswith("css") else "text/javascript"
        assert answer.headers["content-type"].startswith(kind)


def test_reading_only(serving, runs):
    server = serving(runs)
    assert [server.get("/", method).status for method in ("POST", "PUT", "DELETE")] == [405] * 3


def test_without_a_token_only_this_machine_is_answered(serving, runs):
    server = serving(runs)
    assert server.get("/", Host="localhost:80").status == 200
    assert server.get("/", Host="[::1]:80").status == 200
    assert server.get("/", Host="evil.example").status == 403  # whose name was made to point here


def test_with_a_token(serving, runs):
    server = serving(runs, token="s3cret")
    for path in ("/", "/watch?run=a+b", "/events", "/static/page.css", "/?token=wrong", "/report?run=a+b"):
        assert server.get(path).status == 401, path
    entered = server.get("/watch?token=s3cret&run=a+b")
    assert (entered.status, entered.headers["location"]) == (303, "/watch?run=a+b")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert server.get("/", Cookie=cookie.partition(";")[0]).status == 200
    assert server.get("/", Cookie="fipa-token=wrong").status == 401
    assert server.get("/", Authorization="Bearer s3cret", Host="example.org").status == 200


def test_events_over_the_wire(serving, runs):
    server = serving(runs)
    with server.listening("/events") as line:
        assert [line(), line()] == ["retry: 1000", ""]
        assert line() == "event: runs"
        content = json.loads(line().removeprefix("data: "))
        assert set(content["order"]) == {"a b", HOSTILE} == set(content["changed"])
        assert HOSTILE not in content["changed"][HOSTILE]
        assert line() == ""
        example.finished(runs / "another")
        assert line() == "event: runs"
        content = json.loads(line().removeprefix("data: "))
        assert list(content["changed"]) == ["another"]
        assert len(content["order"]) == 3
