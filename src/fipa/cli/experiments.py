"""`fipa list` and `fipa show`."""

from __future__ import annotations

import json
from typing import Any

from fipa.cli.common import Json, Name, Overrides, out
from fipa.shipped import names, outline, settings


def list_experiments(as_json: Json = False) -> None:
    """List the experiments that come with the package."""
    entries = {name: outline(name) for name in names()}
    if as_json:
        told = {name: {"title": e["title"], "arms": [a["name"] for a in e["arms"]]} for name, e in entries.items()}
        print(json.dumps(told))
        return
    from rich.markup import escape
    from rich.table import Column, Table

    whole = Column("experiment", no_wrap=True)  # a name that is cut is of no use
    table = Table(whole, "what", "arms", "rounds", "seeds", box=None, pad_edge=False)
    for name, content in entries.items():
        seeds = ", ".join(map(str, content["seeds"]))
        table.add_row(name, escape(content["title"]), str(len(content["arms"])), _range(content), seeds)
    out.print(table)


def show(name: Name, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print an experiment with all its settings, as TOML that `fipa run` takes."""
    import tomli_w

    if name in names() and not overrides:
        content = settings(name)
    else:  # what somebody has written is checked by what would run it
        from fipa.launch import choose, complete

        content = complete(*choose(name, overrides=overrides or ()))
    print(f"{json.dumps(content)}\n" if as_json else tomli_w.dumps(content, multiline_strings=True), end="")


def _range(content: dict[str, Any]) -> str:
    rounds = {arm.get("rounds", content["rounds"]) for arm in content["arms"]}
    return f"{min(rounds)} to {max(rounds)}" if len(rounds) > 1 else str(*rounds)
