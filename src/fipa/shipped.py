"""The experiments that come with the package: their names and settings, without importing what runs them.

An outline is what the TOML files say. To work out all settings takes the classes of rules, clients and problems, and so
torch: what was worked out once is kept in a folder of the user's, for as long as no file of the package changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = resources.files("fipa") / "experiments"
PACKAGE = Path(__file__).parent
OWN_PROBLEM = "own-problem"  # the arms for a Python file that brings a problem only


def names() -> list[str]:
    """The experiments that come with the package."""
    found = [entry.name.removesuffix(".toml") for entry in SHIPPED.iterdir() if entry.name.endswith(".toml")]
    return sorted(name for name in found if name != OWN_PROBLEM)


def outline(name: str) -> dict[str, Any]:
    """What an experiment's file says at the top, and the files that it is based on: title, seeds, rounds, arms.

    >>> [arm["name"] for arm in outline("poisson-3d")["arms"]][:2]
    ['FedAvg (paper)', 'FedAvg, tuned']
    """
    own = tomllib.loads((SHIPPED / f"{name}.toml").read_text("utf-8"))
    below = outline(own["base"]) if "base" in own else {}
    if isinstance(own.get("arms"), dict):  # changes to the arms of the base
        own["arms"] = [arm | own["arms"].get(arm["name"], {}) for arm in below["arms"]]
    return below | own


def settings(name: str) -> dict[str, Any]:
    """All that `fipa show` tells of an experiment of the package, as plain data."""
    file = cache() / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or broken: worked out anew
        return dict(json.loads(file.read_text("utf-8")))
    content = worked_out(name)
    with contextlib.suppress(OSError):  # a home that cannot be written to
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(content), "utf-8")
        part.replace(file)
    return content


def worked_out(name: str) -> dict[str, Any]:
    """The same, from the experiment's TOML file and from the classes that it names."""
    from fipa.launch import choose, complete

    return complete(*choose(name))


def cache() -> Path:
    """The folder for settings that were worked out with the package as it is now."""
    digest = hashlib.sha256()
    for file in sorted(file for kind in ("*.py", "*.toml") for file in PACKAGE.rglob(kind)):
        about = file.stat()
        digest.update(f"{file.relative_to(PACKAGE)} {about.st_size} {about.st_mtime_ns}\n".encode())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "fipa" / digest.hexdigest()[:16]
