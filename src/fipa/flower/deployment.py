"""A real Flower deployment on this machine: one SuperLink and several SuperNodes, with TLS and authentication.

Everything lives in a private temporary folder and talks over loopback; at the end nothing is left running.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  what sockets import when they first connect: Ctrl-C is lost within an import
import json
import random
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Self

from fipa.errors import FipaError
from fipa.flower.certificates import write_node_key, write_server_files
from fipa.flower.processes import PATIENCE, PROGRAMS, Processes, end_of

CONNECTION = "loopback"
ONLINE = "SuperNode ID:"  # a node logs this once the SuperLink has accepted it
# several `flwr ...` commands at the price of one: to start a process takes Flower more than a second
FLWR = """\
import json, sys
from flwr.cli.app import app
for command in json.loads(sys.argv[1]):
    try:
        app(command)
    except SystemExit as end:
        if end.code:
            raise
    print(end="\\0", flush=True)
"""
PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections, which could take one of ours


class Deployment:
    """A SuperLink and SuperNodes as processes of their own, for as long as a `with` block lasts.

    Nodes are numbered from 0; node k runs with `partition-id=k num-partitions=nodes`. The block may end in any way,
    Ctrl-C and SIGTERM included: every process is killed, and the folder removed.

    Parameters
    ----------
    nodes
        How many SuperNodes.
    logs
        An existing folder for the logs (superlink.log, node-0.log, ...); by default they are removed with all else.

    Examples
    --------
    >>> with Deployment(nodes=3) as deployment:  # doctest: +SKIP
    ...     print(deployment.run(Path("examples/flower-fitting"), {"rounds": 2}, timeout=120))
    """

    def __init__(self, nodes: int = 3, logs: Path | None = None) -> None:
        if nodes < 1:
            raise FipaError(f"nodes is {nodes}: a deployment needs at least one")
        if not Path("/proc/self/environ").exists():
            raise FipaError("a deployment finds its processes through /proc, which only Linux has: run it there")
        if not (PROGRAMS / "flower-superlink").exists():
            raise FipaError(f"there is no flower-superlink in {PROGRAMS}: pip install 'fipa[flower]'")
        if logs is not None and not logs.is_dir():
            raise FipaError(f"logs {logs} is not a folder: make it first")
        self.nodes = nodes
        self._logs = logs
        self._ports: dict[str, int] = {}
        self._ids: dict[int, str] = {}

    def __enter__(self) -> Self:
        self._handlers = _handle({signal.SIGTERM: lambda number, frame: sys.exit(128 + number)})
        self.folder = Path(tempfile.mkdtemp(prefix="fipa-deployment-")).resolve()
        self._processes = Processes(self.folder, (self._logs or self.folder).resolve())
        try:
            self._tls = write_server_files(self.folder)
            (self.folder / "config.toml").write_text(
                f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
                f'address = "127.0.0.1:{self._port("superlink")}"\nroot-certificates = "{self._tls.authority}"\n'
            )
            self.start_superlink()
            self._start_registered(range(self.nodes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every process, and remove the folder."""
        handlers = _handle({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN})  # no second Ctrl-C here
        try:
            self._processes.kill()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            _handle(handlers | self._handlers)

    def run(self, app: Path, run_config: Mapping[str, Any] | None = None, timeout: float = 600.0) -> str:
        """Run an app to its end.

        Parameters
        ----------
        app
            The folder with the app's pyproject.toml.
        run_config
            Settings that differ from those in it; it has to name every one of them.
        timeout
            Seconds before the run is given up.

        Returns
        -------
        str
            What the server side of the app has logged.
        """
        return self.wait(self.submit(app, run_config), timeout)

    def submit(self, app: Path, run_config: Mapping[str, Any] | None = None) -> int:
        """Start an app as `run` does, and return the number of the run without waiting for its end."""
        command = ["run", str(app.resolve()), CONNECTION, "--format", "json"]
        if run_config:
            file = self.folder / "run-config.toml"
            file.write_text("".join(f"{key} = {_toml(key, value)}\n" for key, value in run_config.items()), "utf-8")
            command += ["--run-config", str(file)]
        (answer,) = self._flwr([command])
        return int(_answer(answer)["run-id"])

    def wait(self, run: int, timeout: float = 600.0) -> str:
        """Wait for the end of a run, and return what the server side of its app has logged."""
        log, answer = self._flwr(
            [["log", str(run), CONNECTION, "--stream"], ["ls", CONNECTION, "--run-id", str(run), "--format", "json"]],
            timeout,
        )
        status = _answer(answer)["runs"][0]["status"]
        if status != "finished:completed":
            raise FipaError(f"run {run} is {status}; the end of its log:\n{end_of(log)}")
        return log

    def start_superlink(self) -> None:
        """Start the SuperLink; after `kill_superlink` on the same port and database, so that nodes find it again."""
        port = self._port("superlink")
        self._processes.start(
            *("superlink", str(PROGRAMS / "flower-superlink"), "--host", "127.0.0.1", "--port", str(port)),
            *("--ssl-ca-certfile", str(self._tls.authority), "--ssl-certfile", str(self._tls.certificate)),
            *("--ssl-keyfile", str(self._tls.key), "--enable-supernode-auth"),
            *("--database", str(self.folder / "state.db"), "--disable-runtime-dependency-installation"),
        )
        context = ssl.create_default_context(cafile=str(self._tls.authority))

        def answers() -> bool:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
                context.wrap_socket(plain, server_hostname="127.0.0.1").close()
                return True
            return False

        self._processes.until("superlink", answers)

    def kill_superlink(self) -> None:
        """Kill the SuperLink and all that it has started: the server side of a run, too."""
        self._processes.kill("superlink")

    def start_node(self, node: int, registered: bool = True) -> None:
        """Start a node that was killed, or one that the SuperLink does not know.

        Parameters
        ----------
        node
            Its number, which no running node may have.
        registered
            If not, the node gets a key that nobody knows, so that it is refused: see `exit_code`.
        """
        self._processes.check_idle(f"node-{node}")
        if not registered:
            self._spawn(node, self._new_key())
        elif node in range(self.nodes):
            self._start_registered([node])
        else:
            raise FipaError(f"there is no node {node} to start again: they go from 0 to {self.nodes - 1}")

    def kill_node(self, node: int) -> None:
        """Kill a node and all that it has started."""
        self._processes.kill(self._started(node))

    def exit_code(self, node: int, timeout: float = PATIENCE) -> int | None:
        """What the process of a node has ended with; None if it still runs after `timeout` seconds."""
        return self._processes.exit_code(self._started(node), timeout)

    def log(self, name: str) -> str:
        """What a process has logged so far: superlink, or node-0, node-1, ..."""
        return self._processes.log(name)

    def _started(self, node: int) -> str:
        name = f"node-{node}"
        if name not in self._ports:
            raise FipaError(f"there is no node {node}: it was never started")
        return name

    def _port(self, name: str) -> int:
        """A port that is free, and the same one when a process is started again."""
        if name not in self._ports:
            self._ports[name] = _free_port(self._ports.values())
        return self._ports[name]

    def _new_key(self) -> Path:
        key = self.folder / f"key-{len(list(self.folder.glob('key-*.pub')))}"
        write_node_key(key)
        return key

    def _start_registered(self, nodes: Sequence[int]) -> None:
        """Start nodes with new keys: for a minute after a node was killed, Flower refuses another with its key."""
        keys = [self._new_key() for _ in nodes]
        old = [["supernode", "unregister", self._ids[node], CONNECTION] for node in nodes if node in self._ids]
        new = [["supernode", "register", f"{key}.pub", CONNECTION, "--format", "json"] for key in keys]
        answers = self._flwr(old + new)[len(old) :]
        ids = [str(_answer(answer)["node-id"]) for answer in answers]
        self._ids |= dict(zip(nodes, ids, strict=True))
        for node, key in zip(nodes, keys, strict=True):
            self._spawn(node, key)
        for node in nodes:
            self._processes.until(f"node-{node}", partial(self._online, node))

    def _online(self, node: int) -> bool:
        return f"{ONLINE} {self._ids[node]}" in self.log(f"node-{node}")

    def _spawn(self, node: int, key: Path) -> None:
        name = f"node-{node}"
        self._processes.start(
            *(name, str(PROGRAMS / "flower-supernode"), "--host", "127.0.0.1", "--port", str(self._port(name))),
            *("--superlink", f"127.0.0.1:{self._port('superlink')}", "--root-certificates", str(self._tls.authority)),
            *("--auth-supernode-private-key", str(key)),
            *("--node-config", f"partition-id={node} num-partitions={self.nodes}"),
        )

    def _flwr(self, commands: list[list[str]], timeout: float = PATIENCE) -> list[str]:
        """What each of several `flwr` commands prints."""
        name = f"`flwr {commands[0][0]}`"
        printed = self._processes.output(name, [sys.executable, "-c", FLWR, json.dumps(commands)], timeout)
        return printed.split("\0")[:-1]


def _handle(handlers: Mapping[int, Any]) -> dict[int, Any]:
    """Set handlers of signals, and return those before; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    known = {number: handler for number, handler in handlers.items() if handler is not None}  # Python set these
    return {number: signal.signal(number, handler) for number, handler in known.items()}


def _free_port(taken: Collection[int]) -> int:
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            if port not in taken:
                probe.bind(("127.0.0.1", port))
                return port
    raise FipaError(f"no free port among 100 of {PORTS.start} to {PORTS.stop - 1}: stop what takes them")


def _answer(text: str) -> dict[str, Any]:
    """What `flwr --format json` says; it ends with code 0 even where that is why it has failed."""
    answer: dict[str, Any] = json.loads(text)
    if not answer["success"]:
        raise FipaError(f"Flower refuses: {answer.get('error-message', answer)}")
    return answer


def _toml(key: str, value: object) -> str:
    if not isinstance(value, (bool, int, float, str)):
        raise FipaError(f"run_config {key!r} is {value!r}: Flower takes booleans, numbers and strings")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, str)) else f"{value}"
