"""Which folders are runs, and what cannot be reached."""

import json
import os
import shutil

import pytest
from report import example as results

from fipa.errors import FipaError
from fipa.serve import library
from fipa.serve.files import inside
from fipa.serve.library import Library
from fipa.serve.states import State
from serve import example


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(library, "AFRESH", 0.0)
    monkeypatch.setattr(library, "SEARCH", 0.0)


def kinds(found):
    return {source.id: source.kind for source in found}


def test_runs_are_found_wherever_they_lie(tmp_path):
    example.finished(tmp_path / "a")
    example.finished(tmp_path / "deep" / "er" / "b c")
    results.write(tmp_path / "alone", results.full(1, 2))
    (tmp_path / "empty" / "folder").mkdir(parents=True)
    example.finished(tmp_path / ".hidden")
    found = Library(tmp_path)
    assert kinds(found.refresh()) == {"a": "fipa", "alone": "results", "deep/er/b c": "fipa"}
    assert kinds(Library(tmp_path / "a").refresh()) == {".": "fipa"}  # one run by itself


def test_runs_come_and_go(tmp_path):
    found = Library(tmp_path)
    assert found.refresh() == []
    example.finished(tmp_path / "a")
    assert [source.state for source in found.refresh()] == [State.FINISHED]
    version = found.pick(["a"])[0].version
    shutil.rmtree(tmp_path / "a")
    assert found.refresh() == []
    assert [source.state for source in found.pick(["a"])] == [State.DELETED]
    example.start(tmp_path / "a", example.config({"FedAvg": 4}, [0]))
    (again,) = found.refresh()
    assert again.state is State.STOPPED
    assert again.version > version


def test_links_are_not_followed(tmp_path):
    example.finished(tmp_path / "outside")
    served = tmp_path / "served"
    served.mkdir()
    os.symlink(tmp_path / "outside", served / "link")
    (served / "run").mkdir()
    os.symlink(tmp_path / "outside" / "run.json", served / "run" / "run.json")
    assert Library(served).refresh() == []
    os.symlink("/etc/hostname", served / "run" / "report.html")
    assert not inside(served, served / "run" / "report.html")
    assert not inside(served, served / "run" / "absent")


def test_links_in_a_run_are_not_followed(tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "served" / "run"
    history = example.write_rounds(outside, 0, "FedAvg", 0, 4)
    results.write(outside, results.full(1, 2))
    (outside / "error.txt").write_text("secret")
    example.start(run, example.config({"FedAvg": 4}, [0]))
    place = example.write_rounds(run, 0, "FedAvg", 0, 0)
    place.unlink()
    os.symlink(history, place)
    for name in ("error.txt", "results.json"):
        os.symlink(outside / name, run / name)
    (found,) = Library(tmp_path / "served").refresh()
    assert (found.state, found.tracks[0].done) == (State.STOPPED, 0)
    assert found.note == "00-fedavg/seed-0: history.jsonl is a link to elsewhere"
    with pytest.raises(FipaError, match="nothing to report"):
        found.whole()


def test_results_that_become_a_link_are_not_read(tmp_path):
    results.write(tmp_path / "outside", results.full(1, 2))
    results.write(tmp_path / "served" / "run", results.full(1, 3))
    served = Library(tmp_path / "served")
    assert served.refresh()[0].state is State.DIVERGED
    (tmp_path / "served" / "run" / "results.json").unlink()
    os.symlink(tmp_path / "outside" / "results.json", tmp_path / "served" / "run" / "results.json")
    (found,) = served.refresh()
    assert (found.state, found.note) == (State.BROKEN, "results.json is a link to elsewhere")
    with pytest.raises(FipaError, match="link"):
        found.whole()


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", "a/../a", "a/", "./a", "%2e%2e", "a\0", ""])
def test_names_are_looked_up_and_never_joined(tmp_path, name):
    example.finished(tmp_path / "outside")
    example.finished(tmp_path / "served" / "a")
    assert Library(tmp_path / "served").pick([name]) == []


def test_one_broken_run_breaks_nothing(tmp_path):
    example.finished(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "results.json").write_text(json.dumps({"format": "fipa-results-1", "arms": 3}))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "run.pt").write_bytes(b"no checkpoint")
    states = {source.id: source.state for source in Library(tmp_path).refresh()}
    assert states == {"a": State.FINISHED, "b": State.BROKEN, "c": State.BROKEN, "d": State.BROKEN}


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FipaError, match="is no folder"):
        Library(tmp_path / "absent")
