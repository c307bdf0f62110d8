"""Runs in two stages, a shared warm-up and the arms that go on from it, and how the classes are shared out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fipa.report.data import Results, after, records_table, summary
from fipa.report.payload import POINTS, Json, numbers, thin
from fipa.report.scores import Spread
from fipa.report.statistics import Array, spread

NUMBERS = 20  # clients and classes up to which a picture of the shares has room for the counts
NAMES = 30  # classes up to which it has room for their names


@dataclass(frozen=True)
class WarmUp:
    """The rounds in which a warm-up was measured, each seed's metric there, and the mean of the seeds."""

    rounds: Array
    seeds: dict[str, Array]
    mean: Array


@dataclass(frozen=True)
class Start:
    """Arms of one family that begin after the same round of the warm-up."""

    after: int
    initial: float
    best: Spread
    mean: Spread


def warm_up(results: Results) -> WarmUp | None:
    """The curves of the warm-up; None if there was none or it was never measured. Infinities become NaN."""
    content = results.get("warmup")
    if content is None:
        return None
    values = records_table(results, content["seeds"])
    values[~np.isfinite(values)] = np.nan
    seen = np.flatnonzero(~np.isnan(values).all(axis=0))
    if not seen.size:
        return None
    values = values[:, seen]
    mean = np.array([column[~np.isnan(column)].mean() for column in values.T])
    return WarmUp(seen.astype(float), dict(zip(content["seeds"], values, strict=True)), mean)


def starts(results: Results) -> list[int]:
    """The rounds of the warm-up that arms start from, in order; empty if all start from scratch."""
    return sorted({after(results, arm) for arm in results["arms"]} - {0})


def family(arm: str) -> str:
    """The name of an arm without the words in parentheses at its end.

    >>> family("FIPA (rank 5) (from 100)"), family("FedAvg"), family("(from 3)")
    ('FIPA (rank 5)', 'FedAvg', '(from 3)')
    """
    return re.sub(r"\s+\([^()]*\)$", "", arm)


def ablation(results: Results) -> dict[str, list[Start]]:
    """For every family of arms its best and mean metric by the round that it starts from, in the order of rounds."""
    families: dict[str, list[Start]] = {}
    for s in summary(results | {"metric": results["metric"] | {"scale": "linear"}}):
        assert s.scores is not None
        known = [r["initial_metric"] for r in results["arms"][s.arm].values() if r.get("initial_metric") is not None]
        initial = spread(np.array(known))[0] if known else float("nan")
        families.setdefault(family(s.arm), []).append(Start(s.after, initial, s.scores.best, s.scores.mean))
    return {name: sorted(found, key=lambda start: start.after) for name, found in families.items()}


def warm_up_payload(results: Results) -> Json | None:
    """The warm-up for the page: thinned, and with the rounds that arms start from."""
    found = warm_up(results)
    if found is None:
        return None
    seen = thin(len(found.rounds), POINTS)
    return {
        "rounds": found.rounds[seen].astype(int).tolist(),
        "mean": numbers(found.mean[seen]),
        "seeds": {seed: numbers(line[seen]) for seed, line in found.seeds.items()} if len(found.seeds) > 1 else {},
        "starts": starts(results),
    }


def shares_payload(view: dict[str, Any]) -> Json:
    """How many examples of each class each client holds, for the page: a row for each class."""
    counts = np.asarray(view["counts"], dtype=np.int64)
    return {
        "counts": counts.T.tolist(),
        "totals": counts.sum(axis=1).tolist(),
        "classes": list(view["classes"]),
        "numbered": max(counts.shape) <= NUMBERS,
        "named": counts.shape[1] <= NAMES,
        "note": shares_note(counts.tolist()),
    }


def shares_note(counts: Iterable[Iterable[int]]) -> str:
    """The partition in a sentence.

    >>> shares_note([[5, 0], [3, 4]])
    '2 clients with 5 to 7 examples of 1 to 2 of the 2 classes.'
    """
    table = np.asarray(list(counts))
    examples, held = table.sum(axis=1), (table > 0).sum(axis=1)
    clients = "1 client" if len(table) == 1 else f"{len(table)} clients"
    return f"{clients} with {_span(examples)} examples of {_span(held)} of the {table.shape[1]} classes."


def _span(values: Any) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"
