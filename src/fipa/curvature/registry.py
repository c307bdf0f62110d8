"""Curvatures by the name that messages call them. A new one is one file, and one line here or a call of `register`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar

from fipa.curvature.additive import AdditivePlan
from fipa.curvature.basis import BasisPlan
from fipa.curvature.class_means import ClassSumsPlan
from fipa.curvature.covariance import CovariancePlan
from fipa.curvature.diagonal import DiagonalPlan
from fipa.curvature.rank import RelativeThreshold, TraceShare
from fipa.curvature.ridge import RidgePlan
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary
from fipa.errors import FipaError, SketchError

NONE = "none"  # the kind of no curvature at all
PLANS: dict[str, type[CurvaturePlan]] = {}  # by the kind of the summary that they make
RANKS = {cls.__name__: cls for cls in (RelativeThreshold, TraceShare)}  # settings that are more than a number

P = TypeVar("P", bound=type[CurvaturePlan])


def register(plan: P) -> P:
    """Make a curvature known by its plan, so that it can be asked for in messages and read from checkpoints.

    Also a decorator. A file that is run again registers its classes again.
    """
    makes: Any = getattr(plan, "makes", None)
    kind: Any = getattr(makes, "kind", None)
    if (
        not is_dataclass(plan)
        or not issubclass(plan, CurvaturePlan)
        or not issubclass(makes or object, CurvatureSummary)
    ):
        raise FipaError(
            f"{plan!r}: register a dataclass that derives from CurvaturePlan, and whose `makes` is a summary"
        )
    if not isinstance(kind, str) or kind in ("", NONE):
        raise FipaError(f"{makes.__name__} has kind = {kind!r}: give it a name of its own")
    needed = [f.name for f in fields(plan) if f.default is MISSING and f.default_factory is MISSING]
    if needed:
        raise FipaError(f"{plan.__name__} has no default for {needed[0]!r}: rules ask for it without settings")
    other = PLANS.get(kind)
    if other is not None and _place(other) != _place(plan):
        raise FipaError(f"{makes.__name__} has kind = {kind!r}, as has that of {other.__name__}: choose another")
    PLANS[kind] = plan
    return plan


register(SketchPlan)
register(AdditivePlan)
register(DiagonalPlan)
register(CovariancePlan)
register(BasisPlan)
register(RidgePlan)
register(ClassSumsPlan)


def summaries() -> list[type[CurvatureSummary]]:
    """All kinds of curvature that are known."""
    return [plan.makes for plan in PLANS.values()]


def kind_of(plan: CurvaturePlan | None) -> str:
    """The name of what a plan makes."""
    if plan is None:
        return NONE
    kind: str | None = getattr(plan.makes, "kind", None)
    if kind is None or PLANS.get(kind) is not type(plan):
        name = type(plan).__name__
        raise FipaError(
            f"{name} is not registered: put @fipa.register_curvature before it, on the server and on clients"
        )
    return kind


def settings_of(plan: CurvaturePlan | None) -> dict[str, Any]:
    """A plan's settings, as JSON knows them."""
    return {} if plan is None else {f.name: _plain(f.name, getattr(plan, f.name)) for f in fields(plan)}  # type: ignore[arg-type]


def plan_of(kind: str, settings: Mapping[str, Any]) -> CurvaturePlan | None:
    """The plan that `kind_of` and `settings_of` describe."""
    if kind == NONE:
        return None
    if kind not in PLANS:
        raise SketchError(
            f"asks for a curvature {kind!r} that is not known here: update fipa, or register it here, too"
        )
    cls = PLANS[kind]
    unknown = sorted(set(settings) - {f.name for f in fields(cls)})  # type: ignore[arg-type]
    if unknown:
        raise SketchError(
            f"asks for a curvature {kind!r} with a setting {unknown[0]!r} that is not known here: update it"
        )
    return cls(**{name: _restored(value) for name, value in settings.items()})


def _plain(name: str, value: Any) -> Any:
    if type(value).__name__ in RANKS and type(value) is RANKS[type(value).__name__]:
        return [type(value).__name__, asdict(value)]
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SketchError(f"the setting {name} = {value!r} cannot be sent: use numbers, strings, lists of them, or None")


def _restored(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) == 2 and isinstance(value[0], str) and value[0] in RANKS and isinstance(value[1], dict):
        return RANKS[value[0]](**value[1])
    return tuple(_restored(item) for item in value)  # a frozen dataclass has tuples


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
