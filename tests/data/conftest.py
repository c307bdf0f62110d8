"""A server on this machine that can be told to misbehave."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fipa.data.download import Remote


class Server(ThreadingHTTPServer):
    """Serves `files`; notes the Range of each request in `asked`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str | None] = []
        self.ranges = True  # whether it heeds Range
        self.shift = 0  # how far off the mark its ranges begin
        self.length = True  # whether it says how long a file is
        self.cuts: list[int] = []  # after how many bytes of each answer it hangs up

    def remote(self, name: str, content: bytes) -> Remote:
        self.files[f"/{name}"] = content
        return Remote(f"http://127.0.0.1:{self.server_port}/{name}", hashlib.md5(content).hexdigest())


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) + self.server.shift if asked else 0
        if asked and self.server.ranges:
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            content = content[start:]
        else:
            self.send_response(200)
        if self.server.length:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.cuts.pop(0)] if self.server.cuts else content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
