import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fipa
from fipa import demo


@pytest.fixture(scope="module")
def short():
    """The first rounds of two arms: the demo itself takes most of a minute."""
    arms = [arm for arm in demo.ARMS if arm.name in ("FedAvg (server step 2)", "FIPA completed")]
    return {arm.name: demo.run(replace(arm, rounds=12), 0, lambda _: None) for arm in arms}


def test_fipa_is_orders_of_magnitude_better_after_a_few_rounds(short):
    fedavg, fipa_arm = (short[name][0]["metric"][-1] for name in ("FedAvg (server step 2)", "FIPA completed"))
    assert fipa_arm < 0.05 * fedavg


def test_curves_have_one_entry_per_round_and_count_bytes(short):
    for name, (curves, fit) in short.items():
        assert {len(values) for values in curves.values()} == {12}
        assert fit.shape == (1024, 1)
        plain = 2 * 901 * 8  # two clients, 901 parameters in float64
        sent = curves["uplink_bytes"][-1]
        rank = curves["rank"][-1]
        assert sent == plain if name.startswith("FedAvg") else plain < sent <= plain + 2 * rank * 902 * 8
        if name == "FIPA completed":  # FedAvg drifts at first
            assert curves["loss"][-1] < curves["loss"][0]


def test_fipa_reaches_1e_5():
    """What the demo promises, for its default seed."""
    (arm,) = (arm for arm in demo.ARMS if arm.name == "FIPA completed")
    assert demo.run(arm, 0, lambda _: None)[0]["metric"][-1] <= 1e-5


def test_same_seed_same_curve():
    arm = demo.Arm("x", lambda k: fipa.CompletedFIPA(damping=0.01), fipa.RelativeThreshold(1e-12, 5), 5, 2)
    first, second = (demo.run(arm, 3, lambda _: None)[0]["metric"] for _ in range(2))
    assert first == second


def test_command_writes_results_and_picture(tmp_path):
    # the real command with its arms cut short
    code = (
        "import dataclasses, fipa.demo as d;"
        "d.ARMS = tuple(dataclasses.replace(a, local_steps=5, rounds=2) for a in d.ARMS);"
        "d.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "next:" in done.stdout
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(record["arms"]) == {arm.name for arm in demo.ARMS}
    assert len(record["arms"]["FIPA completed"]["0"]["metric"]) == 2
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_arms_spend_the_same_local_work():
    assert len({arm.local_steps * arm.rounds for arm in demo.ARMS}) == 1
    assert torch.allclose(demo.target(torch.tensor([0.25])), torch.ones(1))
