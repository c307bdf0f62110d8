"""What a Flower server leaves: results.json, or its checkpoint alone."""

import os
import time

import pytest
import torch

from fipa.federation.checkpoint import save_state
from fipa.federation.coordinator import State as ServerState
from fipa.federation.record import RoundRecord
from fipa.federation.storage import write_json
from fipa.report.flower import CENTRAL, ENDLESS, flower_results
from fipa.serve import views
from fipa.serve.others import FlowerCheckpoint, PlainResults
from fipa.serve.states import QUIET, State


def rounds(count):
    return [RoundRecord(k, loss=1.0 / k, seconds=3.0, uplink_bytes=2**20) for k in range(1, count + 1)]


def checkpoint(path, count, last):
    records = [record.plain() for record in rounds(count)]
    metrics = {CENTRAL: {k: {"accuracy": 0.5 + 0.01 * k} for k in range(count + 1)}}
    state = ServerState(theta=torch.zeros(3), round_number=count)
    save_state(path, state, records=records, metrics=metrics, settings={"rule of stage 0": "FIPA"}, last=last)


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_checkpoint_is_a_run(tmp_path):
    checkpoint(tmp_path / "run.pt", 4, last=10)
    checkpoint(tmp_path / "run-3.pt", 3, last=10)
    run = FlowerCheckpoint("state", tmp_path)
    run.refresh()
    assert run.state is State.RUNNING  # it was written just now
    told = views.line(run)
    assert (told["done"], told["total"], told["left"]) == (4, 10, "18 s")
    assert told["metric"] == "accuracy 0.54"
    assert told["where"] == "run, seed 0, round 4 of 10"
    (chart,) = views.charts([run])
    assert chart["data"]["arms"][0]["metric"]["median"] == [0.5, 0.51, 0.52, 0.53, 0.54]
    age(tmp_path / "run.pt", 2 * QUIET)
    run.refresh()
    assert run.state is State.STOPPED
    assert run.note.startswith("nothing was written since")
    checkpoint(tmp_path / "run.pt", 10, last=10)
    run.refresh()
    assert run.state is State.FINISHED
    assert len(run.whole()["arms"]["run"]["0"]["metric"]) == 10


def test_a_server_whose_last_round_nobody_knows(tmp_path):
    checkpoint(tmp_path / "run.pt", 4, last=ENDLESS)
    run = FlowerCheckpoint("state", tmp_path)
    run.refresh()
    told = views.line(run)
    assert (told["done"], told["total"], told["left"]) == (4, 0, "")
    assert told["where"] == "run, seed 0, round 4"


def test_other_checkpoints_and_none_at_all(tmp_path):
    run = FlowerCheckpoint("state", tmp_path)
    run.refresh()
    assert (run.state, run.note) == (State.BROKEN, "there is no checkpoint any more")
    save_state(tmp_path / "run.pt", ServerState(theta=torch.zeros(3), round_number=1), status="running")
    run.refresh()
    assert (run.state, run.note) == (State.BROKEN, "run.pt is no checkpoint of a Flower server")


def test_a_foreign_checkpoint_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "model.pt").write_bytes(b"weights")
    reads = []
    whole = FlowerCheckpoint.read
    monkeypatch.setattr(FlowerCheckpoint, "read", lambda run: reads.append(run) or whole(run))
    run = FlowerCheckpoint("state", tmp_path)
    for _ in range(3):
        run.refresh()
    assert (run.state, run.version, len(reads)) == (State.BROKEN, 1, 1)
    checkpoint(tmp_path / "model.pt", 4, last=4)
    run.refresh()
    assert (run.state, len(reads)) == (State.FINISHED, 2)


def test_settings_that_are_no_object(tmp_path):
    content = flower_results(rounds(2), {}, "FIPA", 3, 5, {})
    write_json(tmp_path / "results.json", content | {"config": [1]})
    run = PlainResults("results", tmp_path)
    run.refresh()
    assert (run.state, run.note) == (State.BROKEN, "results.json: 'config' is not an object")


def test_results_that_grow(tmp_path):
    run = PlainResults("results", tmp_path)
    write_json(tmp_path / "results.json", flower_results(rounds(2), {}, "FIPA", 3, 5, {}))
    run.refresh()
    assert run.state is State.RUNNING
    assert views.line(run)["metric"] == "loss 0.5"
    version = run.version
    run.refresh()
    assert run.version == version
    write_json(tmp_path / "results.json", flower_results(rounds(5), {}, "FIPA", 3, 5, {}))
    run.refresh()
    assert (run.state, run.version) == (State.FINISHED, version + 1)
    (tmp_path / "results.json").write_text('{"half": ')
    run.refresh()
    assert run.state is State.BROKEN
    assert "not valid JSON" in run.note


@pytest.mark.parametrize(("last", "kept"), [(7, 7), (ENDLESS, None), (None, None)])
def test_results_say_how_many_rounds_there_are_to_be(last, kept):
    assert flower_results(rounds(2), {}, "FIPA", 0, last, {})["rounds"] == kept
