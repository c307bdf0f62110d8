"""Limits for rules and clients that nobody has tuned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.fipa import CompletedFIPA
from fipa.aggregation.rule import aggregator
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.sketch import Sketch, SketchPlan
from fipa.federation.safety import FEWEST, SLOWEST, Pace, Safety, planned
from fipa.layout import Layout

THETA = torch.ones(2, dtype=torch.float64)
LAYOUT = Layout(("w",), ((2,),))


def sketch(direction: list[float], value: float) -> Sketch:
    u = torch.tensor(direction, dtype=torch.float64)
    return Sketch(u[:, None] / u.norm(), torch.tensor([value], dtype=torch.float64), LAYOUT)


def test_a_step_is_no_longer_than_the_longest_update() -> None:
    """Two clients whose curvatures point almost the same way: the rule extrapolates far beyond both."""
    updates = [
        ClientUpdate(torch.tensor([1.0, 0.0], dtype=torch.float64), 1, sketch([1.0, 0.0], 5.0), 0),
        ClientUpdate(torch.tensor([-1.0, 0.0], dtype=torch.float64), 1, sketch([1.0, 0.1], 5.0), 1),
    ]
    apply: Any = aggregator(THETA, updates)
    rule = CompletedFIPA(damping=1e-6)
    free = apply(rule, {})
    assert free.diagnostics.step_length > 5
    held = Safety(longest_step=1.5).limited(apply, THETA, updates)(rule, {})
    assert held.diagnostics.step_length == pytest.approx(1.5)
    assert float((held.theta - THETA).norm()) == pytest.approx(1.5)
    parallel = torch.nn.functional.cosine_similarity(held.theta - THETA, free.theta - THETA, dim=0)
    assert float(parallel) == pytest.approx(1.0)
    mean = Safety().limited(apply, THETA, updates)(FedAvg(), {})
    assert torch.equal(mean.theta, apply(FedAvg(), {}).theta)  # what is short stays as it is, to the last bit
    assert Safety(longest_step=None).limited(apply, THETA, updates) is apply


def test_clients_learn_slower_after_rounds_without_a_step() -> None:
    safety, pace = Safety(slower=4.0), Pace()
    pace = safety.after(pace, trials=4, accepted=False, metrics={}, plan=None)
    assert pace.lr_scale == 0.25
    assert safety.after(pace, trials=2, accepted=True, metrics={}, plan=None).lr_scale == 0.25
    assert safety.after(pace, trials=1, accepted=True, metrics={}, plan=None).lr_scale == 0.5
    assert safety.after(Pace(0.9), 1, True, {}, None).lr_scale == 1.0
    assert safety.after(Pace(0.5), 0, False, {}, None).lr_scale == 0.5  # nobody was there: no verdict
    assert safety.after(Pace(SLOWEST), 4, False, {}, None).lr_scale == SLOWEST


@pytest.mark.parametrize(
    ("training", "curvature", "expected"),
    [(1.0, 0.9, None), (1.0, 2.0, 12), (1.0, 100.0, 8), (0.01, 0.2, None), (0.1, 0.3, 8)],
)
def test_curvature_takes_no_longer_than_training(training: float, curvature: float, expected: int | None) -> None:
    metrics = {"train-seconds": training, "curvature-seconds": curvature}
    plan = SketchPlan(rank=5, max_examples=32)
    pace = Safety().after(Pace(), 1, True, metrics, plan)
    assert pace.examples == expected
    assert Safety(share=None).after(Pace(), 1, True, metrics, plan).examples is None
    assert planned(plan, pace) == SketchPlan(rank=5, max_examples=expected or 32)
    assert Safety().after(Pace(examples=FEWEST), 1, True, metrics, plan).examples == FEWEST
    assert planned(None, pace) is None
