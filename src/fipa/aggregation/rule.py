"""`aggregate`: (theta, updates) in, theta out, by any rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, overload

from torch import Tensor

from fipa.aggregation.cohort import Cohort, gather
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary
from fipa.errors import Diverged, FipaError, LayoutError
from fipa.layout import Layout
from fipa.linalg import aligned
from fipa.spill import MEMORY_LIMIT, Shelf

Theta = TypeVar("Theta", Tensor, dict[str, Tensor])


@dataclass(frozen=True)
class Diagnostics:
    r"""Numbers that describe the step that a rule has taken.

    Attributes
    ----------
    effective_rank
        Directions that the curvature decides: eigenvalues above the cut-off without damping,
        $\sum_i \lambda_i / (\lambda_i + \beta)$ with it; p for FedAvg.
    condition_number
        Condition number of the matrix that was solved with, on the directions kept (`FOOF`: in the 1-norm, of the worst
        layer).
    step_length
        $|\theta' - \theta|$.
    cosine_with_fedavg
        Between this step and the plain average of the updates.
    shares
        Part of each client in the step, by id, else by place in the list:
        $\langle d_m, d \rangle / |d|^2$ where $d = \sum_m d_m$. They sum to 1, and a negative one belongs to a client
        that was overruled.
    error_bound
        How far the step can be from the rule's, relative to its length, besides rounding: 0 where it is computed
        directly. Where it is found by iteration, the effective rank is an estimate, off by some percent, and the
        condition number that of the space searched.
    """

    effective_rank: float
    condition_number: float
    step_length: float
    cosine_with_fedavg: float
    shares: dict[int | str, float]
    error_bound: float = 0.0


@dataclass(frozen=True, eq=False)
class Step:
    """A rule's answer: the change of the flat parameters, and what is known about it."""

    change: Tensor
    effective_rank: float
    condition_number: float
    projections: list[float]  # <d_m, d> per client, up to one common factor
    state: dict[str, Tensor] = field(default_factory=dict)
    error_bound: float = 0.0  # of the change, relative to its length


class Rule(Protocol):
    """A server rule: a pure function of the clients' updates, and of its own state if it has one.

    A class of rules that needs to know the clients' curvature names its plan, `needs = fipa.SketchPlan`; one with
    settings that `aggregate` has no use for names these, `for_rounds = ("memory",)`.
    """

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:
        """The change of the flat parameters."""
        ...


@dataclass(frozen=True, eq=False)
class Result(Generic[Theta]):
    """New parameters in the form of the old ones, diagnostics, and the rule's state for the next round."""

    theta: Theta
    diagnostics: Diagnostics
    state: dict[str, Tensor]


@overload
def aggregate(
    theta: Tensor,
    updates: Iterable[ClientUpdate],
    rule: Rule,
    state: Mapping[str, Tensor] | None = None,
    *,
    population: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Result[Tensor]: ...
@overload
def aggregate(
    theta: Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    rule: Rule,
    state: Mapping[str, Tensor] | None = None,
    *,
    population: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Result[dict[str, Tensor]]: ...
def aggregate(
    theta: Tensor | Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    rule: Rule,
    state: Mapping[str, Tensor] | None = None,
    *,
    population: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Result[Tensor] | Result[dict[str, Tensor]]:
    """One server step.

    Parameters
    ----------
    theta
        The broadcast parameters: flat, or by name (`fipa.parameters_of(model)`, a copy of a `state_dict`). Names that
        the clients did not train pass through unchanged; a tied weight changes under all of its names.
    updates
        The clients of this round. A generator of them is gone through once, and what is beyond the `memory_limit` is
        kept in files.
    rule
        `fipa.FedAvg()`, `fipa.FIPA()`, ...
    state
        `result.state` of the round before, for rules with momentum or another memory.
    population
        Number of clients of the federation, of which some take part in a round: `fipa.FedVARP` asks for it.
    memory_limit
        Bytes of updates and curvatures that are held in memory, those beyond are in temporary files. If sketches are
        larger together, damped `fipa.FIPA` and `fipa.CompletedFIPA` find their step by iteration, see
        `Diagnostics.error_bound`. It changes nothing about other rules.

    Examples
    --------
    >>> import torch
    >>> updates = [ClientUpdate(torch.ones(3), 100), ClientUpdate(torch.zeros(3), 300)]
    >>> from fipa.aggregation.fedavg import FedAvg
    >>> aggregate(torch.zeros(3), updates, FedAvg()).theta
    tensor([0.2500, 0.2500, 0.2500])
    """
    for name in getattr(rule, "for_rounds", ()):
        if getattr(rule, name) != type(rule).__dataclass_fields__[name].default:  # type: ignore[attr-defined]
            raise FipaError(
                f"{type(rule).__name__}({name}=...) is for the rounds of a federation, fipa.run or fipa.Federation: "
                "aggregate knows one round only. Leave it out here"
            )
    if not isinstance(updates, ClientUpdate):
        shelf = Shelf(memory_limit)
        updates = [shelf.keep(one) if isinstance(one, ClientUpdate) and _whole(one) else one for one in updates]
    return aggregator(theta, updates, population=population, memory_limit=memory_limit)(rule, state)


def _whole(update: ClientUpdate) -> bool:
    """Whether its tensors can be found; what it has in their place is complained of later."""
    deltas = update.delta.values() if isinstance(update.delta, Mapping) else (update.delta,)
    known = update.sketch is None or isinstance(update.sketch, CurvatureSummary)
    return known and all(isinstance(delta, Tensor) for delta in deltas)


@overload
def aggregator(
    theta: Tensor, updates: Iterable[ClientUpdate], *, population: int | None = None, memory_limit: int = MEMORY_LIMIT
) -> Callable[..., Result[Tensor]]: ...
@overload
def aggregator(
    theta: Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    *,
    population: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Callable[..., Result[dict[str, Tensor]]]: ...
def aggregator(
    theta: Tensor | Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    *,
    population: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Callable[..., Any]:
    """`aggregate` for several rules on the same updates: what these have in common is checked and computed once.

    Called with `deltas`, flat tensors by client id, it takes these instead of the updates' own. It leaves the updates
    where they are: whoever has more of them than memory puts them on a `fipa.spill.Shelf` before.
    """
    cohort, flat, layout = gather(theta, updates, population=population, memory_limit=memory_limit)

    def apply(
        rule: Rule, state: Mapping[str, Tensor] | None = None, deltas: Mapping[int | str, Tensor] | None = None
    ) -> Any:
        known = {name: aligned(t) for name, t in (state or {}).items()}
        return _apply(rule, known, theta, cohort if deltas is None else cohort.with_deltas(deltas), flat, layout)

    return apply


def _apply(
    rule: Rule,
    state: Mapping[str, Tensor],
    theta: Tensor | Mapping[str, Tensor],
    cohort: Cohort,
    flat: Tensor,
    layout: Layout | None,
) -> Result[Tensor] | Result[dict[str, Tensor]]:
    if isinstance(rule, type) or not callable(rule):
        name = getattr(rule, "__name__", "FIPA")
        raise FipaError(f"rule={rule!r} is not a rule: make one, as rule=fipa.{name}()")
    step = rule(cohort, state)
    if not isinstance(step, Step):
        raise FipaError(
            f"{type(rule).__name__} returned a {type(step).__name__}: a rule returns fipa.Step(change, ...)"
        )
    if not bool(step.change.isfinite().all()):
        raise Diverged(f"{rule} made NaN or infinity of finite updates: raise the damping, or lower the learning rate")
    changed = flat + step.change
    total = sum(step.projections)
    diagnostics = Diagnostics(
        effective_rank=step.effective_rank,
        condition_number=step.condition_number,
        step_length=float(step.change.norm()),
        cosine_with_fedavg=_cosine(step.change, cohort.mean_delta),
        shares={i: p / total if total else 0.0 for i, p in zip(cohort.ids, step.projections, strict=True)},
        error_bound=step.error_bound,
    )
    if isinstance(theta, Tensor):
        return Result(changed.reshape(theta.shape), diagnostics, step.state)
    return Result(_merge(theta, changed, layout), diagnostics, step.state)


def needs_of(rule: Rule | type) -> type[CurvaturePlan] | None:
    """What a rule, or a class of rules, needs to know of the clients' curvature; None for nothing."""
    own: type[CurvaturePlan] | None = getattr(rule, "needs", None)
    inner: Rule | None = getattr(rule, "inner", None)  # of a server optimiser
    return own if own is not None or inner is None else needs_of(inner)


def plan_for(rule: Rule) -> CurvaturePlan | None:
    """How clients compute what a rule needs, with default settings."""
    needs = needs_of(rule)
    return None if needs is None else needs()


def check_not_negative(rule: object, **values: float) -> None:
    """Refuse negative or non-finite settings of a rule."""
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise FipaError(f"{type(rule).__name__}({name}={value}): must be a finite number, not negative")


def _merge(theta: Mapping[str, Tensor], flat: Tensor, layout: Layout | None) -> dict[str, Tensor]:
    """Put the changed parameters back among the others, and under every name that shares their memory."""
    assert layout is not None
    new = dict(theta)
    changed = {name: t.clone() for name, t in layout.unflatten(flat).items()}
    owner: dict[object, str] = {}
    for name in layout.names:
        other = owner.setdefault(_place(name, theta[name]), name)
        if other != name:
            raise LayoutError(f"{other!r} and {name!r} share memory: update a tied weight under one name only")
    for name, tensor in theta.items():
        source = owner.get(_place(name, tensor))
        if source is not None:
            new[name] = changed[source]  # one tensor under all names of a tied weight: it stays tied
    return new


def _place(name: str, tensor: Tensor) -> object:
    """Where a tensor lives; equal for two names of one tied weight."""
    if tensor.numel() == 0:
        return name
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm()) * float(b.norm())
    return max(-1.0, min(1.0, float(a @ b) / norms)) if norms else 0.0
