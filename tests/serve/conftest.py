"""A server in a thread of its own, on a free port."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    status: int
    text: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Served:
    """A server and its port."""

    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Ask, without following where it sends us."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            found = connection.getresponse()
            names = {name.lower(): text for name, text in found.getheaders()}
            return Answer(found.status, found.read().decode(), names)
        finally:
            connection.close()

    @contextmanager
    def listening(self, path: str) -> Iterator[Callable[[], str]]:
        """A stream of events; each call waits for the next line."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        try:
            yield lambda: answer.readline().decode().rstrip("\n")
        finally:
            answer.close()
            connection.close()


@pytest.fixture
def serving() -> Iterator[Callable[..., Served]]:
    """Serves a folder until the test ends."""
    import uvicorn

    from fipa.serve.app import application
    from fipa.serve.command import bound

    with ExitStack() as stack:

        def serve(root: Path, token: str | None = None) -> Served:
            listening = stack.enter_context(bound("127.0.0.1", 0))
            running: list[uvicorn.Server] = []
            app = application(root, token, lambda: running[0].should_exit)
            running.append(uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")))
            server = running[0]
            thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(setattr, server, "should_exit", True)
            return Served(listening.getsockname()[1])

        yield serve
