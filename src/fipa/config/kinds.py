"""The kinds of rules, clients and problems, and the tables that settings of each may be given in.

Rules and problems take the settings of the classes and functions that they name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

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
from fipa.aggregation.shared import ClientMemory, SharedFIPA
from fipa.clients.registry import LOCAL_RULES
from fipa.data import IID, Augment, BalancedDirichlet, Dirichlet, Indices, QuantitySkew, Shards
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.control import StepControl
from fipa.federation.participation import Faults, Participation
from fipa.federation.trust import TrustRegion
from fipa.pde import Points, Region
from fipa.problems.registry import PROBLEMS
from fipa.problems.vision import ConvNet, ResidualNet

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


class Strict(BaseModel):
    """Unknown keys are errors, and numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _specs(makers: Mapping[str, Callable[..., Any]], skip: tuple[str, ...]) -> dict[str, type[Strict]]:
    """A schema for each maker: its name and its keyword parameters."""
    specs = {}
    for name, maker in makers.items():
        own = inspect.isclass(maker) and not dataclasses.is_dataclass(maker)  # fields may be those of another module
        hints = get_type_hints(maker.__init__ if own else maker)
        fields: dict[str, Any] = {"name": (Literal[name], name)}
        for parameter in inspect.signature(maker).parameters.values():
            if parameter.name not in skip:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[parameter.name] = (_told_apart(hints[parameter.name]), default)
        specs[name] = create_model(maker.__name__, __base__=Strict, **fields)
    return specs


def _told_apart(hint: Any) -> Any:
    """Tables of several kinds, all with a name, are told apart by it: one error instead of one for each kind."""
    kinds = get_args(hint)
    named = [dataclasses.is_dataclass(kind) and kind.__dataclass_fields__.get("name") is not None for kind in kinds]
    return Annotated[hint, Field(discriminator="name")] if kinds and all(named) else hint


def settings_of(spec: Any) -> dict[str, Any]:
    """All that a table says besides its name."""
    return {name: getattr(spec, name) for name in type(spec).model_fields if name != "name"}


SPECS = {
    "rule": _specs(RULES, skip=("inner",)),
    "local": _specs(LOCAL_RULES, skip=()),
    "problem": _specs(PROBLEMS, skip=("seed",)),
}

if TYPE_CHECKING:
    RuleSpec = Any
    LocalSpec = Any
    ProblemSpec = Any
else:  # tables that are told apart by their name

    def _one_of(specs):
        return Annotated[Union[tuple(specs.values())], Field(discriminator="name")]  # noqa: UP007

    RuleSpec, LocalSpec, ProblemSpec = map(_one_of, (SPECS["rule"], SPECS["local"], SPECS["problem"]))

# plain classes that are tables, too
SETTINGS = (
    *(AdaptiveRank, AdaptiveSteps, StepControl, TrustRegion, Participation, Faults, Points, Region, Augment),
    *(ConvNet, ResidualNet, ClientMemory),
    *(BalancedDirichlet, Dirichlet, Shards, QuantitySkew, IID, Indices),
)
for _settings_class in SETTINGS:
    setattr(_settings_class, "__pydantic_config__", ConfigDict(extra="forbid"))  # noqa: B010
