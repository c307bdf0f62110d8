"""Second-order aggregation for federated learning: Fisher-Informed Parameterwise Aggregation.

>>> import torch, fipa
>>> model = torch.nn.Linear(4, 3)
>>> fisher = fipa.sketch(model, torch.randn(50, 4), loss="cross_entropy", rank=5)
>>> update = fipa.ClientUpdate(0.1 * torch.randn(15), num_examples=50, sketch=fisher)
>>> fipa.aggregate(torch.zeros(15), [update], rule=fipa.FIPA()).theta.shape
torch.Size([15])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.6.0"

__all__ = [
    "FIPA",
    "FOOF",
    "LBFGS",
    "SGD",
    "Adam",
    "AdditiveFIPA",
    "AdditivePlan",
    "AdditiveStatistics",
    "Arm",
    "BasisCurvature",
    "BasisPlan",
    "ClassSums",
    "ClassSumsPlan",
    "Client",
    "ClientMemory",
    "ClientUpdate",
    "Cohort",
    "CompletedFIPA",
    "CovariancePlan",
    "CurvaturePlan",
    "CurvatureSummary",
    "Curves",
    "Diagnostics",
    "DiagonalCurvature",
    "DiagonalFisher",
    "DiagonalPlan",
    "Diverged",
    "Executor",
    "Faults",
    "Fed3R",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedNCM",
    "FedRCL",
    "FedVARP",
    "FedYogi",
    "Federation",
    "FipaError",
    "FullGradient",
    "GaussNewton",
    "InputCovariance",
    "Layout",
    "LayoutError",
    "LocalRule",
    "Maps",
    "Moon",
    "Occasion",
    "Participation",
    "PrivateAdditiveFIPA",
    "PrivateFedAvg",
    "PrivateSharedFIPA",
    "Problem",
    "RankWarning",
    "RelativeThreshold",
    "Residual",
    "Result",
    "Results",
    "RidgePlan",
    "RidgeStatistics",
    "RoundRecord",
    "Rule",
    "Scaffold",
    "SharedFIPA",
    "Sketch",
    "SketchError",
    "SketchPlan",
    "Stage",
    "Step",
    "StepControl",
    "TraceShare",
    "TrustRegion",
    "UpdateError",
    "additive_statistics",
    "aggregate",
    "basis_curvature",
    "diagonal_fisher",
    "input_covariance",
    "models",
    "parameters_of",
    "pde",
    "pool",
    "random_test_matrix",
    "register_curvature",
    "register_local_rule",
    "register_rule",
    "run",
    "sketch",
]

if TYPE_CHECKING:
    from fipa import models, pde
    from fipa.aggregation.additive import AdditiveFIPA
    from fipa.aggregation.cohort import Cohort
    from fipa.aggregation.diagonal import DiagonalFisher
    from fipa.aggregation.fed3r import Fed3R
    from fipa.aggregation.fedavg import FedAvg
    from fipa.aggregation.fedncm import FedNCM
    from fipa.aggregation.fedvarp import FedVARP
    from fipa.aggregation.fipa import FIPA, CompletedFIPA
    from fipa.aggregation.foof import FOOF
    from fipa.aggregation.lbfgs import LBFGS
    from fipa.aggregation.private import PrivateAdditiveFIPA, PrivateFedAvg
    from fipa.aggregation.private_shared import PrivateSharedFIPA
    from fipa.aggregation.registry import register as register_rule
    from fipa.aggregation.rule import Diagnostics, Result, Rule, Step, aggregate
    from fipa.aggregation.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
    from fipa.aggregation.shared import ClientMemory, SharedFIPA
    from fipa.aggregation.update import ClientUpdate
    from fipa.api import run
    from fipa.clients.client import Client
    from fipa.clients.descent import SGD, Adam
    from fipa.clients.fedrcl import FedRCL
    from fipa.clients.gauss_newton import GaussNewton
    from fipa.clients.gradient import FullGradient
    from fipa.clients.moon import Moon
    from fipa.clients.registry import register as register_local_rule
    from fipa.clients.rule import LocalRule
    from fipa.clients.scaffold import Scaffold
    from fipa.curvature.additive import AdditivePlan, AdditiveStatistics, additive_statistics, pool, random_test_matrix
    from fipa.curvature.basis import BasisCurvature, BasisPlan, basis_curvature
    from fipa.curvature.class_means import ClassSums, ClassSumsPlan
    from fipa.curvature.covariance import CovariancePlan, InputCovariance, input_covariance
    from fipa.curvature.diagonal import DiagonalCurvature, DiagonalPlan, diagonal_fisher
    from fipa.curvature.rank import RelativeThreshold, TraceShare
    from fipa.curvature.registry import register as register_curvature
    from fipa.curvature.ridge import RidgePlan, RidgeStatistics
    from fipa.curvature.sketch import Sketch, SketchPlan, sketch
    from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, Occasion
    from fipa.curvature.terms import Residual
    from fipa.errors import Diverged, FipaError, LayoutError, RankWarning, SketchError, UpdateError
    from fipa.federation.arm import Arm
    from fipa.federation.control import StepControl
    from fipa.federation.engine import Federation
    from fipa.federation.executor import Executor
    from fipa.federation.participation import Faults, Participation
    from fipa.federation.problem import Curves, Maps, Problem
    from fipa.federation.record import RoundRecord
    from fipa.federation.stage import Stage
    from fipa.federation.trust import TrustRegion
    from fipa.layout import Layout, parameters_of
    from fipa.results import Results

# where each name lives: it is imported when it is first used, and torch with it
_NAMES = {
    "aggregation.additive": "AdditiveFIPA",
    "aggregation.cohort": "Cohort",
    "aggregation.diagonal": "DiagonalFisher",
    "aggregation.fed3r": "Fed3R",
    "aggregation.fedavg": "FedAvg",
    "aggregation.fedncm": "FedNCM",
    "aggregation.fedvarp": "FedVARP",
    "aggregation.fipa": "FIPA CompletedFIPA",
    "aggregation.foof": "FOOF",
    "aggregation.lbfgs": "LBFGS",
    "aggregation.private": "PrivateAdditiveFIPA PrivateFedAvg",
    "aggregation.private_shared": "PrivateSharedFIPA",
    "aggregation.rule": "Diagnostics Result Rule Step aggregate",
    "aggregation.server_optimizers": "FedAdagrad FedAdam FedAvgM FedYogi",
    "aggregation.shared": "ClientMemory SharedFIPA",
    "aggregation.update": "ClientUpdate",
    "api": "run",
    "clients.client": "Client",
    "clients.descent": "SGD Adam",
    "clients.fedrcl": "FedRCL",
    "clients.gauss_newton": "GaussNewton",
    "clients.gradient": "FullGradient",
    "clients.moon": "Moon",
    "clients.rule": "LocalRule",
    "clients.scaffold": "Scaffold",
    "curvature.additive": "AdditivePlan AdditiveStatistics additive_statistics pool random_test_matrix",
    "curvature.basis": "BasisCurvature BasisPlan basis_curvature",
    "curvature.class_means": "ClassSums ClassSumsPlan",
    "curvature.covariance": "CovariancePlan InputCovariance input_covariance",
    "curvature.diagonal": "DiagonalCurvature DiagonalPlan diagonal_fisher",
    "curvature.rank": "RelativeThreshold TraceShare",
    "curvature.ridge": "RidgePlan RidgeStatistics",
    "curvature.sketch": "Sketch SketchPlan sketch",
    "curvature.summary": "CurvaturePlan CurvatureSummary Occasion",
    "curvature.terms": "Residual",
    "errors": "Diverged FipaError LayoutError RankWarning SketchError UpdateError",
    "federation.arm": "Arm",
    "federation.control": "StepControl",
    "federation.engine": "Federation",
    "federation.executor": "Executor",
    "federation.participation": "Faults Participation",
    "federation.problem": "Curves Maps Problem",
    "federation.record": "RoundRecord",
    "federation.stage": "Stage",
    "federation.trust": "TrustRegion",
    "layout": "Layout parameters_of",
    "results": "Results",
}
_HOMES = {name: (module, name) for module, names in _NAMES.items() for name in names.split()} | {
    "register_curvature": ("curvature.registry", "register"),
    "register_local_rule": ("clients.registry", "register"),
    "register_rule": ("aggregation.registry", "register"),
}


def __dir__() -> list[str]:
    """All public names, used or not."""
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # which would take every name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of ours, when it is first used."""
        if name in _HOMES:
            module, attribute = _HOMES[name]
            globals()[name] = found = getattr(import_module(f"fipa.{module}"), attribute)
            return found
        if not name.startswith("_"):
            try:
                return import_module(f"fipa.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"fipa.{name}":  # something that it needs
                    raise
        raise AttributeError(f"module 'fipa' has no attribute {name!r}")
