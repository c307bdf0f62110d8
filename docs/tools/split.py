"""For Griffe, which reads the docstrings: an entry for two parameters, `a, b`, is one for each.

Its own reading gives both of them the default of the first.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"(?m)^((?:\*{0,2}\w+, )+\*{0,2}\w+)\n((?:    .*(?:\n|$)|\n(?=    ))+)")


class Split(griffe.Extension):
    """Splits the entries of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for whatever has been read."""
        if obj.docstring is not None:
            obj.docstring.value = split(obj.docstring.value)


def split(text: str) -> str:
    """The same docstring with one entry for each name."""

    def one_by_one(match: re.Match[str]) -> str:
        names, meaning = match.groups()
        return "".join(f"{name}\n{meaning.rstrip()}\n" for name in names.split(", "))

    return ENTRY.sub(one_by_one, text)
