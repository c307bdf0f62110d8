"""Local rules by name, as they stand in experiments, and as plain settings, as they travel to clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fipa.clients.descent import SGD, Adam
from fipa.clients.fedrcl import FedRCL
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.gradient import FullGradient
from fipa.clients.moon import Moon
from fipa.clients.rule import LocalRule
from fipa.clients.scaffold import Scaffold
from fipa.errors import FipaError, instead_of

LOCAL_RULES: dict[str, type[LocalRule]] = {
    "adam": Adam,
    "sgd": SGD,
    "scaffold": Scaffold,
    "moon": Moon,
    "fedrcl": FedRCL,
    "gauss-newton": GaussNewton,
    "gradient": FullGradient,
}


def register(name: str, kind: type[LocalRule]) -> None:
    """Make a rule of your own known by a name: in every process that trains with it, server and clients alike.

    Messages can then carry it, and experiments name it: see `fipa.register_rule` for where to call this.

    Parameters
    ----------
    name
        As it stands in settings. Names that are taken are refused, unless by an older version of the same class.
    kind
        A frozen dataclass that inherits from `LocalRule`; its fields are numbers, strings, None, or tuples of these.
    """
    if not (isinstance(kind, type) and issubclass(kind, LocalRule) and dataclasses.is_dataclass(kind)):
        raise FipaError(f"local rule {name!r}: {kind!r} must be a dataclass that inherits from LocalRule")
    if any(field.name == "name" for field in dataclasses.fields(kind)):
        raise FipaError(f"local rule {name!r}: rename its field 'name', which stands for the rule in settings")
    taken = LOCAL_RULES.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise FipaError(f"there is a local rule {name!r} already, {taken.__qualname__}: choose another name")
    LOCAL_RULES[name] = kind


def encode_rule(rule: LocalRule) -> dict[str, Any]:
    """The rule as settings that JSON can hold: its name and its fields."""
    name = next((name for name, kind in LOCAL_RULES.items() if kind is type(rule)), None)
    if name is None:
        kind = type(rule).__name__
        raise FipaError(f"the local rule {kind} has no name: call fipa.register_local_rule(name, {kind}) first")
    fields = dataclasses.fields(rule)  # type: ignore[arg-type]
    return {"name": name} | {field.name: _plain(name, field.name, getattr(rule, field.name)) for field in fields}


def decode_rule(settings: Mapping[str, Any]) -> LocalRule:
    """The rule that was encoded so, also if JSON has made lists of its tuples."""
    name = settings.get("name")
    kind = LOCAL_RULES.get(name) if isinstance(name, str) else None
    if kind is None:
        instead = instead_of(name, LOCAL_RULES)
        raise FipaError(f"there is no local rule {name!r}: {instead}, or register it here as well")
    fields = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    unknown = sorted(settings.keys() - fields - {"name"})
    if unknown:
        instead = instead_of(unknown[0], sorted(fields))
        raise FipaError(f"local rule {name!r}: there is no setting {unknown[0]!r}: {instead}")
    values = {key: _tuples(value) for key, value in settings.items() if key != "name"}
    try:
        return kind(**values)
    except TypeError as error:  # a setting is missing, or is not of its type
        raise FipaError(f"local rule {name!r}: {error}") from error


def _plain(name: str, field: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(name, field, item) for item in value]
    raise FipaError(
        f"local rule {name!r}: {field} is a {type(value).__name__}, which messages cannot hold: "
        "use numbers, strings, None, or tuples of these"
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
