"""`fipa doctor`."""

from __future__ import annotations

import json
from typing import Any

import typer

from fipa.cli.common import Json, Root, out


def doctor(root: Root = None, as_json: Json = False) -> None:
    """Show versions, processor, data sets and extras, and how to get what is missing."""
    from fipa.doctor import examine

    found = examine(root)
    if as_json:
        print(json.dumps(found))
    else:
        for line in _lines(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if found["usable"] else 1)


def _lines(found: dict[str, Any]) -> list[str]:
    """A line for each finding, then what to do."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number is not None)
    rows = {"versions": versions, "machine": _machine(found["machine"])}
    if torch := found["torch"]:
        rows["torch"] = f"{torch['threads']} threads, {torch['instructions']}" + "".join(
            f", {name}" for name in ("mkl", "onednn", "cuda") if torch[name]
        )
    if data := found["data"]:
        there = [name for name, place in data["sets"].items() if place is not None]
        rows["data"] = f"{', '.join(there)} (under {data['root']})"
    installed = [extra for extra, state in found["extras"].items() if state["installed"]]
    flower = found["flower"]
    rows |= {
        "extras": ", ".join(installed) or "none",
        "Flower": "no" if not flower["usable"] else "yes" if flower["deployment"] else "yes, but no deployment",
        "browser": "yes" if found["browser"]["usable"] else "no",
        "usable": "yes" if found["usable"] else "no",
    }
    width = max(map(len, rows))
    advice = [f"- {sentence}" for sentence in found["advice"]]
    return [f"{name:<{width}}  {text}" for name, text in rows.items()] + (["what to do:", *advice] if advice else [])


def _machine(machine: dict[str, Any]) -> str:
    sizes = [f"{size / 2**30:.1f} GiB {kind}" for kind, size in machine["memory"].items()]
    return ", ".join([machine["processor"], f"{machine['cores']} cores to use", *sizes, machine["system"]])
