"""Rules of one's own by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import fipa
from fipa.aggregation.registry import RULES
from fipa.errors import FipaError


@dataclass(frozen=True)
class Own(fipa.FedAvg):
    share: float = 0.5


class Bare(fipa.FedAvg): ...


@dataclass(frozen=True)
class Named(fipa.FedAvg):
    name: str = "me"


@dataclass(frozen=True)
class NoRule:
    share: float = 0.5


@dataclass(frozen=True)
class Needy(fipa.FedAvg):
    needs = fipa.Sketch  # what is sent, not the plan


def test_a_rule_keeps_its_name() -> None:
    fipa.register_rule("own", Own)
    fipa.register_rule("own", type("Own", (Own,), {"__qualname__": Own.__qualname__}))  # its file was run again
    assert issubclass(RULES["own"], Own)
    assert RULES["own"] is not Own


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("own", lambda cohort, state: None, "must be a dataclass with __call__"),
        ("own", Own(), "must be a dataclass"),
        ("own", NoRule, "must be a dataclass with __call__"),
        ("own", Named, "rename its field 'name'"),
        ("own", Needy, "needs = .*Sketch.* must be a class of plans"),
        ("fedavg", Own, "rule 'fedavg' already, FedAvg"),
    ],
)
def test_what_cannot_be_registered(name: str, kind: Any, message: str) -> None:
    before = dict(RULES)
    with pytest.raises(FipaError, match=message):
        fipa.register_rule(name, kind)
    assert before == RULES
