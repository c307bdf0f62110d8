"""What the C library does with memory that is freed; `test_doctor.py` has the rest."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

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
    monkeypatch.delenv(machine.HUGE_PAGES, raising=False)
    assert machine.keep_memory() is False
    assert machine.HUGE_PAGES not in os.environ


HUGE = """
import sys
import torch
from fipa.cli import entry
from fipa.runner import Run

def look(self, watcher):
    tensor = torch.zeros(2**24)
    inside, here = False, tensor.data_ptr() + tensor.nbytes // 2
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first:
            low, high = (int(text, 16) for text in first.split("-"))
            inside = low <= here < high
        elif inside and first == "VmFlags:":
            print("hg" in line.split())
            raise SystemExit(0)

Run.execute = look
sys.argv = ["fipa", "run", "demo", "--quiet", "--out", sys.argv[1]]
entry()
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a system without huge pages")
def test_large_tensors_of_a_run_come_in_huge_pages(tmp_path):
    """Torch asks for them if it was told so before its first tensor."""
    usual = {key: value for key, value in os.environ.items() if key != machine.HUGE_PAGES}
    for told, expected in ((usual, "True"), ({**usual, machine.HUGE_PAGES: "0"}, "False")):
        command = [sys.executable, "-c", HUGE, str(tmp_path / expected)]
        assert subprocess.run(command, capture_output=True, text=True, check=True, env=told).stdout.strip() == expected


def test_a_folder_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    assert machine.folder_in_memory() == tmp_path
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "missing")
    assert machine.folder_in_memory() is None


def test_room_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "memory", lambda: {"available": 5})
    assert machine.room_in_memory(tmp_path) == 5
    assert machine.room_in_memory(tmp_path / "missing") == 0
    monkeypatch.setattr(machine, "memory", dict)  # a system that does not tell
    assert machine.room_in_memory(tmp_path) == 0
