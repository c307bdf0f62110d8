"""`fipa serve`, and the server that `fipa run --serve` starts beside a run."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Annotated
from urllib.parse import urlencode

import typer

from fipa.errors import EXTRAS, FipaError, missing

PORT = 8377


def serving(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with runs, or one run.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = PORT,
    token: Annotated[
        str | None, typer.Option(help="Token to ask for; a random one for other addresses by default.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Watch and compare runs in the browser; Ctrl-C ends it."""
    serve(directory, host, port, token, open_page, lambda address: typer.echo(f"runs in {directory}: {address}"))


def serve(
    directory: Path, host: str, port: int, token: str | None, open_page: bool, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C; other machines, which `host` may let in, need a token."""
    try:
        import uvicorn

        from fipa.serve.app import application
        from fipa.serve.security import loopback
    except ImportError as error:
        if (remedy := missing(error, "serve")) is None:
            raise
        raise FipaError(f"fipa serve {remedy}") from error
    if token == "":
        raise FipaError("--token is empty: leave it out, or give one")
    if token is None and not loopback(host):
        token = os.environ.get("FIPA_TOKEN") or secrets.token_urlsafe(16)
    running: list[uvicorn.Server] = []
    app = application(directory, token, lambda: any(server.should_exit for server in running))
    with bound(host, port) as listening:
        name = f"[{host}]" if ":" in host else host
        query = f"?{urlencode({'token': token})}" if token is not None else ""
        address = f"http://{name}:{listening.getsockname()[1]}/{query}"
        say(address)
        if open_page:
            open_browser(address)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=5)
        running.append(uvicorn.Server(config))
        running[0].run(sockets=[listening])


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at this address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        if os.name == "posix":  # elsewhere it would share the port with whoever has it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise FipaError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port") from error
        listening.listen(128)  # so that nobody is turned away who asks before the server is ready
        yield listening


def open_browser(address: str) -> bool:
    """Open a page, if there is a screen to open it on."""
    screen = sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return screen and webbrowser.open(address)


@contextmanager
def beside(run: Path, open_page: bool) -> Iterator[None]:
    """A server in its own process for as long as a run takes; it ends with this process, however that ends."""
    absent = next((module for module in EXTRAS["serve"] if find_spec(module) is None), None)
    if absent is not None:
        typer.echo(f"no page: --serve needs {absent}: pip install 'fipa[serve]'", err=True)
        yield
        return
    root = run.parent if run.parent.name == "runs" else run
    command = [sys.executable, "-m", "fipa.serve", str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        line = server.stdout.readline()
        if line:
            place = run.relative_to(root).as_posix() if root != run else "."
            address = f"{json.loads(line)['address']}watch?{urlencode({'run': place})}"
            typer.echo(f"watch it at {address}", err=True)
            if open_page:
                open_browser(address)
        try:
            yield
        finally:
            server.stdin.close()  # which ends it
            server.wait()


def until_alone(directory: Path) -> None:
    """Serve a folder as a child: tell the parent the address, and end when it closes our standard input, or dies."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    def tell(address: str) -> None:
        print(json.dumps({"address": address}), flush=True)
        Thread(target=wait, daemon=True).start()

    with suppress(KeyboardInterrupt):  # of the terminal, which the parent hears as well
        serve(directory, "127.0.0.1", 0, None, False, tell)
