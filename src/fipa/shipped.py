"""The experiments that come with the package: their names and all their settings, without importing what runs them.

To work settings out takes the classes of rules, clients and problems, and so torch. For the experiments of the package
that is done beforehand: `python -m fipa.shipped` writes experiments/complete/NAME.json.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

SHIPPED = resources.files("fipa") / "experiments"
COMPLETE = SHIPPED / "complete"
OWN_PROBLEM = "own-problem"  # the arms for a Python file that brings a problem only


def names() -> list[str]:
    """The experiments that come with the package."""
    found = [entry.name.removesuffix(".toml") for entry in SHIPPED.iterdir() if entry.name.endswith(".toml")]
    return sorted(name for name in found if name != OWN_PROBLEM)


def settings(name: str) -> dict[str, Any]:
    """All that `fipa show` tells of an experiment of the package, as plain data."""
    file = COMPLETE / f"{name}.json"
    if file.is_file():
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if all(_digest(source) == digest for source, digest in content["sources"].items()):
            return content["settings"] | {"arms": content["arms"]}
    return worked_out(name)  # somebody changes the experiment


def worked_out(name: str) -> dict[str, Any]:
    """The same, from the experiment's TOML file and from the classes that it names."""
    from fipa.launch import choose, complete

    return complete(*choose(name))


def text(name: str) -> str:
    """What settings are kept as, an arm in a line, together with digests of the files that they come from."""
    from fipa.config.load import sources

    whole = worked_out(name)
    arms = [json.dumps(arm, ensure_ascii=False) for arm in whole.pop("arms")]
    head = {"sources": {file: _digest(file) for file in sources(name)}, "settings": whole}
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    return "{\n" + ",\n".join([*lines, '"arms": [\n' + ",\n".join(arms) + "\n]"]) + "\n}\n"


def write(folder: Path) -> None:
    """Work out the settings of all experiments, and keep them; those of experiments that are gone go."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for name in names():
        (folder / f"{name}.json").write_text(text(name), "utf-8")


def _digest(source: str) -> str:
    file = SHIPPED / source
    return hashlib.sha256(file.read_text("utf-8").encode()).hexdigest()[:16] if file.is_file() else ""


if __name__ == "__main__":
    write(Path(str(COMPLETE)))
