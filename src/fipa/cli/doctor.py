"""`fipa doctor`."""

from __future__ import annotations

from fipa.cli.common import Json


def doctor(as_json: Json = False) -> None:
    """Tell versions, processor, data sets and extras, and what to do about what is missing."""
