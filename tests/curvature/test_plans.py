"""What clients tell about their curvature, as plans ask for it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from federation.cases import DOUBLE, lines, numbers

import fipa
from fipa import Layout, SketchError, TraceShare, random_test_matrix
from fipa.aggregation.rule import plan_for
from fipa.aggregation.shared import SharedFIPA
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.basis import BasisPlan
from fipa.curvature.covariance import CovariancePlan
from fipa.curvature.diagonal import DiagonalPlan
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan, Occasion

LAYOUT = Layout(("weight",), ((1, 2),))


def close(a: torch.Tensor, b: np.ndarray) -> None:
    np.testing.assert_allclose(a.numpy(), b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", [0, 2])
def test_plans_against_the_dense_matrix(m: int) -> None:
    problem, H = lines(0), numbers()[m].curvature
    model, client = problem.model, problem.clients[m]
    sketch = SketchPlan(rank=None).compute(model, LAYOUT, client, Occasion(0))
    close(sketch.eigenvectors * sketch.eigenvalues @ sketch.eigenvectors.T, H)
    close(DiagonalPlan().compute(model, LAYOUT, client, Occasion(0)).values, np.diag(H))
    (weight,) = CovariancePlan().compute(model, LAYOUT, client, Occasion(0)).layers.items()
    assert weight[0] == "weight"
    close(weight[1][1], H)
    delta = torch.tensor([0.3, -0.7], dtype=DOUBLE)
    sums = AdditivePlan(width=5).compute(model, LAYOUT, client, Occasion(0, 11, delta))
    omega = random_test_matrix(2, 5, 11, DOUBLE).numpy()
    close(sums.products, H @ omega)
    close(sums.response, H @ delta.numpy())
    assert sums.num_examples == client.num_examples


def test_a_rank_above_what_data_support_is_no_news() -> None:
    problem = lines(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sketch = SketchPlan(rank=9).compute(problem.model, LAYOUT, problem.clients[1], Occasion(0))
    assert sketch.rank == 2
    assert SketchPlan(rank=1).compute(problem.model, LAYOUT, problem.clients[1], Occasion(0)).rank == 1
    with pytest.raises(SketchError, match="rank must be at least 1, got 0"):
        SketchPlan(rank=0).compute(problem.model, LAYOUT, problem.clients[1], Occasion(0))


def test_all_settings_reach_the_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr("fipa.curvature.sketch.sketch", lambda *args, **settings: seen.update(settings, rank=args[3]))
    problem = lines(0)
    plan = SketchPlan(TraceShare(0.5), "krylov", "matrix_free", 3, 7, max_examples=11, sampled_labels=2)
    plan.compute(problem.model, LAYOUT, problem.clients[0], Occasion(5))
    assert seen == {
        "rank": TraceShare(0.5),
        "params": ("weight",),
        "route": "matrix_free",
        "solver": "krylov",
        "oversampling": 3,
        "iterations": 7,
        "max_examples": 11,
        "sampled_labels": 2,
        "seed": 5,
    }


def test_additive_statistics_are_of_an_update() -> None:
    problem = lines(0)
    with pytest.raises(SketchError, match="delta="):
        AdditivePlan().compute(problem.model, LAYOUT, problem.clients[0], Occasion(0))


@pytest.mark.parametrize(
    ("rank", "limit", "most"),
    [
        *[(8, None, 8), (8, 9, 8), (8, 7, 7), (None, None, None), (None, 7, 7), (TraceShare(0.9), 7, 7)],
        *[(fipa.RelativeThreshold(0.1, 5), 7, 5), (fipa.RelativeThreshold(0.1, 9), 7, 7)],
    ],
)
def test_a_server_may_want_fewer_eigenpairs(rank: object, limit: int | None, most: int | None) -> None:
    plan = SketchPlan(rank, "krylov")  # type: ignore[arg-type]
    limited = plan.at_most(limit)
    assert (limited.most, limited.solver) == (most, "krylov")
    assert type(limited.rank) is type(rank) or rank is None
    assert CovariancePlan().at_most(limit) == CovariancePlan()


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        (fipa.FedAvg(), None), (fipa.PrivateFedAvg(), None), (fipa.FIPA(0.1), SketchPlan()),
        (fipa.CompletedFIPA(), SketchPlan()), (fipa.AdditiveFIPA(), AdditivePlan()),
        (fipa.PrivateAdditiveFIPA(), AdditivePlan()), (fipa.DiagonalFisher(), DiagonalPlan()),
        (fipa.FOOF(), CovariancePlan()), (SharedFIPA(), BasisPlan()),
        (fipa.PrivateSharedFIPA(), BasisPlan()),
        (fipa.LBFGS(), None), (fipa.FedAdam(), None), (fipa.FedAdam(inner=fipa.FIPA()), SketchPlan()),
        (fipa.FedAvgM(inner=fipa.FedYogi(inner=fipa.FOOF())), CovariancePlan()), (lambda cohort, state: None, None),
    ],
)  # fmt: skip
def test_rules_name_the_curvature_that_they_need(rule: fipa.Rule, plan: CurvaturePlan | None) -> None:
    assert plan_for(rule) == plan
