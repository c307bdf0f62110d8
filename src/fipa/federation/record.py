"""What is kept of a round: the one place that names its fields. History, results, TensorBoard and reports derive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from typing_extensions import Self

WHOLE = {"series": False}  # a field that is no number per round: results.json puts it together in its own way


@dataclass(frozen=True)
class RoundRecord:
    r"""What happened in one round, in a form that JSON can hold.

    Attributes
    ----------
    round
        Number of the round; rounds of a warm-up count.
    metric
        Metric of the model after the round; None where it was not evaluated.
    averaged_metric
        Metric of the mean of the arm's last models; None where it was not evaluated.
    loss
        Weighted mean of the clients' losses at the model that was broadcast.
    loss_after
        The same after the round's step, where clients were asked for it.
    seconds
        Time for training and aggregation, without evaluation.
    uplink_bytes
        Bytes that all clients of the round sent to the server.
    downlink_bytes
        Bytes that the server sent to all clients of the round.
    trips
        How often clients were asked: once for their updates, and once more for every gradient, trial or bend.
    messages
        Messages in both directions.
    rank
        Mean rank of the sketches.
    ranks
        Rank of each client's sketch.
    local_steps
        Local steps of each client that answered in time.
    clients
        Clients whose updates were used, late ones included.
    damping
        Damping of the server's step, for rules that have one.
    step
        Factor of the server's step, for rules that have one.
    trials
        Number of steps that were tried.
    accepted
        Whether one of the trials was taken.
    step_length
        Length of the step, $|\\theta' - \\theta|$.
    cosine_with_fedavg
        Cosine between the step and FedAvg's.
    effective_rank
        Number of directions that the curvature decides, see `fipa.Diagnostics`.
    peak_memory_mib
        Most resident memory of all processes together since the arm began; None where the system does not tell.
    metrics
        Weighted means of the numbers that clients reported of their own accord.
    events
        What happened to whom: `round`, `client` (None for the server) and `text`.
    spectra
        Eigenvalues of each client's sketch.
    """

    round: int
    metric: float | None = None
    averaged_metric: float | None = None
    loss: float | None = None
    loss_after: float | None = None
    seconds: float = 0.0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    trips: int = 0
    messages: int = 0
    rank: float = 0.0
    ranks: tuple[int, ...] = ()
    local_steps: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    damping: float | None = None
    step: float | None = None
    trials: int = 0
    accepted: bool = False
    step_length: float = 0.0
    cosine_with_fedavg: float | None = None
    effective_rank: float | None = None
    peak_memory_mib: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, metadata=WHOLE)
    events: tuple[dict[str, Any], ...] = field(default=(), metadata=WHOLE)
    spectra: Mapping[str, list[float]] = field(default_factory=dict, metadata=WHOLE)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Read it from JSON. What an older version did not write has its default, what is not known is left out."""
        known = {f.name: content[f.name] for f in fields(cls) if f.name in content}
        lists = [f.name for f in fields(cls) if f.name in known and isinstance(f.default, tuple)]
        return cls(**known | {name: tuple(known[name] or ()) for name in lists})

    def plain(self) -> dict[str, Any]:
        """The record as JSON has it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


SERIES = tuple(f.name for f in fields(RoundRecord) if f.name != "round" and f.metadata.get("series", True))
NUMBERS = tuple(f.name for f in fields(RoundRecord) if f.name in SERIES and not isinstance(f.default, tuple | bool))


def event(round_number: int, client: int | str | None, text: str) -> dict[str, Any]:
    """Something that happened to a client, or to the server (None)."""
    return {"round": round_number, "client": client, "text": text}
