"""Experiments by name, from files, and with overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import ONE_ARM, OWN_PROBLEM, TWO_ARMS, write

from fipa.config.errors import ConfigError
from fipa.config.load import load, names, validate
from fipa.config.schema import Experiment, dump


def loaded(tmp_path: Path, *overrides: str, text: str = TWO_ARMS) -> Experiment:
    return load(str(write(tmp_path, text)), overrides)[1]


# --- where experiments come from ---


def test_names_are_those_of_the_files_without_the_one_for_own_problems() -> None:
    assert {"fit-sin2", "fit-sin4", "fit-sin8"} <= set(names())
    assert "own-problem" not in names()
    assert names() == sorted(names())


def test_labels(tmp_path: Path) -> None:
    assert load("fit-sin2")[0] == "fit-sin2"
    assert load(str(write(tmp_path, ONE_ARM, "some.name.toml")))[0] == "some.name"
    assert load(str(write(tmp_path, OWN_PROBLEM, "mine.py")))[0] == "mine"


def test_a_python_file_brings_the_problem_only(tmp_path: Path) -> None:
    path = write(tmp_path, OWN_PROBLEM, "mine.py")
    experiment = load(str(path))[1]
    assert experiment.title == "mine"
    assert dump(experiment)["problem"] == {"name": "python", "file": str(path)}
    assert len(experiment.arms) >= 2
    assert experiment.control in [arm.name for arm in experiment.arms]


def test_a_python_file_is_found_from_the_toml_not_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", OWN_PROBLEM, "mine.py")
    text = ONE_ARM[ONE_ARM.index("[[arms]]") :] + '[problem]\nname = "python"\nfile = "mine.py"\n'
    path = write(tmp_path / "folder", text)
    monkeypatch.chdir(tmp_path)
    experiment = load(str(path.relative_to(tmp_path)))[1]
    assert dump(experiment)["problem"]["file"] == str(tmp_path / "folder" / "mine.py")
    assert len(experiment.factory()(0).clients) == 2


@pytest.mark.parametrize("name", ["fit-sin3", "absent.toml", "absent.py", "own-problem", "", "fit-sin2/"])
def test_what_does_not_exist(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file|there is no experiment.*fit-sin2"):
        load(name)


def test_defaults_are_for_all_arms_that_do_not_say_otherwise() -> None:
    arms = [{"name": "A"}, {"name": "B", "local": {"name": "gauss-newton"}}]
    rules = {"rule": {"name": "fipa"}, "local": {"name": "adam", "steps": 3}}
    content: dict[str, Any] = {"problem": {"name": "sine"}, "arms": arms, "defaults": rules}
    a, b = validate(content).arms
    assert (a.local.name, b.local.name) == ("adam", "gauss-newton")  # type: ignore[union-attr]
    assert content["defaults"] is rules
    assert content["arms"] == arms


# --- overrides ---


def test_dotted_keys(tmp_path: Path) -> None:
    content = dump(loaded(tmp_path, "problem.samples=7", "arms.B.sketch.adaptive.constant=3", "engine.workers=2"))
    assert content["problem"]["samples"] == 7
    assert content["arms"][1]["sketch"]["adaptive"]["constant"] == 3
    assert content["engine"]["workers"] == 2


@pytest.mark.parametrize(
    ("key", "expected"), [("A", [5, None]), ("1", [None, 5]), ("0", [5, None]), ("*", [5, 5]), ("B", [None, 5])]
)
def test_arms_by_name_number_and_all(tmp_path: Path, key: str, expected: list[int | None]) -> None:
    assert [arm.rounds for arm in loaded(tmp_path, f"arms.{key}.rounds=5").arms] == expected


def test_arms_of_any_name(tmp_path: Path) -> None:
    text = TWO_ARMS.replace('"A"', '"FedAvg, step 2"').replace('"B"', '"FIPA 0.5"')
    assert loaded(tmp_path, "arms.FedAvg, step 2.rounds=5", text=text).arms[0].rounds == 5
    assert loaded(tmp_path, 'arms."FIPA 0.5".rounds=5', text=text).arms[1].rounds == 5


def test_stages_by_number(tmp_path: Path) -> None:
    text = ONE_ARM + "stages = [{ rounds = 1 }, { lr_scale = 0.5 }]\n"
    first, second = loaded(tmp_path, "arms.A.stages.1.lr_scale=0.25", text=text).arms[0].stages
    assert (first.lr_scale, second.lr_scale) == (None, 0.25)


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("title=bare words", ["title"], "bare words"),
        ('title="quoted"', ["title"], "quoted"),
        ("title=a=b", ["title"], "a=b"),
        ("problem.hidden=[3, 2]", ["problem", "hidden"], [3, 2]),
        ("problem={name='mixture2d', boxes=2}", ["problem", "boxes"], 2),
        (" rounds = 9 ", ["rounds"], 9),
        ("arms.0.local.lr=1e-3", ["arms", 0, "local", "lr"], 1e-3),
        ("arms.0.step_control=true", ["arms", 0, "step_control"], True),
        ("figure=fit1d", ["figure"], "fit1d"),
    ],
)
def test_values_are_toml_or_bare_words(tmp_path: Path, override: str, path: list[Any], expected: Any) -> None:
    value: Any = dump(loaded(tmp_path, override))
    for part in path:
        value = value[part]
    assert value == expected


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert loaded(tmp_path, "rounds=3", "rounds=4").rounds == 4
    assert [a.rounds for a in loaded(tmp_path, "arms.*.rounds=3", "arms.B.rounds=4").arms] == [3, 4]
    assert [a.rounds for a in loaded(tmp_path, "arms.B.rounds=4", "arms.*.rounds=3").arms] == [3, 3]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rounds", "write key=value"),
        ("=3", "write key=value"),
        ("rounds.x=3", "rounds is a value, not a table"),
        ("arms.C.rounds=3", "there is no 'C': choose one of A, B"),
        ("arms.2.rounds=3", "there is no '2': choose one of A, B"),
        ("arms.A=3", "A"),
        ("bogus=3", "bogus: unknown key"),
        ("problem.bogus=3", "problem.bogus: unknown key: choose one of name, "),
        ("arms.*.bogus.deep=3", "arms[0].bogus: unknown key"),
        ("problem.samples=many", "got 'many'"),
        ("rounds=0", "greater than or equal to 1"),
        ("rounds=3\ntitle='x'", "rounds"),
        ("problem..samples=3", "problem"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, override)
    assert reason in str(caught.value)


def test_errors_of_overrides_say_so(tmp_path: Path) -> None:
    """The file's line that the key stands on is right: it is not to be changed."""
    with pytest.raises(ConfigError, match=r"--set problem.samples=many"):
        loaded(tmp_path, "problem.samples=many")
