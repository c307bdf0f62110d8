"""Where the keys of a TOML text stand. The text is known to be valid: a real parser has read it before."""

from __future__ import annotations

import re
from collections.abc import Sequence

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_PART = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[\w-]+)\s*""")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""+|' + r"'''.*?'''+|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'", re.DOTALL)
_PLAIN = re.compile(r"[^,\]}\n#]*")


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    r"""The line (from 1) that sets a key, or else the nearest key or table above it.

    Examples
    --------
    >>> line_of('[[arms]]\nname = "a"\n[[arms]]\nrule = {name = "fipa",\n step = 2}', ("arms", 1, "rule", "step"))
    5
    """
    places = _Scanner(text).places
    return next((places[tuple(path[:n])] for n in range(len(path), 0, -1) if tuple(path[:n]) in places), None)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.places: dict[Path, int] = {}
        self._arrays: dict[Path, int] = {}
        table: Path = ()
        self._skip(_BLANK)
        while self.at < len(text):
            if text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match[match.lastindex or 0]

    def _note(self, path: Path, at: int) -> None:
        self.places.setdefault(path, self.text.count("\n", 0, at) + 1)

    def _key(self) -> list[str]:
        parts = [self._skip(_PART)]
        while self.text[self.at] == ".":
            self.at += 1
            parts.append(self._skip(_PART))
        return [part[1:-1] if part[0] in "\"'" else part for part in parts]

    def _header(self) -> Path:
        """A line [table] or [[array of tables]]; parts that name an array stand for its last entry."""
        start = self.at
        brackets = 2 if self.text.startswith("[[", self.at) else 1
        self.at += brackets
        path: Path = ()
        keys = self._key()
        self.at += brackets
        for i, key in enumerate(keys):
            path = (*path, key)
            if brackets == 2 and i == len(keys) - 1:
                self._arrays[path] = self._arrays.get(path, -1) + 1
            if path in self._arrays:
                path = (*path, self._arrays[path])
        self._note(path, start)
        return path

    def _pair(self, table: Path) -> None:
        self._skip(re.compile(r"\s*"))
        start = self.at
        path = (*table, *self._key())
        self._note(path, start)
        self.at += 1  # the equals sign
        self._skip(re.compile(r"[ \t]*"))
        self._value(path)

    def _value(self, path: Path) -> None:
        first = self.text[self.at]
        if first in "\"'":
            self._skip(_STRING)
        elif first in "[{":
            self.at += 1
            self._skip(_BLANK)
            place = 0
            while self.text[self.at] not in "]}":
                if first == "{":
                    self._pair(path)
                else:
                    self._note((*path, place), self.at)
                    self._value((*path, place))
                place += 1
                self._skip(_BLANK)
                if self.text[self.at] == ",":
                    self.at += 1
                    self._skip(_BLANK)
            self.at += 1
        else:
            self._skip(_PLAIN)
