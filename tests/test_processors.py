"""The tests of bits once more, where torch and MKL take this processor for another."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
BITS = [
    "test_processors.py::test_torch_computes_as_it_was_told",
    "aggregation/test_bits.py::test_the_same_bits_in_every_form",
]


def test_torch_computes_as_it_was_told() -> None:
    """So that the settings below are not void."""
    told = os.environ.get("ATEN_CPU_CAPABILITY")
    assert told in (None, torch.backends.cpu.get_cpu_capability().lower())


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the settings are those of x86")
@pytest.mark.parametrize(
    ("processor", "arm"),
    [
        ({"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, "shared basis that turns"),
        ({"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}, "shared basis that turns"),
    ],
    ids=str,
)
def test_the_same_bits_on_imitated_processors(processor: dict[str, str], arm: str, tmp_path: Path) -> None:
    """In a process of its own: the libraries read these variables when they are loaded."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"} | processor
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", tmp_path / "t"]
    bits = [*BITS, f"flower/test_experiment.py::test_engine_and_flower_agree_to_the_last_bit[{arm}]"]
    done = subprocess.run([*command, *(HERE / test for test in bits)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
