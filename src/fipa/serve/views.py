"""What the pages show of runs: lines of the list, panels, tables of arms and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fipa.report.data import MIB, centralised
from fipa.report.html import environment
from fipa.report.page import figure
from fipa.report.sections import grouped, labelled, section_payload
from fipa.report.words import capitalised, number, value, with_name
from fipa.serve.files import ODD, told
from fipa.serve.sources import Source
from fipa.serve.states import State
from fipa.serve.tracks import Track, best, current, seconds_left


def line(source: Source) -> dict[str, Any]:
    """What is said of a run in the list and at the top of its page; that it is broken, if its files are odd."""
    try:
        return _line(source)
    except ODD as error:
        return _line(replace(source, state=State.BROKEN, note=told(error), tracks=[], header={}))


def _line(source: Source) -> dict[str, Any]:
    header, tracks = source.header, source.tracks
    totals = [track.total for track in tracks]
    done = sum(track.done for track in tracks)
    total = sum(filter(None, totals)) if None not in totals else 0
    left = sum((track.total or 0) - track.done for track in tracks if track.diverged)  # rounds that will not be run
    running = source.state is State.RUNNING
    now = current(tracks)
    return {
        "id": source.id,
        "name": Path(source.path).name if source.id == "." else source.id,
        "title": str(header.get("title") or ""),
        "kind": source.kind,
        "state": source.state.value,
        "note": source.note,
        "done": done,
        "total": max(total - left, done) if total else 0,
        "where": _where(now) if now is not None else "",
        "metric": _metric(source, now if running else None),
        "left": duration(seconds_left(tracks, source.overhead)) if running else "",
        "up": number(sum(track.sum("uplink_bytes") for track in tracks) / MIB),
        "down": number(sum(track.sum("downlink_bytes") for track in tracks) / MIB),
        "seconds": duration(sum(track.sum("seconds") for track in tracks)),
        "changed_at": int(source.changed_at),
        "command": str(header.get("command") or ""),
        "query": urlencode({"run": source.id}, errors="replace"),
        "report": any(track.done and not track.warmup for track in tracks),
        "config": bool(header.get("config")),
    }


def arms(source: Source) -> list[dict[str, Any]]:
    """A line for every arm: how far it is on its seeds, where it stands, and what it took so far; none of odd files."""
    try:
        return _arms(source)
    except ODD:
        return []


def _arms(source: Source) -> list[dict[str, Any]]:
    metric = {"metric": source.header.get("metric") or {"scale": "log", "name": ""}}
    now = current(source.tracks) if source.state is State.RUNNING else None
    rows = []
    for arm in dict.fromkeys(track.arm for track in source.tracks):
        mine = [track for track in source.tracks if track.arm == arm]
        lasts = [last for track in mine if track.done and (last := track.last()) is not None]
        rows.append({
            "arm": arm,
            "state": _state(mine, now),
            "done": sum(track.done for track in mine),
            "total": sum(track.total or 0 for track in mine),
            "seeds": f"{sum(track.over for track in mine)}/{len(mine)}",
            "metric": value(metric, sum(lasts) / len(lasts)) if lasts else "-",
            "up": number(sum(track.sum("uplink_bytes") for track in mine) / MIB),
            "down": number(sum(track.sum("downlink_bytes") for track in mine) / MIB),
            "seconds": duration(sum(track.sum("seconds") for track in mine)),
        })  # fmt: skip
    return rows


def charts(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """For every metric that these runs have: its figure, what the chart draws, and what tells one figure from another.

    The last is the figure's shape: a page whose figure has another shape loads itself again. Runs that cannot be drawn,
    as their files are odd, are left out.
    """
    try:
        return _charts(sources)
    except ODD:
        return _charts([source for source in sources if _drawn(source)])


def _drawn(source: Source) -> bool:
    try:
        return bool(_charts([source]))
    except ODD:
        return False


def _charts(sources: Sequence[Source]) -> list[dict[str, Any]]:
    loaded = [(source, results) for source in sources if (results := source.results()) is not None]
    shown = labelled([line(source)["name"] for source, _ in loaded], [(results, {}) for _, results in loaded])
    found = []
    groups = grouped(shown)
    for group in groups:
        data = section_payload(group)
        frame = figure(group, data, capitalised(data["metric"]["name"]))
        shape = [frame["heading"], frame["axes"], frame["several"], frame["averaged"], frame["many"], len(groups)]
        found.append({"frame": frame, "data": data, "shape": shape})
    return found


def fragment(part: str, **content: Any) -> str:
    """A part of a page, by the name of its macro."""
    macro = getattr(environment().get_template("serve/parts.html").module, part)
    return str(macro(**content))


def duration(seconds: float | None) -> str:
    """A time in words.

    >>> duration(42.4), duration(61), duration(7260), duration(200000), duration(None)
    ('42 s', '1 min 1 s', '2 h 1 min', '2 d 7 h', '')
    """
    if seconds is None:
        return ""
    whole = round(seconds)
    for name, size, below, part in (("d", 86400, 3600, "h"), ("h", 3600, 60, "min"), ("min", 60, 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {part}"
    return f"{whole} s"


def _state(mine: Sequence[Track], now: Track | None) -> str:
    """How an arm stands; `now` is what runs, if anything does."""
    if any(track.diverged for track in mine):
        return "diverged"
    if all(track.over for track in mine):
        return "finished"
    if now is not None:
        return "running" if now.arm == mine[0].arm else "waiting"
    return "stopped" if any(track.done for track in mine) else "waiting"


def _where(track: Track) -> str:
    of = f" of {track.after + track.total}" if track.total is not None else ""
    return f"{track.arm}, seed {track.seed}, round {track.after + track.done}{of}"


def _metric(source: Source, now: Track | None) -> str:
    """The last metric of what runs now; else that of the best arm."""
    metric = source.header.get("metric")
    if metric is None:
        return ""
    told = {"metric": metric}
    if now is not None:
        last = now.last()
        return "" if last is None else with_name(told, last)
    besides = [*centralised(source.header), str(source.header.get("reference"))]
    found = best(source.tracks, metric["goal"], besides)
    return "" if found is None else f"{with_name(told, found[1])} ({found[0]})"
