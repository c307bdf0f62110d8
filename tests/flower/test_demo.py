"""The experiment of `fipa deploy-demo`, in this process; test_deployment.py has it on a real deployment."""

from __future__ import annotations

import pytest

from fipa.flower.demo import ARM, EXPERIMENT, alone, changes


@pytest.mark.long
@pytest.mark.parametrize("clients", [2, 3])
def test_the_demo_is_an_experiment(clients: int) -> None:
    assert alone(EXPERIMENT, ARM, changes(clients, 1)).isfinite().all()
