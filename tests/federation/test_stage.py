"""Which rules a round follows."""

from __future__ import annotations

import pytest

from federation.cases import stage
from fipa import FIPA, FedAvg, FipaError
from fipa.federation.stage import stage_at


def test_stages_follow_each_other() -> None:
    first, second = stage(FedAvg(), rounds=2), stage(FIPA(), rounds=3)
    found = [stage_at((first, second), k) for k in range(1, 6)]
    assert [place for _, place in found] == [0, 1, 0, 1, 2]
    assert [s is first for s, _ in found] == [True, True, False, False, False]


def test_rounds_beyond_the_last_stage() -> None:
    with pytest.raises(FipaError, match="round 3 is beyond the last stage"):
        stage_at((stage(FedAvg(), rounds=2),), 3)


def test_damping_decays_within_the_stage() -> None:
    decaying = stage(FIPA(damping=0.8, step=0.9), damping_decay=0.5)
    assert [decaying.rule_at(place).damping for place in range(3)] == pytest.approx([0.8, 0.4, 0.2])
    assert decaying.rule_at(2).step == 0.9
    constant = stage(FIPA(damping=0.8))
    assert constant.rule_at(7) is constant.rule


def test_rules_without_damping_keep_their_own() -> None:
    """No decay is asked for, so the rule need not have a damping."""
    assert stage(FedAvg()).rule_at(3) == FedAvg()
