"""A real SuperLink and real SuperNodes: runs, strangers, processes killed at bad moments, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
if not sys.platform.startswith("linux"):
    pytest.skip("deployments find their processes through /proc", allow_module_level=True)

from fipa.errors import FipaError
from fipa.flower.deployment import Deployment, Processes

PROJECT = """\
[project]
name = "three-numbers"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fipa"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
nodes = 1
rounds = 1
hang = ""
broken = false
"""

# node k adds k + 1; if told so, node 1 says in a file that it has begun with round 2, and does not end
CLIENT = """\
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    node, hang = context.node_config["partition-id"], context.run_config["hang"]
    if hang and node == 1 and message.metadata.group_id == "2":
        Path(hang).touch()
        time.sleep(1000)
    theta = message.content["arrays"]["theta"].numpy()
    return Message(RecordDict({"arrays": ArrayRecord({"theta": Array(theta + node + 1)})}), reply_to=message)
"""

# takes the mean over nodes; after the first round it goes on two seconds after all replies but one are there
SERVER = """\
import json
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    if config["broken"]:
        raise RuntimeError("broken on purpose")
    while len(nodes := list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.1)
    theta = np.zeros(3)
    for number in range(1, config["rounds"] + 1):
        content = RecordDict({"arrays": ArrayRecord({"theta": Array(theta)})})
        waiting = set(grid.push_messages([Message(content, node, "train", group_id=str(number)) for node in nodes]))
        replies, deadline = [], float("inf")
        while waiting and time.monotonic() < deadline:
            time.sleep(0.1)
            new = list(grid.pull_messages(waiting))
            replies += new
            waiting -= {reply.metadata.reply_to_message_id for reply in new}
            if number > 1 and new and len(waiting) == 1:
                deadline = time.monotonic() + 2
        theta = np.mean([reply.content["arrays"]["theta"].numpy() for reply in replies], axis=0)
        print("ROUND", json.dumps({"replies": len(replies), "theta": theta.tolist()}), flush=True)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "client_app.py").write_text(CLIENT)
    (folder / "server_app.py").write_text(SERVER)
    return folder


def rounds(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall("ROUND (.*)", log)]


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


@pytest.mark.deployment
def test_a_run_outlives_a_killed_node_and_strangers_and_broken_apps_are_refused(app: Path, tmp_path: Path) -> None:
    """One deployment, since starting it takes long."""
    began = tmp_path / "began"
    with Deployment(nodes=2) as deployment:
        with pytest.raises(FipaError, match=r"'rounds' is \[1\]: Flower takes booleans, numbers and strings"):
            deployment.submit(app, {"rounds": [1]})
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
            deployment.run(app, {"broken": True}, timeout=300)
        assert deployment.exit_code(7) == 1
        assert "Exit Code: 305" in deployment.log("node-7")

        run = deployment.submit(app, {"nodes": 2, "rounds": 2, "hang": str(began)})
        wait_until(began.exists)
        deployment.kill_node(1)
        assert not [line for line in left(deployment.folder) if "partition-id=1" in line]
        log = deployment.wait(run, timeout=300)
        assert deployment.exit_code(1) == -signal.SIGKILL
        assert deployment.exit_code(0, timeout=0) is None
        deployment.start_node(1)
        assert deployment.exit_code(1, timeout=0) is None
        assert len(left(deployment.folder)) >= 5  # so that the same question below is not void
    first, second = rounds(log)
    assert first == {"replies": 2, "theta": [1.5, 1.5, 1.5]}
    assert second == {"replies": 1, "theta": [2.5, 2.5, 2.5]}
    assert left(deployment.folder) == []
    assert not deployment.folder.exists()


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
