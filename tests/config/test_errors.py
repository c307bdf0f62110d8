"""Wrong experiments: every message names the file, the line, the key and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write

from fipa.config.errors import ConfigError, line_of
from fipa.config.load import load

# every table that an experiment may have; {} marks places for one more key
TABLES = """\
title = "all tables"
rounds = 3
{top}

[problem]
name = "sine"
{problem}

[engine]
workers = 1
{engine}

[defaults]
lr_scale = 1.0
{defaults}

[[arms]]
name = "A"
rule = {{ name = "fedavg" }}
local = {{ name = "sgd", steps = 2 }}
{arm}

[[arms]]  # second
name = "B"

[arms.rule]
name = "fedadam"
{rule}

[arms.inner]
name = "fipa"
{inner}

[arms.local]
name = "adam"
steps = 2
{local}

[arms.sketch]
solver = "auto"
{sketch}

[arms.sketch.adaptive]
constant = 1.0
{adaptive}

[arms.step_control]
adapt = "auto"
{step_control}

[arms.adaptive_steps]
most = 3
{adaptive_steps}

[arms.participation]
kind = "full"
{participation}

[arms.faults]
drop = 0.1
{faults}

[[arms.stages]]
rounds = 1
{first_stage}

[[arms.stages]]
lr_scale = 0.5
{second_stage}

[arms.stages.rule]
name = "fipa"
{stage_rule}

[arms.stages.local]
name = "sgd"
steps = 3
{stage_local}

[arms.stages.sketch]
solver = "auto"
{stage_sketch}

[arms.stages.sketch.adaptive]
constant = 1.0
{stage_adaptive}

[arms.stages.step_control]
trials = 2
{stage_control}

[arms.stages.adaptive_steps]
most = 3
{stage_steps}
"""
PLACES = re.findall(r"\{(\w+)\}", TABLES)
KEYS = {
    "top": "",
    "problem": "problem.",
    "engine": "engine.",
    "defaults": "",  # they become the arms'
    "arm": "arms[0].",
    "rule": "arms[1].rule.",
    "inner": "arms[1].inner.",
    "local": "arms[1].local.",
    "sketch": "arms[1].sketch.",
    "adaptive": "arms[1].sketch.adaptive.",
    "step_control": "arms[1].step_control.",
    "adaptive_steps": "arms[1].adaptive_steps.",
    "participation": "arms[1].participation.",
    "faults": "arms[1].faults.",
    "first_stage": "arms[1].stages[0].",
    "second_stage": "arms[1].stages[1].",
    "stage_rule": "arms[1].stages[1].rule.",
    "stage_local": "arms[1].stages[1].local.",
    "stage_sketch": "arms[1].stages[1].sketch.",
    "stage_adaptive": "arms[1].stages[1].sketch.adaptive.",
    "stage_control": "arms[1].stages[1].step_control.",
    "stage_steps": "arms[1].stages[1].adaptive_steps.",
}
A_KEY_OF = {"top": "rounds", "problem": "samples", "engine": "workers", "rule": "beta1", "inner": "damping"}
A_KEY_OF |= {"local": "lr", "sketch": "rank", "adaptive": "max_rank", "step_control": "caution", "faults": "late"}
A_KEY_OF |= {"participation": "count", "adaptive_steps": "constant", "first_stage": "lr_scale", "arm": "stages"}
A_KEY_OF |= {"second_stage": "lr_scale", "stage_rule": "cutoff", "stage_local": "momentum", "stage_sketch": "width"}
A_KEY_OF |= {"stage_adaptive": "max_rank", "stage_control": "boldness", "stage_steps": "constant", "defaults": "faults"}


def message(tmp_path: Path, text: str, *overrides: str) -> str:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(str(path), overrides)
    said = str(caught.value)
    assert str(path) in said
    return said.replace(str(path), "FILE")


def line(text: str, part: str) -> int:
    """Where some text stands."""
    (found,) = (number for number, content in enumerate(text.splitlines(), start=1) if part in content)
    return found


def tables(**lines: str) -> str:
    return TABLES.format(**{place: lines.get(place, "") for place in PLACES})


def test_the_tables_themselves_are_right(tmp_path: Path) -> None:
    assert [arm.name for arm in load(str(write(tmp_path, tables())))[1].arms] == ["A", "B"]
    assert set(PLACES) == set(KEYS) == set(A_KEY_OF)


SPELLINGS = ["Bogus", "bo-gus", "b0gus", "int", '"bo gus"']


@pytest.mark.parametrize(
    ("place", "key"),
    [(place, "bogus") for place in PLACES] + [(place, key) for place in ("problem", "faults") for key in SPELLINGS],
)
def test_an_unknown_key_is_an_error_in_every_table(tmp_path: Path, place: str, key: str) -> None:
    text = tables(**{place: f"{key} = 1"})
    said = message(tmp_path, text)
    (sentence,) = (s for s in said.splitlines() if "unknown key" in s)
    assert f"{KEYS[place]}{key.strip(chr(34))}: unknown key" in sentence
    assert sentence.startswith(f"FILE, line {line(text, f'{key} = 1')}: ")
    allowed = sentence.lower().partition("choose one of ")[2].split(", ")
    assert A_KEY_OF[place] in allowed
    assert len(said.splitlines()) == 1, "one mistake, one sentence"


@pytest.mark.parametrize(
    ("place", "text", "key", "reason"),
    [
        ("problem", 'samples = "many"', "problem.samples", "integer"),
        ("problem", "samples = 2.5", "problem.samples", "integer"),
        ("problem", 'samples = "20"', "problem.samples", "integer"),
        ("problem", "samples = true", "problem.samples", "integer"),
        ("problem", 'hidden = "abc"', "problem.hidden", ""),
        ("top", "seeds = [0, -1]", "seeds[1]", "greater than or equal to 0"),
        ("top", 'figure = "pie"', "figure", "fit1d"),
        ("engine", "threads = 0", "engine.threads", "greater than or equal to 1"),
        ("rule", "lr = nan", "arms[1].rule.lr", "finite"),
        ("inner", 'damping = "big"', "arms[1].inner.damping", "number"),
        ("local", "lr = []", "arms[1].local.lr", "number"),
        ("sketch", 'route = "scenic"', "arms[1].sketch.route", "matrix_free"),
        ("sketch", "oversampling = -1", "arms[1].sketch.oversampling", "greater than or equal to 0"),
        ("adaptive", "max_rank = 0.5", "arms[1].sketch.adaptive.max_rank", "integer"),
        ("step_control", "trials = []", "arms[1].step_control.trials", "integer"),
        ("faults", "late = []", "arms[1].faults.late", "number"),
        ("arm", 'step_control = "perhaps"', "arms[0].step_control", ""),
        ("arm", 'centralised = "no"', "arms[0].centralised", "boolean"),
        ("arm", "participation = 3", "arms[0].participation", ""),
        ("arm", "faults = { drop = [] }", "arms[0].faults.drop", "number"),
        ("arm", 'participation = { kind = "some" }', "arms[0].participation.kind", "uniform"),
        ("arm", 'sketch = { rank = "half" }', "arms[0].sketch.rank", "full"),
        ("arm", 'sketch = { solver = "magic" }', "arms[0].sketch.solver", "krylov"),
        ("arm", "sketch = { rank = 3, threshold = 0.1 }", "arms[0].sketch", "rank and threshold exclude each other"),
        ("arm", "stages = [{ rounds = 0 }]", "arms[0].stages[0].rounds", "greater than or equal to 1"),
        ("arm", "lr_scale = -1", "arms[0].lr_scale", "greater than 0"),
    ],
)
def test_wrong_values(tmp_path: Path, place: str, text: str, key: str, reason: str) -> None:
    whole = tables(**{place: text})
    said = message(tmp_path, whole)
    sentences = [s for s in said.splitlines() if s.startswith(f"FILE, line {line(whole, text)}: {key}: ")]
    assert any(reason in sentence for sentence in sentences), said


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("rule", "lr = -1.0"),
        ("inner", "damping = -1.0"),
        ("local", "lr = -0.1"),
        ("faults", "late = -0.1"),
        ("step_control", "trials = -1"),
        ("adaptive", "max_rank = -2"),
        ("adaptive_steps", "constant = -1.0"),
        ("stage_rule", "damping = -1.0"),
        ("stage_local", "lr = -0.1"),
        ("stage_control", "caution = -2.0"),
    ],
)
def test_negative_values_are_found_before_the_run_and_near_their_line(tmp_path: Path, place: str, text: str) -> None:
    whole = tables(**{place: text})
    said = message(tmp_path, whole)
    key = text.split()[0]
    assert key in said
    where = re.match(r"FILE, line (\d+): ", said)
    assert where
    assert line(whole, "[[arms]]  # second") <= int(where[1]) <= line(whole, text)


@pytest.mark.parametrize("table", ["rule", "inner", "local", "problem"])
def test_a_misspelt_name_lists_the_right_ones(tmp_path: Path, table: str) -> None:
    names = {"rule": "fedadam", "inner": "fipa", "local": "adam", "problem": "sine"}
    head, _, tail = tables().partition(f"[{'' if table == 'problem' else 'arms.'}{table}]\n")
    text = f"{head}[{'' if table == 'problem' else 'arms.'}{table}]\n" + tail.replace(names[table], "fippa", 1)
    said = message(tmp_path, text)
    key = "problem" if table == "problem" else f"arms[1].{table}"
    where = re.match(rf"FILE, line (\d+): {re.escape(key)}(\.name)?: ", said)
    assert where
    assert line(text, "fippa") - 1 <= int(where[1]) <= line(text, "fippa")
    assert re.search(r"there is no (rule|local rule|problem) 'fippa'", said)
    assert names[table] in said.lower().partition("choose one of ")[2].split(", ")


@pytest.mark.parametrize("table", ["rule", "inner", "local", "problem"])
def test_a_missing_name_lists_what_there_is(tmp_path: Path, table: str) -> None:
    header = f"[{table}]" if table == "problem" else f"[arms.{table}]"
    text = re.sub(rf"({re.escape(header)}\n)name = .*\n", r"\1", tables(), count=1)
    said = message(tmp_path, text)
    key = "problem" if table == "problem" else f"arms[1].{table}"
    assert said.startswith(f"FILE, line {line(text, header)}: {key}: needs a name, one of ")
    assert {"rule": "foof", "inner": "foof", "local": "gauss-newton", "problem": "mixture2d"}[table] in said


def test_an_arm_without_a_name(tmp_path: Path) -> None:
    text = tables().replace('name = "B"\n', "")
    said = message(tmp_path, text)
    assert said == f"FILE, line {line(text, '# second')}: arms[1].name: is missing"


def test_arms_without_rules_name_the_table_for_all_arms(tmp_path: Path) -> None:
    said = message(tmp_path, '[problem]\nname = "sine"\n\n[[arms]]\nname = "A"\n')
    assert said == "FILE, line 4: arms[0]: needs a rule and a local rule, here or in [defaults]"


def test_two_arms_of_one_name(tmp_path: Path) -> None:
    text = tables().replace('name = "B"', 'name = "A"  # again')
    said = message(tmp_path, text)
    assert "two arms are called 'A'" in said
    assert f"line {line(text, '# again')}" in said


@pytest.mark.parametrize("key", ["control", "reference"])
def test_control_and_reference_are_arms(tmp_path: Path, key: str) -> None:
    text = tables(top=f'{key} = "C"')
    said = message(tmp_path, text)
    assert f"{key}: there is no arm 'C': choose one of A, B" in said
    assert said.startswith(f"FILE, line {line(text, 'C')}: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seeds = []", "one seed"),
        ("seeds = [1, 1]", "twice"),
    ],
)
def test_seeds(tmp_path: Path, text: str, reason: str) -> None:
    whole = tables(top=text)
    said = message(tmp_path, whole)
    assert reason in said
    assert said.startswith(f"FILE, line {line(whole, 'seeds')}: ")


def test_syntax_errors_name_the_line(tmp_path: Path) -> None:
    assert "line 3" in message(tmp_path, 'title = "x"\nrounds = 2\n[problem\nname = "sine"\n')


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_bytes(b'title = "\xff"')
    with pytest.raises(ConfigError, match="UTF-8"):
        load(str(path))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ('inner = { name = "fedavg" }', "inner belongs to"),
        ("sketch = { adaptive = {} }", "need eigen-sketches"),
        ("damping_decay = 0.5", "has no damping"),
        ("stages = [{}, {}]", "stage 0 needs rounds"),
        ('rule = { name = "fipa" }\nadaptive_steps = {}', "needs sketch.adaptive"),
        ('rule = { name = "additive-fipa" }\nfaults = { late = 0.5 }', "use_late = false"),
        ('rule = { name = "additive-fipa" }\nparticipation = { kind = "weighted", count = 1 }', "weighted"),
        ('local = { name = "sgd" }', "steps or epochs"),
        ('rule = { name = "fedavg" }\nstep_control = { adapt = "damping" }', "no damping to adapt"),
    ],
)
@pytest.mark.parametrize("stage", [False, True])
def test_settings_that_do_not_go_together(tmp_path: Path, settings: str, reason: str, stage: bool) -> None:
    """In an arm, and in the second of an arm's stages."""
    head = '[problem]\nname = "sine"\n[[arms]]\nname = "A"\n'
    rules = {"rule": 'rule = { name = "fedavg" }\n', "local": 'local = { name = "sgd", steps = 1 }\n'}
    own = dict(part.split(" = ", 1) for part in settings.splitlines())
    whole = head + "".join(text for key, text in rules.items() if stage or key not in own)
    of_arm = {key: value for key, value in own.items() if key in ("faults", "participation", "stages")}
    if stage:
        whole += "".join(f"{key} = {value}\n" for key, value in of_arm.items())
        if "stages" not in own:
            whole += "[[arms.stages]]\nrounds = 1\n[[arms.stages]]\n"
            whole += "".join(f"{key} = {value}\n" for key, value in own.items() if key not in of_arm)
    else:
        whole += settings + "\n"
    said = message(tmp_path, whole)
    assert reason in said
    assert said.startswith("FILE, line ")


# --- lines ---

WRITTEN = '''\
title = "x"  # rounds = 1
description = """
rounds = 2
[problem]
samples = 3
"""
"rounds" = 4

problem = { name = "sine", samples = 5 }

[[arms]]  # first
name = "A"
rule.name = "fipa"
rule.damping = 1.0

[[ arms ]]
name = "B"
stages = [
  { rounds = 1, rule = { name = "fedavg" } },
  # step = 7
  { rounds = 2, rule = { name = "fipa", step = 2.0 } },
]
  [ arms . "local" ]
  'lr' = 0.1

[[arms.faults]]
drop = 1

[[arms]]
name = "C"
[[arms.stages]]
rounds = 8
[[arms.stages]]
[arms.stages.rule]
step = 9
'''


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("title",), 1),
        (("rounds",), 7),
        (("problem",), 9),
        (("problem", "samples"), 9),
        (("problem", "absent"), 9),
        (("arms", 0), 11),
        (("arms", 0, "name"), 12),
        (("arms", 0, "rule", "name"), 13),
        (("arms", 0, "rule", "damping"), 14),
        (("arms", 0, "local"), 11),
        (("arms", 1), 16),
        (("arms", 1, "stages", 0, "rule"), 19),
        (("arms", 1, "stages", 0, "rounds"), 19),
        (("arms", 1, "stages", 1, "rounds"), 21),
        (("arms", 1, "stages", 1, "rule", "name"), 21),
        (("arms", 1, "stages", 1, "rule", "step"), 21),
        (("arms", 1, "local"), 23),
        (("arms", 1, "local", "lr"), 24),
        (("arms", 2, "name"), 30),
        (("arms", 2, "stages", 0, "rounds"), 32),
        (("arms", 2, "stages", 1), 33),
        (("arms", 2, "stages", 1, "rule", "step"), 35),
        (("absent",), None),
    ],
)
def test_line_of(path: tuple[str | int, ...], expected: int | None) -> None:
    assert line_of(WRITTEN, path) == expected


def test_arms_in_one_array(tmp_path: Path) -> None:
    rules = 'rule = { name = "fedavg" }, local = { name = "sgd", steps = 1 }'
    text = f"""\
arms = [
  {{ name = "A", {rules} }},
  {{ name = "B", {rules}, bogus = 1 }},
  {{ name = "C", {rules.replace("sgd", "sdg")} }},
]
problem = {{ name = "sine" }}
"""
    said = message(tmp_path, text).splitlines()
    assert [s.partition(" ")[2].partition(": ")[0] for s in said] == ["line 3", "line 4"]


NAMES = st.sampled_from(["a", "b", "c-d", "e_1"])


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[tuple[str | int, ...], int]]:
    """A TOML text, and where each of its keys stands."""
    lines: list[str] = []
    places: dict[tuple[str | int, ...], int] = {}

    def noise() -> None:
        lines.extend(draw(st.lists(st.sampled_from(["", "# a = 1", "  # [[t]]"]), max_size=2)))

    def keys(table: tuple[str | int, ...]) -> None:
        for name in draw(st.lists(NAMES, unique=True, max_size=3)):
            noise()
            quoted = draw(st.sampled_from([name, f'"{name}"', f"'{name}'"]))
            indent = draw(st.sampled_from(["", "  "]))
            kind = draw(st.sampled_from(["value", "inline", "dotted", "array"]))
            if kind == "value":
                lines.append(f"{indent}{quoted} = 1  # b = 2")
                places[(*table, name)] = len(lines)
            elif kind == "inline":
                lines.append(f"{indent}{quoted} = {{ x = 1, y = {{ z = 2 }} }}")
                places.update({(*table, name, *rest): len(lines) for rest in ((), ("x",), ("y",), ("y", "z"))})
            elif kind == "dotted":
                lines.append(f"{indent}{quoted}.k = 1")
                places[(*table, name, "k")] = len(lines)
            else:
                lines.extend([f"{indent}{quoted} = [", "  1,", "  2,", "]"])
                places[(*table, name)] = len(lines) - 3

    keys(())
    for name in draw(st.lists(st.sampled_from(["t", "u"]), unique=True)):
        for i in range(draw(st.integers(1, 3))):
            noise()
            lines.append(draw(st.sampled_from([f"[[{name}]]", f"[[ {name} ]]", f'[["{name}"]] # x'])))
            places[name, i] = len(lines)
            keys((name, i))
            if draw(st.booleans()):
                lines.append(f"[{name}.sub]")
                places[name, i, "sub"] = len(lines)
                keys((name, i, "sub"))
    return "\n".join(lines), places


@given(document=documents())
def test_lines_of_written_documents(document: tuple[str, dict[tuple[str | int, ...], int]]) -> None:
    text, places = document
    for path, expected in places.items():
        assert line_of(text, path) == expected
        assert line_of(text, (*path, "absent")) == expected
