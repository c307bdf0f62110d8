"""A real SuperLink and real SuperNodes: runs, strangers, processes killed at bad moments, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
if not sys.platform.startswith("linux"):
    pytest.skip("deployments find their processes through /proc", allow_module_level=True)

from flwr.app import Context, RecordDict

from fipa.errors import FipaError
from fipa.federation.checkpoint import load_state
from fipa.federation.parameters import load_theta
from fipa.flower.demo import EXPERIMENT, alone, changes, write_app
from fipa.flower.deployment import Deployment, Processes
from fipa.flower.local import LocalGrid

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower-digits"
TRAIN = "Receiving: train"  # what a node logs
ARM = "FIPA completed"  # one trip a round: for every message a node starts a process that imports torch
BROKEN = """\
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    raise RuntimeError("broken on purpose")
"""


def left(folder: Path) -> list[str]:
    """Processes that have this folder in their environment or command: all of a deployment's have."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if str(folder).encode() in (process / "environ").read_bytes() + command:
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:  # gone, or not ours
            continue
    return found


def wait_until(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """With two nodes, and for all tests, since starting it takes long; nothing is left of it."""
    with Deployment(nodes=2) as running:
        yield running
        assert len(left(running.folder)) >= 3  # so that the same question below is not void
    assert left(running.folder) == []
    assert not running.folder.exists()


def config(folder: Path, rounds: int, clients: int, **more: Any) -> dict[str, Any]:
    """Of a run of the demo."""
    files = {"checkpoint": str(folder / "state.pt"), "output": str(folder / "theta.safetensors")}
    return {"experiment": EXPERIMENT, "arm": ARM, "set": ";".join(changes(clients, rounds)), **files, **more}


def rounds(folder: Path) -> int:
    saved = load_state(folder / "state.pt")
    return 0 if saved is None else saved[0].round_number


@pytest.mark.deployment
def test_strangers_broken_apps_and_wrong_settings_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    (app / "fitting" / "server_app.py").write_text(BROKEN)
    with pytest.raises(FipaError, match=r"'seed' is \[1\]: Flower takes booleans, numbers and strings"):
        deployment.submit(app, {"seed": [1]})
    with pytest.raises(FipaError, match="Invalid run configuration"):
        deployment.submit(app, {"unknown": 1})
    with pytest.raises(FipaError, match="there is no node 5"):
        deployment.kill_node(5)
    with pytest.raises(FipaError, match="node-0 is running already"):
        deployment.start_node(0)
    with pytest.raises(FipaError, match="no node 2 to start again: they go from 0 to 1"):
        deployment.start_node(2)
    deployment.start_node(7, registered=False)
    with pytest.raises(FipaError, match=r"(?s)finished:failed.*RuntimeError: broken on purpose"):
        deployment.run(app, timeout=300)
    assert deployment.exit_code(7) == 1
    assert "Exit Code: 305" in deployment.log("node-7")


@pytest.mark.deployment
def test_the_app_of_the_tutorial(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same numbers as in one process, which are those of the page."""
    deployed = accuracies(deployment.run(APP, {"nodes": 2, "rounds": 1}, timeout=500))
    monkeypatch.syspath_prepend(str(APP))
    server, client = (importlib.import_module(f"digits.{side}_app") for side in ("server", "client"))
    settings = {"strategy": "fipa", "nodes": 2, "rounds": 1}
    try:
        server.app(LocalGrid(client.app, 2), Context(1, 1, {}, RecordDict(), settings))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "digits"]:
            del sys.modules[name]
    assert accuracies(capsys.readouterr().out) == deployed
    page = (ROOT / "docs" / "tutorials" / "flower.md").read_text("utf-8")
    shown = accuracies(page)[: len(deployed)]
    assert len(shown) == len(deployed) == 2
    assert [number for _, number in deployed] == pytest.approx([number for _, number in shown], abs=3)


def accuracies(text: str) -> list[tuple[int, float]]:
    return [(int(k), float(number)) for k, number in re.findall(r"round (\d+): accuracy ([\d.]+) %", text)]


@pytest.mark.deployment
def test_a_run_resumes_after_its_superlink_was_killed(deployment: Deployment, tmp_path: Path) -> None:
    """With a client of one node: the other one has nothing to do."""
    app, settings = write_app(tmp_path / "app"), config(tmp_path, 2, clients=1)
    deployment.submit(app, settings)
    wait_until(lambda: rounds(tmp_path) >= 1)
    deployment.kill_superlink()  # the client is at work for the second round
    deployment.start_superlink()
    assert rounds(tmp_path) == 1
    assert "resuming after round 1" in deployment.run(app, settings)
    assert rounds(tmp_path) == 2
    assert torch.equal(load_theta(tmp_path / "theta.safetensors"), alone(EXPERIMENT, ARM, changes(1, 2)))


@pytest.mark.deployment
def test_a_run_outlives_a_node_that_is_killed_at_work(deployment: Deployment, tmp_path: Path) -> None:
    before = deployment.log("node-1").count(TRAIN)
    run = deployment.submit(write_app(tmp_path / "app"), config(tmp_path, 1, clients=2, deadline=5.0, grace=0.0))
    wait_until(lambda: deployment.log("node-1").count(TRAIN) > before)
    deployment.kill_node(1)
    assert not [line for line in left(deployment.folder) if "partition-id=1" in line]
    deployment.wait(run)
    saved = load_state(tmp_path / "state.pt")
    assert saved is not None
    assert [told["clients"] for told in saved[1]["metrics"]["train_metrics_clientapp"].values()] == [1]
    assert deployment.exit_code(1) == -signal.SIGKILL
    assert deployment.exit_code(0, timeout=0) is None
    deployment.start_node(1)
    assert deployment.exit_code(1, timeout=0) is None


@pytest.mark.deployment
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_ctrl_c_or_termination_during_the_start(tmp_path: Path, number: int) -> None:
    script = (  # which listens to Ctrl-C even if we have been told to ignore it
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fipa.flower.deployment import Deployment\nwith Deployment(nodes=1):\n    pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: list(tmp_path.glob("*/superlink.log")))
    process.send_signal(number)
    assert process.wait(timeout=300) == (-number if number == signal.SIGINT else 128 + number)
    assert list(tmp_path.iterdir()) == []
    assert left(tmp_path) == []


def test_what_a_process_has_started_in_a_session_of_its_own_is_killed_with_it(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tmp_path)
    try:
        for name in ("one", "two"):
            processes.start(name, "sh", "-c", "setsid sleep 1000 & sleep 1000")
        wait_until(lambda: len(left(tmp_path)) == 6)
        processes.kill("one")
        assert len(left(tmp_path)) == 3
        assert processes.exit_code("two", timeout=0) is None
    finally:
        processes.kill()
    assert left(tmp_path) == []


def test_errors_of_processes_show_the_end_of_what_they_said(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tmp_path)
    processes.start("short", "sh", "-c", "echo no luck; exit 3")
    with pytest.raises(FipaError, match=r"(?s)short has ended with code 3; .*no luck"):
        processes.until("short", lambda: False)
    with pytest.raises(FipaError, match=r"(?s)tool failed with code 4; .*bad day"):
        processes.output("tool", ["sh", "-c", "echo bad day >&2; exit 4"], timeout=60)
    with pytest.raises(FipaError, match=r"(?s)tool did not end within 1 s; .*so far"):
        processes.output("tool", ["sh", "-c", "echo so far; exec sleep 1000"], timeout=1)
    assert left(tmp_path) == []


def test_what_cannot_be_deployed_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(FipaError, match="nodes is 0"):
        Deployment(nodes=0)
    with pytest.raises(FipaError, match="is not a folder"):
        Deployment(logs=tmp_path / "missing")
