"""Names that nobody knows: the error says what was meant, wherever a user types one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import IMAGES, TWO_ARMS, write

import fipa
from fipa.config.load import load
from fipa.data import registry
from fipa.errors import FipaError, instead_of
from fipa.launch import choose

NAMES = ["fedavg", "fedavgm", "fipa", "completed-fipa"]


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("fippa", "did you mean 'fipa'? Choose one of fedavg, "),
        ("FIPA", "did you mean 'fipa'? "),
        ("completed_fipa", "did you mean 'completed-fipa'? "),
        ("fedavgg", "did you mean 'fedavg' or 'fedavgm'? "),
        ("completed", "did you mean 'completed-fipa'? "),  # too short to look like it, but it begins so
        ("scaffold", "choose one of fedavg, "),
        ("", "choose one of fedavg, "),
        (3, "choose one of fedavg, "),
    ],
)
def test_what_was_meant(name: object, begins: str) -> None:
    assert instead_of(name, NAMES).startswith(begins)
    assert instead_of(name, NAMES).endswith("one of fedavg, fedavgm, fipa, completed-fipa")


def test_one_choice_is_no_choice_and_odd_names_are_quoted() -> None:
    assert instead_of("x", ["only"]) == "choose only"
    assert instead_of("x", ["FIPA, rank 5", "A"]) == "choose one of 'FIPA, rank 5', A"


def changed(text: str, *overrides: str) -> Callable[[Path], Any]:
    return lambda folder: load(str(write(folder, text)), overrides)


@pytest.mark.parametrize(
    ("act", "meant"),
    [
        (lambda folder: load("fit-sin22"), "'fit-sin22': did you mean 'fit-sin2'"),
        (lambda folder: fipa.run("dgits", out=folder / "run"), "'dgits': did you mean 'digits'?"),
        (lambda folder: choose("digits", arms=["fedavg"]), "'fedavg': did you mean 'FedAvg'"),
        (lambda folder: fipa.run("digits", arms=["SCAFOLD"], out=folder / "run"), "did you mean 'SCAFFOLD'?"),
        (lambda folder: fipa.run("demo", set={"problem.smaples": 3}, out=folder / "run"), "did you mean 'samples'?"),
        (changed(TWO_ARMS.replace("rounds = 2", "ruonds = 2")), "ruonds: unknown key: did you mean 'rounds'?"),
        (changed(TWO_ARMS.replace("rounds = 2", 'control = "a"')), "control: there is no arm 'a': did you mean 'A'?"),
        (changed(TWO_ARMS.replace('"fipa"', '"fippa"')), "rule: there is no rule 'fippa': did you mean 'fipa'?"),
        (changed(TWO_ARMS.replace('"sgd"', '"SGD"')), "local: there is no local rule 'SGD': did you mean 'sgd'?"),
        (changed(TWO_ARMS.replace('"sine"', '"sin"')), "problem: there is no problem 'sin': did you mean 'sine'?"),
        (changed(IMAGES.replace('"iid"', '"idd"')), "problem.partition: there is no 'idd': did you mean 'iid'?"),
        (changed(TWO_ARMS, "arms.B.sketch={solver='kryov'}"), "there is no 'kryov': did you mean 'krylov'?"),
        (changed(TWO_ARMS, "arms.B.sketch.rnak=3"), "sketch.rnak: unknown key: did you mean 'rank'?"),
        (changed(TWO_ARMS, "arms.B.rule.dampin=3"), "rule.dampin: unknown key: did you mean 'damping'?"),
        (changed(TWO_ARMS, "arms.b.rounds=3"), "there is no 'b': did you mean 'B'?"),
        (lambda folder: registry.find("cifra10"), "'cifra10': did you mean 'cifar10'"),
        (
            lambda folder: fipa.sketch(torch.nn.Linear(2, 3), torch.zeros(4, 2), loss="cross-entropy"),  # type: ignore[arg-type]
            "'cross-entropy': did you mean 'cross_entropy'?",
        ),
    ],
)
def test_every_place_for_a_name(act: Callable[[Path], Any], meant: str, tmp_path: Path) -> None:
    with pytest.raises(FipaError) as caught:
        act(tmp_path)
    assert meant in str(caught.value)
