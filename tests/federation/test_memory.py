"""Peaks of resident memory as Linux counts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from federation.cases import run, stage
from fipa import FedAvg
from fipa.federation.memory import MIB, peak_mib, reset_peak

ME = [os.getpid()]

pytestmark = pytest.mark.skipif(
    not os.access(f"/proc/{os.getpid()}/clear_refs", os.W_OK), reason="no /proc of Linux, or it is not writable"
)


def no_such_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert not Path(f"/proc/{ended.pid}").exists()
    return ended.pid


def test_a_large_allocation_is_seen_after_it_is_gone_and_until_the_next_reset() -> None:
    reset_peak(ME)
    before = peak_mib(ME)
    block = os.urandom(1) * (128 * MIB)  # written to, so that it is resident
    during = peak_mib(ME)
    del block
    after = peak_mib(ME)
    assert before is not None
    assert 120 < during - before < 150
    assert after == pytest.approx(during, abs=1.0)
    reset_peak(ME)
    assert peak_mib(ME) < before + 20


def test_memory_that_is_there_before_the_reset_counts() -> None:
    reset_peak(ME)
    before = peak_mib(ME)
    block = os.urandom(1) * (64 * MIB)
    reset_peak(ME)
    assert peak_mib(ME) > before + 56
    assert len(block) == 64 * MIB


def test_processes_are_summed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "b = chr(120).encode() * 2**26; print('ready', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == "ready\n"
        alone = peak_mib([child.pid])
        reset_peak([os.getpid(), child.pid])
        both, mine = peak_mib([os.getpid(), child.pid]), peak_mib(ME)
        child.communicate("\n")
    assert 64 < alone < 110  # with Python itself
    assert both == pytest.approx(mine + 64, abs=30)


def test_no_answer_for_a_process_that_does_not_exist() -> None:
    gone = no_such_process()
    assert peak_mib([gone]) is None
    assert peak_mib([os.getpid(), gone]) is None
    assert peak_mib([]) is None
    reset_peak([gone])  # no error either


def test_rounds_record_it() -> None:
    records = [record for _, record in run(stage(FedAvg(), rounds=2))]
    peaks = [record["peak_memory_mib"] for record in records]
    assert peaks[0] <= peaks[1]
    assert 20 < peaks[0] < 20000
    assert peaks[1] == pytest.approx(peak_mib(ME), rel=0.2)
