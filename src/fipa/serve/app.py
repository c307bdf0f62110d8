"""The pages and what they ask for.

Runs are looked up by name among those that were found: no path is ever made of a name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from fipa.report import html
from fipa.report.files import load_views
from fipa.report.page import page_of
from fipa.report.sections import labelled
from fipa.serve import views
from fipa.serve.files import ODD, inside, told
from fipa.serve.library import Library
from fipa.serve.security import REPORT_POLICY, Guard
from fipa.serve.sources import Source
from fipa.serve.states import State
from fipa.serve.stream import Listener, in_order

SHARED = ("page.css", "charts.js", "images.js", "theme.js", "figure.js")
OWN = ("serve.css", "live.js", "list.js", "watch.js")
SHOWN_STATES = [state.value for state in State if state is not State.DELETED]


def application(root: Path, token: str | None = None, stopping: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The server for the runs below a folder; with a token, for those who bring it.

    `stopping` tells that the server is about to end: nobody is kept waiting for events then.
    """
    pages = Pages(Library(root), stopping)
    routes = [Route(f"/{name}", getattr(pages, name)) for name in ("watch", "report", "config", "events")]
    routes += [Route("/", pages.overview), Route("/static/{name}", pages.static)]
    return Guard(Starlette(routes=routes), token)


class Pages:
    """Answers to requests."""

    def __init__(self, library: Library, stopping: Callable[[], bool]) -> None:
        self._library, self._stopping = library, stopping

    async def overview(self, request: Request) -> Response:
        """All runs."""
        return await run_in_threadpool(self._overview)

    def _overview(self) -> Response:
        runs = [views.line(source) for source in in_order(self._library.refresh())]
        content = {"title": "Runs", "root": str(self._library.root), "runs": runs, "states": SHOWN_STATES}
        return HTMLResponse(_encoded(html.render("serve/list.html", **content)))

    async def watch(self, request: Request) -> Response:
        """One run, or several side by side."""
        return await run_in_threadpool(self._watch, request)

    def _watch(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        if not names:
            return RedirectResponse("/", 303)
        sources = self._library.pick(names)
        known = {source.id for source in sources}
        runs, charts = [views.line(source) for source in sources], views.charts(sources)
        page = html.render(
            "serve/watch.html",
            title=runs[0]["name"] if len(runs) == 1 else f"{len(runs) or 'No'} runs side by side",
            unknown=[name for name in names if name not in known],
            runs=runs,
            charts=charts,
            arms=[(run, views.arms(source)) for run, source in zip(runs, sources, strict=True)],
            sections=[{"data": chart["data"], "shape": chart["shape"]} for chart in charts],
            several=len([run for run in runs if run["report"]]) > 1,
            query="&".join(run["query"] for run in runs),
        )
        return HTMLResponse(_encoded(page), 200 if runs else 404)

    async def report(self, request: Request) -> Response:
        """The run's report.html if it tells the end; else one that is made of what is on disk now, and not kept."""
        sources = await run_in_threadpool(self._library.pick, request.query_params.getlist("run"))
        if not sources:
            return _missing()
        try:
            page = await run_in_threadpool(self._report, sources)
        except (OSError, *ODD) as error:
            return PlainTextResponse(_encoded(f"no report can be made: {told(error)}"), 409)
        return HTMLResponse(_encoded(page), headers={"content-security-policy": REPORT_POLICY})

    def _report(self, sources: list[Source]) -> str:
        written = sources[0].path / "report.html"
        over = sources[0].state in (State.FINISHED, State.DIVERGED)
        kept = len(sources) == 1 and over and inside(self._library.root, written)
        if kept and written.stat().st_mtime >= sources[0].changed_at:
            return written.read_text("utf-8")
        names = [views.line(source)["name"] for source in sources]
        contents = []
        for source in sources:
            drawn = source.state is not State.RUNNING and inside(self._library.root, source.path / "views.json")
            contents.append((source.whole(), load_views(source.path) if drawn else {}))
        return page_of(labelled(names, contents))

    async def config(self, request: Request) -> Response:
        """The settings of a run, as TOML."""
        sources = await run_in_threadpool(self._library.pick, request.query_params.getlist("run"))
        if not sources or not sources[0].header.get("config"):
            return _missing()
        text = tomli_w.dumps(_without_none(sources[0].header["config"]), multiline_strings=True)
        return PlainTextResponse(_encoded(text))

    async def events(self, request: Request) -> Response:
        """What changes, for as long as the page is open."""
        listener = Listener(self._library, request.query_params.getlist("run"))
        return StreamingResponse(listener.events(self._stopping), media_type="text/event-stream")

    async def static(self, request: Request) -> Response:
        """Styles and scripts, the same as in report.html."""
        name = request.path_params["name"]
        text = _static(name)
        if text is None:
            return _missing()
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        headers = {"cache-control": "max-age=3600"} if name == "plotly.js" else {"cache-control": "no-cache"}
        return Response(text, media_type=kind, headers=headers)


@cache
def _static(name: str) -> str | None:
    if name == "plotly.js":
        return str(get_plotlyjs())
    if name in SHARED:
        return html.asset(name)
    return html.asset(name, "serve") if name in OWN else None


def _encoded(text: str) -> bytes:
    """As UTF-8, with question marks for what is no text: half a character in a title, or in a folder's name."""
    return text.encode("utf-8", "replace")


def _without_none(value: Any) -> Any:
    """Without what is null, which TOML cannot say."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value if part is not None]
    return value


def _missing() -> Response:
    return PlainTextResponse("there is no such run in this folder", 404)
