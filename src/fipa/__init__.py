"""Second-order aggregation for federated learning: Fisher-Informed Parameterwise Aggregation.

>>> import torch, fipa
>>> model = torch.nn.Linear(4, 3)
>>> fisher = fipa.sketch(model, torch.randn(50, 4), loss="cross_entropy", rank=5)
>>> update = fipa.ClientUpdate(0.1 * torch.randn(15), num_examples=50, sketch=fisher)
>>> fipa.aggregate(torch.zeros(15), [update], rule=fipa.FIPA()).theta.shape
torch.Size([15])
"""

from fipa import models, pde
from fipa.aggregation.additive import AdditiveFIPA
from fipa.aggregation.cohort import Cohort
from fipa.aggregation.diagonal import DiagonalFisher
from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.fedvarp import FedVARP
from fipa.aggregation.fipa import FIPA, CompletedFIPA
from fipa.aggregation.foof import FOOF
from fipa.aggregation.private import PrivateAdditiveFIPA, PrivateFedAvg
from fipa.aggregation.rule import Diagnostics, Result, Rule, Step, aggregate
from fipa.aggregation.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fipa.aggregation.update import ClientUpdate
from fipa.api import run
from fipa.clients.client import Client
from fipa.curvature.additive import AdditivePlan, AdditiveStatistics, additive_statistics, pool, random_test_matrix
from fipa.curvature.covariance import CovariancePlan, InputCovariance, input_covariance
from fipa.curvature.diagonal import DiagonalCurvature, DiagonalPlan, diagonal_fisher
from fipa.curvature.rank import RelativeThreshold, TraceShare
from fipa.curvature.registry import register as register_curvature
from fipa.curvature.sketch import Sketch, SketchPlan, sketch
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, Occasion
from fipa.curvature.terms import Residual
from fipa.errors import Diverged, FipaError, LayoutError, RankWarning, SketchError, UpdateError
from fipa.federation.problem import Curves, Maps, Problem
from fipa.layout import Layout, parameters_of
from fipa.results import Results

__version__ = "0.5.0"

__all__ = [
    "FIPA",
    "FOOF",
    "AdditiveFIPA",
    "AdditivePlan",
    "AdditiveStatistics",
    "Client",
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
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedVARP",
    "FedYogi",
    "FipaError",
    "InputCovariance",
    "Layout",
    "LayoutError",
    "Maps",
    "Occasion",
    "PrivateAdditiveFIPA",
    "PrivateFedAvg",
    "Problem",
    "RankWarning",
    "RelativeThreshold",
    "Residual",
    "Result",
    "Results",
    "Rule",
    "Sketch",
    "SketchError",
    "SketchPlan",
    "Step",
    "TraceShare",
    "UpdateError",
    "additive_statistics",
    "aggregate",
    "diagonal_fisher",
    "input_covariance",
    "models",
    "parameters_of",
    "pde",
    "pool",
    "random_test_matrix",
    "register_curvature",
    "run",
    "sketch",
]
