"""What a page is told, and what it is not told twice."""

import json
import shutil

import pytest

from fipa.serve import library, sources
from fipa.serve.library import Library
from fipa.serve.stream import Listener
from serve import example


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(library, "AFRESH", 0.0)
    monkeypatch.setattr(library, "SEARCH", 0.0)
    monkeypatch.setattr(sources, "REST", 0.0)


def events(listener):
    found = {}
    for text in listener.news():
        name, data, *_ = text.split("\n")
        found[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    return found


def test_the_list_hears_of_what_changes(tmp_path):
    example.start(tmp_path / "a", example.config({"FedAvg": 4}, [0]))
    listener = Listener(Library(tmp_path), [])
    assert events(listener)["runs"]["order"] == ["a"]
    assert events(listener) == {}
    example.write_rounds(tmp_path / "a", 0, "FedAvg", 0, 3)
    assert "3 of 4 rounds" in events(listener)["runs"]["changed"]["a"]
    example.finished(tmp_path / "b")
    assert list(events(listener)["runs"]["changed"]) == ["b"]
    shutil.rmtree(tmp_path / "a")
    assert events(listener)["runs"] == {"order": ["b"], "changed": {}}


def test_a_page_hears_of_its_runs_only(tmp_path):
    example.start(tmp_path / "a", example.config({"FedAvg": 4, "FIPA": 4}, [0]))
    example.finished(tmp_path / "b")
    listener = Listener(Library(tmp_path), ["a"])
    first = events(listener)
    assert "stopped" in first["panels"][0]
    assert "charts" not in first  # no round is over
    example.write_rounds(tmp_path / "a", 0, "FedAvg", 0, 2)
    second = events(listener)
    (chart,) = second["charts"]
    assert chart["data"]["arms"][0]["metric"]["median"] == [10, 51, 52]
    assert "2 of 4 rounds" in second["arms"][0]
    example.finished(tmp_path / "c")
    assert events(listener) == {}
    shutil.rmtree(tmp_path / "a")
    last = events(listener)
    assert "deleted" in last["panels"][0]
    assert last["charts"][0]["data"]["arms"][0]["metric"]["median"] == [10, 51, 52]  # what was seen last stays


def test_several_runs_and_metrics(tmp_path):
    example.finished(tmp_path / "a")
    example.finished(tmp_path / "b")
    example.start(tmp_path / "c", example.config({"FedAvg": 4}, [0]), {"name": "loss", "goal": "min", "scale": "log"})
    example.write_rounds(tmp_path / "c", 0, "FedAvg", 0, 2)
    found = events(Listener(Library(tmp_path), ["a", "b", "c"]))
    assert [len(chart["data"]["arms"]) for chart in found["charts"]] == [4, 1]
    assert len(found["panels"]) == 3
