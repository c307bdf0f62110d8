"""Experiments that are built on another, and what may be wrong with a warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest

from fipa.config.errors import ConfigError
from fipa.config.load import load
from fipa.config.schema import Experiment, dump


def written(tmp_path: Path, text: str) -> Experiment:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return load(str(file))[1]


def test_tables_are_merged_and_all_else_is_replaced(tmp_path: Path) -> None:
    below, mine = load("digits")[1], written(tmp_path, 'base = "digits"\nseeds = [7]\n[problem]\nclients = 5\n')
    assert mine.seeds == (7,)
    assert mine.problem.clients == 5
    assert mine.problem.partition == below.problem.partition
    assert mine.arms == below.arms
    assert mine.warmup == below.warmup


def test_arms_are_replaced_and_take_the_bases_defaults(tmp_path: Path) -> None:
    mine = written(tmp_path, 'base = "digits"\ncontrol = "only"\n[[arms]]\nname = "only"\nrule = { name = "fedavg" }\n')
    assert [arm.name for arm in mine.arms] == ["only"]
    assert mine.arms[0].local == next(arm.local for arm in load("digits")[1].arms if arm.name == "FedAvg")


def test_a_table_of_another_kind_is_not_merged(tmp_path: Path) -> None:
    mine = written(tmp_path, 'base = "digits"\n[problem]\npartition = { name = "iid" }\n')
    assert dump(mine)["problem"]["partition"] == {"name": "iid"}


def test_single_arms_of_the_base_are_changed_by_name(tmp_path: Path) -> None:
    below = load("fit-sin2")[1]
    mine = written(
        tmp_path,
        'base = "fit-sin2"\n[arms.FedAvg]\nlocal = { steps = 3 }\n[arms."FIPA additive"]\nname = "sums"\n',
    )
    assert [arm.name for arm in mine.arms] == [
        "sums" if arm.name == "FIPA additive" else arm.name for arm in below.arms
    ]
    assert (mine.arms[0].local.steps, mine.arms[0].local.lr) == (3, below.arms[0].local.lr)
    assert mine.arms[1:6] == below.arms[1:6]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("[arms.Fedavg]\nrounds = 3", r"arms.Fedavg: the base has no such arm: did you mean 'FedAvg'"),
        ("[arms]\nFedAvg = 3", r"arms.FedAvg must be a table"),
    ],
)
def test_changes_to_arms_that_are_none(tmp_path: Path, change: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        written(tmp_path, f'base = "fit-sin2"\n{change}\n')


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    mine = written(tmp_path, 'base = "cifar10-cnn23k"\n[warmup]\nrounds = 7\n')
    assert mine.problem.model == "cnn23k"
    assert mine.warmup is not None
    assert (mine.warmup.rounds, mine.warmup.evaluate_every) == (7, 50)


def test_an_unknown_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base: there is no experiment 'digit': did you mean 'digits'\?"):
        written(tmp_path, 'base = "digit"\n')


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("arms.FedAvg.start=11", "the warm-up has only 10 rounds"),
        ('warmup.params="*"', "params is for arms, not for the warm-up"),
        ("warmup.start=1", "start is for arms, not for the warm-up"),
        ('warmup.name="FedAvg"', "an arm is called 'FedAvg', too"),
        ("warmup.rounds=0", "warmup.rounds"),
        ("arms.FedAvg.start=-1", "start"),
        ('problem.partition.name="dirichelt"', "did you mean 'dirichlet'"),
        ('problem.partition.name="iid"', "partition.iid.alpha"),
        ("problem.partition.alhpa=1", "alhpa"),
        ("problem.augment={crop=2, flop=true}", "flop"),
    ],
)
def test_what_is_wrong_is_named(change: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load("digits", [change])


def test_a_start_without_a_warm_up() -> None:
    with pytest.raises(ConfigError, match=r"there is no \[warmup\] to start from"):
        load("demo", ["arms.*.start=3"])


def test_defaults_go_into_the_warm_up_but_for_where_to_start_and_what_to_train() -> None:
    experiment = load("head-cifar100-fedrcl")[1]
    assert experiment.warmup is not None
    assert experiment.warmup.params is None
    assert experiment.arms[0].params == "head.*"
    assert experiment.warmup.participation == experiment.arms[0].participation


def test_averages_are_for_arms() -> None:
    experiment = load("digits", ["defaults.average=3", "arms.FedAvg.average=0"])[1]
    assert experiment.warmup is not None
    assert {arm.name: arm.average for arm in experiment.arms}["FedAvg"] == 0
    assert {arm.average for arm in experiment.arms} == {0, 3}
    assert experiment.warmup.average == 0
    assert {arm.average for arm in experiment.build(False)} == {0, 3}
    with pytest.raises(ConfigError, match="average"):
        load("demo", ["arms.*.average=-1"])
