"""`fipa data list` and `fipa data get`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny import fipa

from fipa.data.idx import FILES
from fipa.data.registry import SETS


@pytest.fixture
def served(server, monkeypatch):
    remotes = tuple(server.remote(f"{file}.gz", file.encode()) for file in FILES)
    monkeypatch.setitem(SETS, "mnist", replace(SETS["mnist"], remote=remotes))
    return server


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines()}


def test_list(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(b"")
    done = fipa("data", "list", "--data", tmp_path)
    assert (done.code, done.err) == (0, "")
    found = rows(done.out)
    assert " ".join(found["cifar100"]) == "cifar100 100 50,000 + 10,000 3 x 32 x 32 yes"
    assert found["cifar10"][-1] == "no"
    assert found["digits"][-3:] == ["comes", "with", "fipa"]
    assert str(tmp_path) in done.out
    places = json.loads(fipa("data", "list", "--data", tmp_path, "--json").out)
    assert list(places) == list(SETS)
    assert places["cifar100"] == {"folder": str(folder)}
    assert places["cifar10"] == {"folder": None}


def test_list_looks_in_fipa_data(tmp_path, monkeypatch):
    monkeypatch.setenv("FIPA_DATA", str(tmp_path / "sets"))
    assert str(tmp_path / "sets") in fipa("data", "list").out


def test_get(served, tmp_path):
    done = fipa("data", "get", "mnist", "--data", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"mnist is in {tmp_path / 'mnist'}\n"
    assert rows(fipa("data", "list", "--data", tmp_path).out)["mnist"][-1] == "yes"
    asked = len(served.asked)
    assert fipa("data", "get", "mnist", "--data", tmp_path, "-q").out == ""
    assert len(served.asked) == asked


def test_get_goes_on_with_a_part(served, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{FILES[0]}.gz.part").write_bytes(FILES[0].encode()[:5])
    assert fipa("data", "get", "mnist", "--data", tmp_path).code == 0
    assert served.asked == ["bytes=5-", None, None, None]
    assert (tmp_path / "mnist" / f"{FILES[0]}.gz").read_text() == FILES[0]


def test_bar_on_a_terminal(served, tmp_path, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("fipa.cli.data.out", Console(force_terminal=True, width=120))
    text = fipa("data", "get", "mnist", "--data", tmp_path).out
    assert "bytes" in text
    assert "mnist" in text


def test_errors_are_one_line(served, tmp_path):
    done = fipa("data", "get", "nothing", "--data", tmp_path)
    assert done.code == 2
    assert done.err.startswith("error there is no image set 'nothing': choose one of digits")
    served.files.clear()
    done = fipa("data", "get", "mnist", "--data", tmp_path)
    assert done.code == 2
    assert "404" in done.err
    assert done.err.count("\n") == 1


def test_stopped(served, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fipa.data.registry.get", stop)
    done = fipa("data", "get", "mnist", "--data", tmp_path)
    assert (done.code, done.err) == (130, "stopped; the same command resumes it\n")
