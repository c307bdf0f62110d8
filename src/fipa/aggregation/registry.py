"""Server rules by the name that experiments call them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fipa.aggregation.additive import AdditiveFIPA
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
from fipa.aggregation.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fipa.aggregation.shared import SharedFIPA
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError

RULES: dict[str, type] = {
    "fedavg": FedAvg,
    "fipa": FIPA,
    "completed-fipa": CompletedFIPA,
    "additive-fipa": AdditiveFIPA,
    "diagonal-fisher": DiagonalFisher,
    "foof": FOOF,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedvarp": FedVARP,
    "lbfgs": LBFGS,
    "fed3r": Fed3R,
    "fedncm": FedNCM,
    "shared-fipa": SharedFIPA,
    "private-fedavg": PrivateFedAvg,
    "private-additive-fipa": PrivateAdditiveFIPA,
    "private-shared-fipa": PrivateSharedFIPA,
}


def register(name: str, kind: type) -> None:
    """Give a rule of your own a name, so that experiments can use it: in TOML files, `--set` and `fipa.run`.

    Call it in the Python file of the problem, or in one that the experiment lists under `files`: `fipa run`, its worker
    processes and `fipa resume` run these files first.

    Parameters
    ----------
    name
        As it stands in settings. Names that are taken are refused, unless by an older version of the same class.
    kind
        A frozen dataclass with `__call__(cohort, state)`, see `Rule`. Its fields are the settings: numbers, strings,
        tuples of these, or None.
    """
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and "__call__" in dir(kind)):
        raise FipaError(f"rule {name!r}: {kind!r} must be a dataclass with __call__(self, cohort, state)")
    if any(field.name == "name" for field in dataclasses.fields(kind)):
        raise FipaError(f"rule {name!r}: rename its field 'name', which stands for the rule in settings")
    needs: Any = getattr(kind, "needs", None)
    if needs is not None and not (isinstance(needs, type) and issubclass(needs, CurvaturePlan)):
        raise FipaError(f"rule {name!r}: needs = {needs!r} must be a class of plans, as fipa.SketchPlan")
    taken = RULES.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise FipaError(f"there is a rule {name!r} already, {taken.__qualname__}: choose another name")
    RULES[name] = kind
