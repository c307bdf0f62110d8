"""What a Flower server keeps of its rounds, as the results that the report reads."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fipa import __version__
from fipa.federation.record import SERIES, RoundRecord
from fipa.report.files import FORMAT

TRAIN, EVALUATE, CENTRAL = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"
RISING = ("acc", "f1", "auc", "score", "precision", "recall")  # in the name of a metric: more is better
ENDLESS = 10**9  # the last round of a loop that is not ours, and does not say how many there are


def flower_results(
    records: Sequence[RoundRecord],
    metrics: Mapping[str, Mapping[int, Mapping[str, Any]]],
    title: str,
    seed: int,
    last: int | None,
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """The content of results.json; `last` is the number of the last round, None if nobody knows.

    The metric is the first number of the server's own evaluation, else of the clients', else their loss.
    """
    kind = next((kind for kind in (CENTRAL, EVALUATE) if any(metrics.get(kind, {}).values())), None)
    rows = {} if kind is None else metrics[kind]
    name = next((name for numbers in rows.values() for name, value in numbers.items() if _is_number(value)), "loss")
    values = {k: numbers.get(name) for k, numbers in rows.items()}
    rounds = [record.plain() for record in records]
    curves: dict[str, Any] = {key: [content[key] for content in rounds] for key in SERIES}
    curves["metric"] = [values.get(r.round) if kind else _either(r.loss_after, r.loss) for r in records]
    finished = bool(records) and records[-1].round == last
    curves |= {"status": "finished" if finished else "running", "after": 0, "initial_metric": values.get(0)}
    curves["events"] = [happened for record in records for happened in record.events]
    goal = "max" if any(part in name.lower() for part in RISING) else "min"
    return {
        "format": FORMAT, "fipa": __version__, "experiment": "flower", "title": title,
        "machine": {"python": platform.python_version(), "torch": torch.__version__},
        "metric": {"name": name, "goal": goal, "scale": "linear"}, "config": dict(settings),
        "rounds": last if last is not None and last < ENDLESS else None,
        "arms": {title: {str(seed): curves}},
    }  # fmt: skip


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
