"""The `sketch` table: what clients report about their curvature."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from fipa.config.kinds import Strict
from fipa.curvature.leading import Solver
from fipa.curvature.rank import Rank, RelativeThreshold, TraceShare
from fipa.curvature.routes import Route
from fipa.curvature.sketch import SketchPlan
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import instead_of
from fipa.federation.adaptive import AdaptiveRank

WAYS = ("rank", "threshold", "trace_share", "adaptive")
RANK = (*WAYS, "max_rank")  # what a plan calls its rank


class SketchSpec(Strict):
    """What clients report about their curvature; at most one of rank, threshold, trace_share and adaptive.

    Which of the settings apply is up to the plan that the rule needs: those that are fields of it.

    Attributes
    ----------
    rank
        Number of eigenpairs, or `"full"` for all that the data support.
    threshold
        Keep eigenvalues above this share of the largest.
    trace_share
        Keep as few eigenpairs as hold this share of the whole curvature.
    adaptive
        Let each client choose its rank, as in the paper.
    max_rank
        Most eigenpairs with `threshold` or `trace_share`.
    width
        Columns of the test matrix, for additive FIPA.
    solver
        How eigenpairs are found; `"auto"` chooses by size.
    route
        How the curvature is represented; `"auto"` chooses by size and model.
    oversampling
        Extra columns of the iteration, beyond the rank.
    iterations
        Passes of the iteration: the more, the more exact.
    max_examples
        Use at most this many examples, drawn at random.
    sampled_labels
        Number of labels that are sampled per example instead of summing over all classes.
    """

    rank: Annotated[int, Field(ge=1)] | Literal["full"] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    trace_share: Annotated[float, Field(gt=0, le=1)] | None = None
    adaptive: AdaptiveRank | None = None
    max_rank: Annotated[int, Field(ge=1)] | None = None
    width: Annotated[int, Field(ge=1)] | None = None
    solver: Solver = "auto"
    route: Route = "auto"
    oversampling: Annotated[int, Field(ge=0)] = 10
    iterations: Annotated[int, Field(ge=0)] = 4
    max_examples: Annotated[int, Field(ge=1)] | None = None
    sampled_labels: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_rank(self) -> Self:
        ways = [name for name in WAYS if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} exclude each other")
        if self.max_rank is not None and ways not in (["threshold"], ["trace_share"]):
            raise ValueError("max_rank goes with threshold or trace_share")
        return self

    def plan(self, needs: type[CurvaturePlan] | None, rule: str) -> CurvaturePlan | None:
        """The plan that a rule of that name needs, with the settings of this table; others are errors.

        But settings of eigen-sketches, which [defaults] may say for all arms, pass where there is nothing to set: only
        a plan with a size of its own, which they could be taken for, refuses them.
        """
        takes, eigen = keys_of(needs), keys_of(SketchPlan)
        said = [key for key, field in SketchSpec.model_fields.items() if getattr(self, key) != field.default]
        passes = eigen if set(takes) <= set(eigen) else takes
        odd = [key for key in said if key not in takes and key not in passes]
        if odd:
            instead = f": {instead_of(odd[0], takes)}" if takes else ""
            raise ValueError(f"{rule} takes no sketch.{', '.join(odd)}{instead}")
        if needs is None:
            return None
        settings = {key: getattr(self, key) for key in takes if key not in RANK and getattr(self, key) is not None}
        return needs(**settings | (self._rank() if "rank" in takes else {}))

    def _rank(self) -> dict[str, Rank]:
        """What is said about the rank, if anything is."""
        if self.threshold is not None:
            return {"rank": RelativeThreshold(self.threshold, self.max_rank)}
        if self.trace_share is not None:
            return {"rank": TraceShare(self.trace_share, self.max_rank)}
        if self.rank is not None:
            return {"rank": None if self.rank == "full" else self.rank}
        return {}


def keys_of(plan: type[CurvaturePlan] | None) -> list[str]:
    """Keys of the table that set something of a plan."""
    fields = {field.name for field in dataclasses.fields(plan)} if plan is not None else set()  # type: ignore[arg-type]
    return [key for key in SketchSpec.model_fields if ("rank" if key in RANK else key) in fields]
