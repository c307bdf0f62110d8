"""The kinds of rules, clients and problems, and the tables that settings of each may be given in.

Rules and problems take the settings of the classes and functions that they name.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, create_model
from pydantic.errors import PydanticSchemaGenerationError

from fipa.aggregation.registry import RULES
from fipa.aggregation.shared import ClientMemory
from fipa.clients.registry import LOCAL_RULES
from fipa.data import IID, Augment, BalancedDirichlet, Dirichlet, Indices, QuantitySkew, Shards
from fipa.errors import FipaError
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.control import StepControl
from fipa.federation.participation import Faults, Participation
from fipa.federation.trust import TrustRegion
from fipa.pde import Points, Region
from fipa.problems.registry import PROBLEMS
from fipa.problems.vision import ConvNet, ResidualNet

MAKERS: dict[str, Mapping[str, Callable[..., Any]]] = {"rule": RULES, "local": LOCAL_RULES, "problem": PROBLEMS}
NOT_SAID = {"rule": "inner", "problem": "seed"}  # parameters that are no settings


class Strict(BaseModel):
    """Unknown keys are errors, and numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def specs(kind: str) -> dict[str, type[Strict]]:
    """The tables of a kind by name, also those of rules that users have registered."""
    return {name: _spec(kind, name, maker) for name, maker in MAKERS[kind].items()}


@cache
def _spec(kind: str, name: str, maker: Callable[..., Any]) -> type[Strict]:
    """The name and the keyword parameters of what makes it."""
    own = inspect.isclass(maker) and not dataclasses.is_dataclass(maker)  # fields may be those of another module
    hints = get_type_hints(maker.__init__ if own else maker)
    fields: dict[str, Any] = {"name": (Literal[name], name)}
    for parameter in inspect.signature(maker).parameters.values():
        if parameter.name != NOT_SAID.get(kind):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (_told_apart(hints[parameter.name]), default)
    try:
        return create_model(maker.__name__, __base__=Strict, **fields)
    except PydanticSchemaGenerationError as error:
        reason = "settings are numbers, strings, tuples of these, or None"
        raise FipaError(f"{kind} {name!r}: a field of {maker.__qualname__} is none of these: {reason}") from error


def _told_apart(hint: Any) -> Any:
    """Tables of several kinds, all with a name, are told apart by it: one error instead of one for each kind."""
    kinds = get_args(hint)
    named = [dataclasses.is_dataclass(kind) and kind.__dataclass_fields__.get("name") is not None for kind in kinds]
    return Annotated[hint, Field(discriminator="name")] if kinds and all(named) else hint


def settings_of(spec: Any) -> dict[str, Any]:
    """All that a table says besides its name."""
    return {name: getattr(spec, name) for name in type(spec).model_fields if name != "name"}


@cache
def _reader(tables: tuple[type[Strict], ...]) -> TypeAdapter[Any]:
    any_of: Any = Annotated[Union[tables], Field(discriminator="name")]  # noqa: UP007
    return TypeAdapter(any_of)


if TYPE_CHECKING:
    RuleSpec = Any
    LocalSpec = Any
    ProblemSpec = Any
else:  # tables that are told apart by their name

    def _one_of(kind):
        def read(table):  # by what there is now: users register rules of their own
            said = json.dumps(table, default=str)
            return _reader(tuple(specs(kind).values())).validate_json(said, strict=True)

        return Annotated[Any, PlainValidator(read)]

    RuleSpec, LocalSpec, ProblemSpec = map(_one_of, MAKERS)

# plain classes that are tables, too
SETTINGS = (
    *(AdaptiveRank, AdaptiveSteps, StepControl, TrustRegion, Participation, Faults, Points, Region, Augment),
    *(ConvNet, ResidualNet, ClientMemory),
    *(BalancedDirichlet, Dirichlet, Shards, QuantitySkew, IID, Indices),
)
for _settings_class in SETTINGS:
    setattr(_settings_class, "__pydantic_config__", ConfigDict(extra="forbid"))  # noqa: B010
