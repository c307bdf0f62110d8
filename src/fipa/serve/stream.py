"""Server-sent events: what has changed since the last look, for as long as somebody listens."""

from __future__ import annotations

import json
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from fipa.serve import views
from fipa.serve.library import Library
from fipa.serve.sources import Source
from fipa.serve.states import State

PAUSE = 1.0  # seconds between two looks
BEAT = 15.0  # seconds after which a line is sent in any case: else it is not noticed that a listener is gone
RANK = {State.RUNNING: 0}  # first in the list


def message(event: str, content: Any) -> str:
    """An event as the browser reads it."""
    return f"event: {event}\ndata: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"


def in_order(sources: Sequence[Source]) -> list[Source]:
    """Those that run first, then those that were written last."""
    return sorted(sources, key=lambda s: (RANK.get(s.state, 1), -s.changed_at, s.id))


class Listener:
    """One page that listens: knows what it has been told."""

    def __init__(self, library: Library, ids: Sequence[str]) -> None:
        self._library, self._ids = library, ids
        self._told: dict[str, int] = {}
        self._order: list[str] = []

    async def events(self, stopping: Callable[[], bool]) -> AsyncIterator[str]:
        """Events until the page is left, or the server ends."""
        said = time.monotonic()
        yield "retry: 1000\n\n"
        while not stopping():
            found = await run_in_threadpool(self.news)
            if found or time.monotonic() - said > BEAT:
                said = time.monotonic()
                yield "".join(found) or ": still here\n\n"
            await sleep(PAUSE)

    def news(self) -> list[str]:
        """What the page has not been told."""
        return self._watched() if self._ids else self._listed()

    def _listed(self) -> list[str]:
        sources = in_order(self._library.refresh())
        changed = {s.id: views.fragment("row", run=views.line(s)) for s in self._changed(sources)}
        order = [source.id for source in sources]
        if not changed and order == self._order:
            return []
        self._order = order
        return [message("runs", {"order": order, "changed": changed})]

    def _watched(self) -> list[str]:
        sources = self._library.pick(self._ids)
        changed = self._changed(sources)
        if not changed:
            return []
        several = len(sources) > 1
        panels = [views.fragment("panel", run=views.line(source), alone=not several) for source in changed]
        arms = [views.fragment("arms", name=views.line(source)["name"], rows=views.arms(source), several=several)
                for source in changed if source.tracks]  # fmt: skip
        charts = [{"data": chart["data"], "shape": chart["shape"]} for chart in views.charts(sources)]
        return [message("panels", panels), message("arms", arms), *([message("charts", charts)] if charts else [])]

    def _changed(self, sources: Sequence[Source]) -> list[Source]:
        changed = [source for source in sources if self._told.get(source.id) != source.version]
        self._told = {source.id: source.version for source in sources}
        return changed
