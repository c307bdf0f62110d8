"""`fipa doctor`, and what is said where an extra is missing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tiny import fipa as command

import fipa
from fipa import doctor, machine
from fipa.errors import EXTRAS
from fipa.progress import TensorBoard


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch):
    """Make a module one that is not installed."""

    def absent(*modules: str) -> None:
        for module in modules:
            for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
                monkeypatch.delitem(sys.modules, name)
            monkeypatch.setitem(sys.modules, module, None)

    return absent


def test_all_that_is_found(tmp_path: Path) -> None:
    done = command("doctor", "--json", "--data", tmp_path)
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["usable"], found["why"]) == (True, None)
    assert found["versions"]["fipa"] == fipa.__version__
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory"]["total"] >= found["machine"]["memory"]["available"] > 2**20
    assert found["torch"]["threads"] >= 1
    assert found["torch"]["instructions"]
    assert found["data"]["root"] == str(tmp_path.resolve())
    assert found["data"]["sets"]["digits"]  # comes with us
    assert found["data"]["sets"]["cifar10"] is None
    assert set(found["extras"]) == set(EXTRAS) == set(doctor.USES)
    assert found["flower"]["usable"]
    assert any("fipa data get NAME" in sentence for sentence in found["advice"])


def test_words_say_the_same(tmp_path: Path) -> None:
    done = command("doctor", "--data", tmp_path)
    assert (done.code, done.err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in done.out.partition("what to do:")[0].splitlines())
    assert list(rows) == ["versions", "machine", "torch", "data", "extras", "Flower", "browser", "usable"]
    assert f"fipa {fipa.__version__}, python" in rows["versions"]
    assert rows["usable"] == "yes"
    assert rows["data"].startswith("digits")


def test_what_is_missing_is_named_with_its_remedy(hide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    hide("numba", "PIL", "opacus", "flwr", *(name for name in sys.modules if name.startswith("fipa.flower")))
    found = doctor.examine()
    assert found["usable"]
    assert [name for name, state in found["extras"].items() if not state["installed"]] == [
        "images", "flower", "fast", "privacy",
    ]  # fmt: skip
    assert found["browser"] == {"usable": False, "chromium": None, "chromedriver": None}
    assert not found["flower"]["usable"]
    advice = "\n".join(found["advice"])
    for extra in ("images", "flower", "fast", "privacy"):
        assert f"pip install 'fipa[{extra}]'" in advice
    assert "reading JPEG files needs pillow: " in advice
    assert "apt install chromium chromium-driver" in advice


def test_a_core_that_does_not_compute_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fipa, "aggregate", lambda *_: 1 / 0)
    done = command("doctor")
    assert done.code == 1
    assert "the library does not compute: ZeroDivisionError: division by zero" in done.out


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cores", lambda: 0)
    assert any("OMP_NUM_THREADS" in sentence for sentence in doctor.examine()["advice"])


def test_machines_that_tell_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(machine, "Path", lambda name: Path("nowhere"))
    assert machine.processor()
    assert set(machine.memory()) <= {"total"}
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sysconf_names", raising=False)
    assert machine.cores() == os.cpu_count()
    assert machine.memory() == {}


# --- extras ---


def test_flower_names_its_extra(hide) -> None:
    hide("flwr", "fipa.flower")
    del sys.modules["fipa.flower"]
    with pytest.raises(ModuleNotFoundError, match=r"^fipa\.flower needs flwr: pip install 'fipa\[flower\]'$"):
        exec("import fipa.flower")


def test_the_others_name_theirs(hide, tmp_path: Path) -> None:
    hide("tensorboard", "torch.utils.tensorboard", "opacus")
    with pytest.raises(fipa.FipaError, match=r"^--tensorboard needs tensorboard: pip install 'fipa\[tensorboard\]'$"):
        TensorBoard(tmp_path)
    with pytest.raises(fipa.FipaError, match=r"^privacy accounting needs opacus: pip install 'fipa\[privacy\]'$"):
        fipa.privacy.epsilon(1.0, 1.0, 1, 1e-3)
