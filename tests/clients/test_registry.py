"""Rules by name and as settings, and the documented example of a rule of one's own."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fipa import FipaError
from fipa.clients.descent import SGD, Adam
from fipa.clients.fedrcl import FedRCL
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.gradient import FullGradient
from fipa.clients.moon import Moon
from fipa.clients.registry import LOCAL_RULES, decode_rule, encode_rule, register
from fipa.clients.rule import LocalRule
from fipa.clients.scaffold import Scaffold
from fipa.federation.messages import Order
from fipa.federation.site import Site

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_client_rule.py"
RULES = [
    SGD(lr=0.1, epochs=2, batch=16, momentum=0.9, clip=3.0),
    Adam(steps=7, lr_decay=0.3, weight_decay=1 / 3),
    Scaffold(lr=1e-300, steps=1, proximal=0.1),
    Moon(lr=0.1, steps=1, weight=2.0, levels=("head", "body.3")),
    FedRCL(lr=0.1, steps=1, kind="supervised", pairs="least", levels=("relu",)),
    GaussNewton(damping=0.1, cutoff=1e-9),
    FullGradient(augment=True),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_come_back_from_json(rule: LocalRule) -> None:
    settings = json.loads(json.dumps(encode_rule(rule)))
    assert LOCAL_RULES[settings["name"]] is type(rule)
    found = decode_rule(settings)
    assert found == rule
    assert hash(found) == hash(rule)  # tuples are tuples


def test_all_rules_are_tried() -> None:
    assert {type(rule) for rule in RULES} == set(LOCAL_RULES.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "feddyn"}, "no local rule 'feddyn': choose one of adam, sgd"),
        ({"steps": 1}, "no local rule None"),
        ({"name": ["sgd"]}, "no local rule"),
        ({"name": "sgd", "steps": 1, "rate": 2}, "'sgd': there is no setting 'rate': choose one of batch, bfloat16"),
        ({"name": "gauss-newton", "whole": True}, "no setting 'whole'"),
        ({"name": "sgd", "steps": 1, "lr": "fast"}, "'sgd'"),
        ({"name": "sgd"}, "SGD: give steps or epochs"),
    ],
)
def test_settings_that_are_no_rule(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FipaError, match=message):
        decode_rule(settings)


@dataclass(frozen=True)
class Own(SGD):
    pairs: tuple[tuple[int, float], ...] = ()
    anything: Any = None


def test_a_rule_of_ones_own() -> None:
    rule = Own(steps=1, pairs=((1, 0.5), (2, 0.25)))
    with pytest.raises(FipaError, match=r"Own has no name: call fipa.register_local_rule\(name, Own\) first"):
        encode_rule(rule)
    register("own", Own)
    register("own", Own)
    assert decode_rule(json.loads(json.dumps(encode_rule(rule)))) == rule
    with pytest.raises(FipaError, match="'own': anything is a Tensor, which messages cannot hold"):
        encode_rule(replace(rule, anything=torch.zeros(1)))


class Bare(LocalRule): ...


@dataclass(frozen=True)
class Named(SGD):
    name: str = "me"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("own", dict, "must be a dataclass that inherits from LocalRule"),
        ("own", Bare, "must be a dataclass"),
        ("own", SGD(steps=1), "must be a dataclass"),
        ("own", Named, "rename its field 'name'"),
        ("sgd", Own, "local rule 'sgd' already, SGD"),
    ],
)
def test_what_cannot_be_registered(name: str, kind: Any, message: str) -> None:
    before = dict(LOCAL_RULES)
    with pytest.raises(FipaError, match=message):
        register(name, kind)
    assert before == LOCAL_RULES


# --- the documented example ---


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_client_rule", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_examples_rule_finds_the_best_model_and_fedavg_does_not(example: ModuleType) -> None:
    assert example.run(SGD(lr=0.1, steps=10)) > 1e-2
    assert example.run(example.Scaffnew(lr=0.1, steps=10)) < 1e-12


def test_the_examples_rule_travels_and_its_memory_is_all_that_lasts(example: ModuleType) -> None:
    """Clients trained by a decoded rule, each from what it kept, in sites that have never seen them."""
    rule = example.Scaffnew(lr=0.1, steps=10)
    settings = json.loads(json.dumps(encode_rule(rule)))
    assert settings["name"] == "scaffnew"
    theta, memories = torch.zeros(3, dtype=torch.float64), {}
    for k in (1, 2, 3):
        order = Order(k, theta, decode_rule(settings), memories=memories)
        replies = [Site(example.problem(0), 0).work((m,), order)[0] for m in range(3)]
        total = sum(reply.update.num_examples for reply in replies)
        theta = theta + sum(reply.update.num_examples / total * reply.update.delta for reply in replies)
        memories = {m: reply.memory for m, reply in enumerate(replies)}
        # the shifts that follow from what comes back add up to nothing: they only share out
        shifts = [r.update.num_examples / total * example.shift(theta, r.memory) for r in replies]
        assert float(sum(shifts).norm()) < 1e-13 * sum(float(one.norm()) for one in shifts)
    torch.testing.assert_close(
        torch.tensor(example.run(rule, 3)), torch.tensor(Site(example.problem(0), 0).problem.evaluate(theta))
    )
