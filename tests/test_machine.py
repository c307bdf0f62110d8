"""What the C library does with memory that is freed; `test_doctor.py` has the rest."""

import os
import platform
import resource
import subprocess
import sys

import pytest

from fipa import machine

PAGES = """
import resource, sys
from fipa.machine import keep_memory
assert sys.argv[1] == "usual" or keep_memory()
def blocks(): return [bytearray(4 * 2**20) for _ in range(8)]
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks()
before = faults()
for _ in range(5): blocks()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_kept():
    pages = 5 * 8 * 4 * 2**20 // resource.getpagesize()
    found = {
        how: int(subprocess.run([sys.executable, "-c", PAGES, how], capture_output=True, text=True, check=True).stdout)
        for how in ("usual", "kept")
    }
    assert found["kept"] < pages / 20
    assert found["usual"] > 2 * found["kept"]


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.keep_memory() is False


def test_large_tensors_come_in_huge_pages(monkeypatch):
    monkeypatch.delenv(machine.HUGE_PAGES, raising=False)
    told = [
        sys.executable,
        "-c",
        "import os; from fipa import machine; machine.keep_memory(); print(os.environ[machine.HUGE_PAGES])",
    ]
    assert subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip() == "1"
    kept = subprocess.run(told, capture_output=True, text=True, check=True, env={**os.environ, machine.HUGE_PAGES: "0"})
    assert kept.stdout.strip() == "0"  # as the user says


def test_a_folder_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    assert machine.folder_in_memory() == tmp_path
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "missing")
    assert machine.folder_in_memory() is None
