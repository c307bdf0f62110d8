"""What server and clients tell each other: plain dicts that fit a Flower `ConfigRecord`, but for one array.

Every message, either way, has `phase`, `run` and `round`. Besides these (server asks -> client replies):

- `keys`: nothing -> `channel_key`, `mask_key`
- `shares`: `ids`, `channel_keys`, `mask_keys`, `threshold`, `fraction_bits`, `length` -> `ids`, `sealed`, `commitment`
- `masked`: `ids`, `sealed` -> `masked`, an array of uint64 (put it in a Flower `ArrayRecord`)
- `unmask`: `survivors`, `dropped` -> `ids`, `shares`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from fipa.errors import FipaError

Message = dict[str, Any]
Phase = Literal["keys", "shares", "masked", "unmask", "done"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class SecureAggregationError(FipaError):
    """A masked sum cannot be formed, or somebody broke its protocol."""


def header(phase: Phase, run: str, round_number: int) -> Message:
    """The start of a message."""
    return {"phase": phase, "run": run, "round": round_number}


def check_header(message: Mapping[str, Any], expected: Message, sender: str) -> None:
    """Refuse messages of another phase, run or round."""
    for field, value in expected.items():
        if message.get(field) != value:
            raise SecureAggregationError(
                f"{sender} sent a message of {field} {message.get(field)!r}, expected {value!r}: an old message, or "
                "one that was sent twice?"
            )


def read_int(message: Mapping[str, Any], field: str, sender: str) -> int:
    """A whole number that is not negative."""
    value = message.get(field)
    if not _is_count(value):
        raise SecureAggregationError(f"{sender} sent {field} {value!r}, expected a whole number from 0")
    return int(value)  # type: ignore[arg-type]


def read_bytes(message: Mapping[str, Any], field: str, size: int, sender: str) -> bytes:
    """Bytes of a known size."""
    return _checked_bytes(message.get(field), field, size, sender)


def read_bytes_list(message: Mapping[str, Any], field: str, count: int, size: int, sender: str) -> list[bytes]:
    """A list of known length, of bytes of a known size."""
    values = message.get(field)
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)}" if isinstance(values, list) else type(values).__name__
        raise SecureAggregationError(f"{sender} sent {found} instead of {count} {field}")
    return [_checked_bytes(value, field, size, sender) for value in values]


def read_ids(message: Mapping[str, Any], field: str, sender: str) -> list[int]:
    """Ids of clients, none of them twice."""
    values = message.get(field)
    if not isinstance(values, list) or not all(map(_is_count, values)) or len(set(values)) != len(values):
        raise SecureAggregationError(f"{sender} sent {field} that are not a list of different client ids")
    return values


def some(clients: set[int]) -> str:
    """A short readable list of clients."""
    shown = ", ".join(map(str, sorted(clients)[:6]))
    return shown + (f" and {len(clients) - 6} more" if len(clients) > 6 else "")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked_bytes(value: object, field: str, size: int, sender: str) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        found = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise SecureAggregationError(f"{sender} sent {field} with {found}, expected {size} bytes")
    return value
