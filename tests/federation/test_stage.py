"""Which rules a round follows."""

from __future__ import annotations

import pytest
import torch

from federation.cases import run, stage
from fipa import FIPA, CompletedFIPA, FedAvg, FedAvgM, FipaError, PrivateFedAvg
from fipa.curvature.sketch import SketchPlan
from fipa.federation.arm import Arm
from fipa.federation.stage import floor_of, stage_at


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
    assert [decaying.rule_at(place, 0).damping for place in range(3)] == pytest.approx([0.8, 0.4, 0.2])
    assert decaying.rule_at(2, 0).step == 0.9
    constant = stage(FIPA(damping=0.8))
    assert constant.rule_at(7, 0) is constant.rule


def test_rules_without_damping_keep_their_own() -> None:
    """No decay is asked for, so the rule need not have a damping."""
    assert stage(FedAvg()).rule_at(3, 1) == FedAvg()


@pytest.mark.parametrize(
    ("every", "rounds", "expected"),
    [(1, 3, [0, 1, 2]), (2, 5, [1, 3, 4]), (2, 4, [1, 3]), (3, 2, [1]), (10, 1, [0])],
)
def test_evaluated_every_so_often_and_at_the_end(every: int, rounds: int, expected: list[int]) -> None:
    one = stage(FedAvg(), rounds=rounds, evaluate_every=every)
    assert [place for place in range(rounds) if one.evaluates(place)] == expected


def test_rounds_between_evaluations_are_at_least_one() -> None:
    with pytest.raises(FipaError, match="evaluate_every must be at least 1, got 0"):
        stage(FedAvg(), evaluate_every=0)


def test_rounds_that_are_not_evaluated_have_no_metric_and_are_otherwise_the_same() -> None:
    plain, sparse = (run(Arm("a", (stage(FedAvg(), rounds=3, evaluate_every=n), stage(FIPA(0.1), None, 2,
                     SketchPlan(), evaluate_every=n)))) for n in (1, 2))  # fmt: skip
    assert [record["metric"] is not None for _, record in sparse] == [False, True, True, False, True]
    for (state, record), (same, reference) in zip(sparse, plain, strict=True):
        assert torch.equal(state.theta, same.theta)
        assert record["metric"] in (None, reference["metric"])
        assert record["loss"] == reference["loss"]


def test_runs_do_not_share_the_noise_of_a_private_rule() -> None:
    private = stage(PrivateFedAvg(seed=3))
    rules = [private.rule_at(0, seed) for seed in (0, 0, 1)]
    assert rules[0] == rules[1] != rules[2]
    assert stage(PrivateFedAvg()).rule_at(0, 5) == PrivateFedAvg()  # from the operating system


def test_the_floor_that_orders_carry() -> None:
    assert floor_of(FIPA(floor=0.3)) == floor_of(FedAvgM(0.9, inner=FIPA(floor=0.3))) == 0.3
    assert floor_of(FIPA()) == floor_of(FedAvg()) == floor_of(CompletedFIPA(0.5)) == floor_of(FedAvgM(0.9)) == 0.0
