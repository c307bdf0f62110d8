"""`fipa serve` and `fipa run --serve` as commands."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from urllib.parse import quote_plus

import pytest
from tiny import ONE_ARM, fipa, process, write

from fipa.cli import execution
from fipa.serve import command
from serve import example


def fetch(address):
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


def answers(address):
    try:
        return bool(fetch(address))
    except OSError:
        return False


def test_wrong_folders_and_ports(tmp_path):
    done = fipa("serve", tmp_path / "absent")
    assert (done.code, "is no folder" in done.err) == (2, True)
    with command.bound("127.0.0.1", 0) as taken:
        done = fipa("serve", tmp_path, "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "choose another --port" in " ".join(done.err.split())


def test_without_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = fipa("serve", tmp_path)
    assert done.code == 2
    assert "fipa serve needs uvicorn: pip install 'fipa[serve]'" in " ".join(done.err.split())
    monkeypatch.setattr(command, "find_spec", lambda module: None)
    with command.beside(tmp_path, False):  # the run goes on without a page
        pass
    assert "no page: --serve needs starlette" in capsys.readouterr().err


def test_an_empty_token_is_none(tmp_path):
    done = fipa("serve", tmp_path, "--port", 0, "--token", "")
    assert (done.code, "--token is empty" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("host", "given", "asked"),
    [("127.0.0.1", None, False), ("127.0.0.1", "a&b c", True), ("0.0.0.0", None, True)],
)
def test_other_machines_need_a_token(tmp_path, monkeypatch, host, given, asked):
    import uvicorn

    said = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.delenv("FIPA_TOKEN", raising=False)
    command.serve(tmp_path, host, 0, given, False, said.append)
    found = re.fullmatch(rf"http://{host}:\d+/(\?token=(\S+))?", said[0])
    assert bool(found[1]) == asked
    assert given is None or found[2] == quote_plus(given)
    assert not asked or given or len(found[2]) >= 20


def test_a_browser_is_opened_where_there_is_a_screen(monkeypatch):
    opened = []
    monkeypatch.setattr(command.webbrowser, "open", lambda address: opened.append(address) or True)
    monkeypatch.setattr(command.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not command.open_browser("http://a")
    monkeypatch.setenv("DISPLAY", ":0")
    assert command.open_browser("http://b")
    assert opened == ["http://b"]


@pytest.mark.long
def test_a_page_beside_a_run(tmp_path, monkeypatch):
    """It is there while the run goes on, and ends with it."""
    pages = []
    whole = execution.execute

    def execute(job, *options):
        pages.append(fetch(re.findall(r"http://\S+", sys.stderr.getvalue())[0]))
        whole(job, *options)

    monkeypatch.setattr(execution, "execute", execute)
    done = fipa("run", write(tmp_path, ONE_ARM), "--out", tmp_path / "run", "--serve", "--quiet")
    assert done.code == 0, done.err
    assert "0 of 2 rounds" in pages[0]
    assert str(tmp_path / "run") in pages[0]
    assert not answers(re.findall(r"http://\S+", done.err)[0])


@pytest.mark.long
def test_ctrl_c_ends_the_server(tmp_path):
    example.finished(tmp_path / "a")
    with process("serve", tmp_path, "--port", 0) as running:
        address = ""
        while not address:
            address = "".join(re.findall(r"http://\S+", running.stdout.readline()))
        assert "16 of 16 rounds" in fetch(address)
        stream = urllib.request.urlopen(f"{address}events", timeout=60)  # a page that listens does not keep it
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        stream.close()
    assert "Traceback" not in out + err
    assert running.returncode in (0, 130)


@pytest.mark.long
def test_ctrl_c_beside_a_run_is_silent(tmp_path):
    """A terminal sends it to the server as well."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "fipa.serve", tmp_path], text=True, **pipes) as running:
        assert answers(json.loads(running.stdout.readline())["address"])
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0  # with its standard input still open, whose end would end it at once
        assert running.stderr.read() == ""
