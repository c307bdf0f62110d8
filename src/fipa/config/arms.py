"""Arms that are written in Python, as the tables that an experiment has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fipa.aggregation.registry import RULES
from fipa.clients.registry import LOCAL_RULES
from fipa.errors import FipaError


def tables(arms: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arms by name, each with the keys of an arm in TOML. Rules and settings may be objects, such as `fipa.FIPA()`.

    Examples
    --------
    >>> import fipa
    >>> tables({"mine": {"rule": fipa.FedAvg(step=0.5), "local": {"name": "adam", "lr": 0.01, "steps": 5}}})
    [{'name': 'mine', 'rule': {'name': 'fedavg', 'step': 0.5}, 'local': {'name': 'adam', 'lr': 0.01, 'steps': 5}}]
    """
    return [{"name": name} | _arm(arm) for name, arm in arms.items()]


def _arm(arm: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("rule", "inner", "local"):
        given = arm.get(key)
        if given is not None and not isinstance(given, Mapping) and _name(given) is None:
            remedy = f"fipa.register_{'local_' if key == 'local' else ''}rule gives it one"
            raise FipaError(f"{key} = {given!r}: experiments know rules by name, and this one has none: {remedy}")
    table = {key: _plain(value) for key, value in arm.items()}
    rule = table.get("rule")
    if isinstance(rule, dict) and (inner := rule.pop("inner", None)) is not None:
        table.setdefault("inner", inner)  # a key of its own in TOML
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    name = _name(value)
    settings = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    return settings if name is None else {"name": name} | settings


def _name(rule: Any) -> str | None:
    """What experiments call the class of a rule, if they know it."""
    return next((name for makers in (RULES, LOCAL_RULES) for name, kind in makers.items() if type(rule) is kind), None)
