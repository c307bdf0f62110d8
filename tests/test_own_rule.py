"""Rules of a user's own in experiments: by name, checked as ours are, in worker processes and after a resume."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny import ONE_ARM, OWN_PROBLEM, fipa, group, numbers, process, results, rounds_on_disk, wait_until, write

# a rule, the curvature that it needs, and the clients that it has: all three travel to workers, or are needed there
RULES = """\
from dataclasses import dataclass

import torch

import fipa


@fipa.register_curvature
@dataclass(frozen=True)
class HalfPlan(fipa.DiagonalPlan):
    class Half(fipa.DiagonalCurvature):
        kind = "half"

    makes = Half

    def compute(self, model, layout, client, occasion):
        whole = super().compute(model, layout, client, occasion)
        return self.Half(0.5 * whole.values, whole.layout, whole.num_examples)


@dataclass(frozen=True)
class Trimmed:
    trim: int = 0
    step: float = 1.0
    needs = HalfPlan

    def __post_init__(self):
        if self.trim < 0:
            raise fipa.FipaError(f"Trimmed(trim={self.trim}): must not be negative")

    def __call__(self, cohort, state):
        cohort.require(HalfPlan.Half, "Trimmed")
        middle = torch.stack(cohort.deltas).sort(dim=0).values[self.trim :].mean(dim=0)
        change = self.step * middle
        return fipa.Step(change, 1.0, 1.0, [float(delta @ change) for delta in cohort.deltas])


@dataclass(frozen=True)
class Halved(fipa.SGD):
    def __post_init__(self):
        object.__setattr__(self, "lr", self.lr / 2)


fipa.register_rule("trimmed", Trimmed)
fipa.register_local_rule("halved", Halved)
"""

OWN = ONE_ARM.replace("rounds = 2", 'rounds = 6\nfiles = ["rules.py"]')
OWN = OWN.replace('"fedavg"', '"trimmed", trim = 1, step = 0.5').replace('"sgd"', '"halved"')


def test_a_toml_file_names_the_file_of_a_rule(tmp_path: Path) -> None:
    write(tmp_path, RULES, "rules.py")
    done = fipa("run", write(tmp_path, OWN), "--out", tmp_path / "run")
    assert done.code == 0, done.err
    (arm,) = results(tmp_path / "run")["config"]["arms"]
    assert arm["rule"] == {"name": "trimmed", "trim": 1, "step": 0.5}
    shown = fipa("show", tmp_path / "e.toml")
    again = fipa("run", write(tmp_path, shown.out, "shown.toml"), "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert numbers(tmp_path / "again")["arms"] == numbers(tmp_path / "run")["arms"]


def test_a_python_file_brings_problem_rule_and_arms(tmp_path: Path) -> None:
    arms = """
arms = {
    "FedAvg": {"rule": fipa.FedAvg(), "local": {"name": "sgd", "lr": 0.1, "steps": 2}},
    "mine": {"rule": Trimmed(trim=1), "local": {"name": "halved", "lr": 0.1, "steps": 2}},
}
"""
    file = write(tmp_path, OWN_PROBLEM + RULES + arms, "weather.py")
    assert fipa("run", file, "--rounds", 2, "--out", tmp_path / "run").code == 0
    found = results(tmp_path / "run")
    assert list(found["arms"]) == ["FedAvg", "mine"]
    assert found["control"] == "FedAvg"
    assert found["config"]["arms"][1]["rule"]["trim"] == 1
    assert fipa("run", file, "--arm", "mine", "--set", "arms.mine.rule.trim=0", "--out", tmp_path / "b").code == 0
    write(tmp_path, OWN_PROBLEM + "\narms = 3\n", "weather.py")
    assert "arms must be a dict of arms by name" in fipa("run", file).err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("trim = 1", "tirm = 1"),
            "arms[0].rule.tirm: unknown key: did you mean 'trim'? Choose one of name, trim, step",
        ),
        (("trim = 1", 'trim = "one"'), "line 14: arms[0].rule.trim: Input should be a valid integer, got 'one'"),
        (("trim = 1", "trim = -1"), "arms[0]: Trimmed(trim=-1): must not be negative"),
        (('"trimmed"', '"trimed"'), "arms[0].rule: there is no rule 'trimed': did you mean 'trimmed'?"),
        (('"rules.py"', '"ruels.py"'), "line 2: files[0]: "),
        (('files = ["rules.py"]', ""), ", or list the Python file that registers it in `files`"),
        (('["rules.py"]', "3"), "line 2: files: "),
    ],
)
def test_mistakes_are_told_as_for_our_own_rules(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    write(tmp_path, RULES, "rules.py")
    done = fipa("run", write(tmp_path, OWN.replace(*change)), "--out", tmp_path / "run")
    assert done.code == 2
    assert reason in done.err
    assert not (tmp_path / "run").exists()


def test_a_rule_whose_settings_no_file_could_hold(tmp_path: Path) -> None:
    write(tmp_path, RULES.replace("trim: int = 0", "trim: torch.Tensor = None"), "rules.py")
    done = fipa("run", write(tmp_path, OWN), "--out", tmp_path / "run")
    assert done.code == 2
    assert "rule 'trimmed': a field of Trimmed" in done.err


@pytest.mark.long
def test_two_workers_and_a_killed_run_end_at_the_same_bits(tmp_path: Path) -> None:
    """Nor do the workers outlive the run, of which only the first process is killed."""
    write(tmp_path, RULES, "rules.py")
    file = write(tmp_path, OWN)
    assert fipa("run", file, "--out", tmp_path / "whole").code == 0
    stop = f"""
import multiprocessing, os
from fipa.federation.storage import RunFolder
save, left = RunFolder.save, [3]
def counted(*arguments):
    save(*arguments)
    left[0] -= 1
    if left[0] == 0:
        assert len(multiprocessing.active_children()) == 2
        os.kill(os.getpid(), {int(signal.SIGKILL)})
RunFolder.save = counted
"""
    with process("run", file, "--workers", 2, "--out", tmp_path / "run", before=stop) as running:
        assert running.wait() == -signal.SIGKILL
        wait_until(lambda: group(running.pid) == [])
    assert rounds_on_disk(tmp_path / "run") == 3
    started = (tmp_path / "run" / "run.json").read_text("utf-8")
    assert '"workers": 2' in started
    write(tmp_path / "run", started.replace('"workers": 2', '"workers": 1'), "run.json")
    with process("resume", tmp_path / "run") as running:  # a process that has never heard of the rule
        assert running.wait() == 0
    assert numbers(tmp_path / "run")["arms"] == numbers(tmp_path / "whole")["arms"]
    write(tmp_path, RULES + "\n# changed\n", "rules.py")
    assert "rules.py has changed since this run began" in fipa("resume", tmp_path / "run").err
