"""What the charts of the page draw, as plain JSON.

Every number is written once and to six digits; infinities and NaN become null, and long series are thinned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fipa.report import axes, statistics
from fipa.report.data import Record, Results, after, averaged, metric_table, series_band
from fipa.report.statistics import Band
from fipa.report.style import Style

POINTS = 2000  # of a line
PIXELS = 160  # of a map, along each axis
CLIENTS = 20  # lines in a chart by client
NUMBERED = 9  # client regions in a picture that have room for a number each
LABELS = {
    "loss": "training loss",
    "rank": "mean number of eigenpairs",
    "damping": "damping",
    "step": "server step",
    "step_length": "step length",
    "effective_rank": "effective rank of the system",
    "cosine_with_fedavg": "cosine with the FedAvg step",
    "trials": "aggregation trials",
    "seconds": "seconds per round",
    "trips": "times that clients were asked",
    "messages": "messages to and from clients",
    "peak_memory_mib": "peak memory (MiB)",
}
STEERING = ("damping", "step", "trials")
SCHEDULE = ("ranks", "local_steps")

Json = dict[str, Any]


def arm_payload(results: Results, arm: str, label: str, style: Style) -> Json:
    """Everything about one arm; optional parts are left out where the run has no such data.

    The statistics are over all seeds. Spectra, schedules and step control are those of the first seed.
    """
    seeds = results["arms"][arm]
    values = metric_table(results, arm)
    seen, begin = _places(values), after(results, arm)
    later = seen[1:] - 1  # places of rounds 1, 2, ... in the per-round series
    series = {key: series_band(results, arm, key) for key in LABELS}
    means = averaged(results)
    mean = statistics.band(metric_table(means, arm)).median if arm in means["arms"] else None
    first, record = next(iter(seeds.items()))
    payload: Json = {
        "name": label,
        "colour": style.colour,
        "dash": style.dash,
        "mark": style.mark,
        "rounds": (seen + begin).tolist(),
        "after": begin or None,
        **{key: _optional(axes.places(results, arm, key), seen) for key, axis in axes.AXES.items() if axis.series},
        "metric": _band(statistics.band(values), seen),
        "averaged": _optional(mean, seen),
        "seeds": {seed: numbers(row[seen]) for seed, row in zip(seeds, values, strict=True)} if len(seeds) > 1 else {},
        "series": {key: _band(band, later) for key, band in series.items() if band is not None},
        "first": first,
        "spectra": record.get("spectra") or {},
        "schedule": _schedule(record),
        "steering": _steering(record, thin(len(record["metric"]), POINTS)),
    }
    gap = series_band(results, arm, "gap")
    if gap is not None:
        payload["gap"] = _band(gap, later) | _fit(gap)
    return {key: value for key, value in payload.items() if value not in (None, {})}


def view_payload(views: Json, labels: dict[str, str], chosen: str | None = None) -> Json:
    """The fitted curves (and their errors), and maps: the target, each arm's solution and the logarithm of its error.

    Without a target there are no errors.
    `chosen` is the arm whose maps are shown first.
    """
    payload: Json = {}
    if curves := views.get("curves"):
        payload["curves"] = _curves(curves, labels)
    if maps := views.get("maps"):
        payload["maps"] = _maps(maps, labels, chosen)
    return payload


def thin(length: int, limit: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """At most `limit` evenly spaced places in a series, with the first and the last.

    >>> thin(5, 10).tolist(), thin(9, 3).tolist()
    ([0, 1, 2, 3, 4], [0, 4, 8])
    """
    return np.unique(np.linspace(0, length - 1, min(length, limit)).round().astype(np.int64))


def _places(values: statistics.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The columns of a table that are drawn: of a long one, half for those in which something was measured."""
    columns = values.shape[1]
    known = np.flatnonzero(~np.isnan(values).all(axis=0))
    if columns <= POINTS or len(known) == columns or not len(known):
        return thin(columns, POINTS)
    return np.union1d(thin(columns, POINTS // 2), known[thin(len(known), POINTS // 2)])


def numbers(values: Iterable[float | None], digits: int = 6) -> list[float | None]:
    """Rounded to significant digits; null for what JSON cannot hold."""
    return [float(f"{v:.{digits}g}") if v is not None and math.isfinite(v) else None for v in values]


def log_error(prediction: statistics.Array, target: statistics.Array) -> statistics.Array:
    """The decimal logarithm of the pointwise error; an exact hit counts as 1e-16."""
    return np.log10(np.maximum(np.abs(prediction - target), 1e-16))


def client_places(places: Iterable[Sequence[float] | None]) -> dict[tuple[float, ...], str]:
    """The clients' regions in a picture, each with the names of the clients that have it.

    >>> client_places([[0, 0.6], None, [0.4, 1], [0, 0.6]])
    {(0, 0.6): 'clients 0, 3', (0.4, 1): 'client 2'}
    """
    owners: dict[tuple[float, ...], list[int]] = {}
    for client, place in enumerate(places):
        if place is not None:
            owners.setdefault(tuple(place), []).append(client)
    return {place: _names(clients) for place, clients in owners.items()}


def label_rows(middles: Sequence[float], width: float) -> list[int]:
    """The row for each label of a line, so that labels of one row keep a distance of a tenth of the width.

    >>> label_rows([0.5, 0.2, 0.52, 0.9], 1)
    [0, 0, 1, 0]
    """
    rows: list[int] = []
    for middle in middles:
        taken = {row for row, other in zip(rows, middles, strict=False) if abs(middle - other) < 0.1 * width}
        rows.append(next(row for row in range(len(middles)) if row not in taken))
    return rows


def view_values(view: Json) -> statistics.Array:
    """The values that the colours of a map span: those of the target, or of all arms if there is none."""
    shown = list(view["arms"].values()) if view["target"] is None else view["target"]
    return np.asarray(shown, dtype=float)


def view_errors(view: Json) -> dict[str, statistics.Array]:
    """The logarithm of every arm's pointwise error; empty without a target."""
    if view["target"] is None:
        return {}
    target = np.asarray(view["target"], dtype=float)
    return {arm: log_error(np.asarray(values, dtype=float), target) for arm, values in view["arms"].items()}


def square(extent: Sequence[float]) -> bool:
    """True if both sides are equally long: else they may well have different units."""
    left, right, bottom, top = extent
    return math.isclose(right - left, top - bottom)


def value_range(values: statistics.Array) -> tuple[float, float]:
    """Smallest and largest finite value."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def error_range(errors: Iterable[statistics.Array]) -> tuple[float, float]:
    """A common colour range: from the 2 % quantile, below which only zero crossings lie, to the largest error."""
    finite = [e[np.isfinite(e)] for e in errors]
    everything = np.concatenate([e for e in finite if e.size] or [np.zeros(1)])
    low = min((float(np.quantile(e, 0.02)) for e in finite if e.size), default=-1.0)
    return round(low, 3), round(max(float(everything.max()), low + 0.1), 3)


def by_client(record: Record, key: str) -> dict[str, list[float | None]]:
    """A per-round list over participating clients as one series per client, null where it did not take part."""
    columns: dict[str, list[float | None]] = {}
    values, clients = record.get(key) or [], record.get("clients") or []
    for place, row in enumerate(row or [] for row in values):
        ids = clients[place] if clients else range(len(row))
        for client, value in zip(ids, row, strict=False):
            columns.setdefault(str(client), [None] * len(values))[place] = value
    return dict(sorted(columns.items(), key=lambda item: (len(item[0]), item[0])))


def varies(values: Iterable[Any]) -> bool:
    """True if there are two different numbers among the values."""
    return len({v for v in values if v is not None}) > 1


def _band(band: Band, seen: np.ndarray[Any, np.dtype[np.int64]]) -> Json:
    payload = {"median": numbers(band.median[seen])}
    if not np.array_equal(band.low, band.high, equal_nan=True):
        payload |= {"low": numbers(band.low[seen]), "high": numbers(band.high[seen])}
    return payload


def _optional(values: statistics.Array | None, seen: np.ndarray[Any, np.dtype[np.int64]]) -> list[float | None] | None:
    return None if values is None else numbers(values[seen])


def _fit(gap: Band) -> Json:
    line = statistics.power_law(gap.median.tolist())
    guide = statistics.inverse_guide(gap.median.tolist(), line.first if line else 0)
    return {"exponent": round(line.slope, 3) if line else None, "guide": numbers([guide])[0]}


def _curves(view: Json, labels: dict[str, str]) -> Json:
    seen = thin(len(view["x"]), POINTS)
    regions = client_places(view.get("regions", []))
    middles = [(left + right) / 2 for left, right in regions]
    target = view["target"]
    payload: Json = {
        "title": view.get("title", ""),
        "x_label": view.get("x_label", "x"),
        "y_label": view.get("y_label", "u(x)"),
        "target_label": view.get("target_label", "target"),
        "x": numbers(np.asarray(view["x"], dtype=float)[seen]),
        "target": None if target is None else numbers(np.asarray(target, dtype=float)[seen]),
        "arms": {labels.get(a, a): numbers(np.asarray(v, dtype=float)[seen]) for a, v in view["arms"].items()},
        "regions": list(regions),
        "names": list(regions.values()) if len(regions) <= NUMBERED else [],
        "rows": label_rows(middles, view["x"][-1] - view["x"][0]),
    }
    errors = view_errors(view)
    if view.get("error") and errors:
        payload["errors"] = {labels.get(arm, arm): numbers(10.0 ** e[seen], 4) for arm, e in errors.items()}
        payload["range"] = list(error_range(errors.values()))
    return payload


def _maps(view: Json, labels: dict[str, str], chosen: str | None) -> Json:
    values = view_values(view)
    cut = np.ix_(*(thin(length, PIXELS) for length in values.shape[-2:]))
    errors = {labels.get(arm, arm): error[cut] for arm, error in view_errors(view).items()}
    solutions = {labels.get(arm, arm): np.asarray(values, dtype=float)[cut] for arm, values in view["arms"].items()}
    boxes = client_places(view.get("boxes", []))
    payload: Json = {
        "title": view.get("title", ""),
        "x_label": view.get("x_label", "x"),
        "y_label": view.get("y_label", "y"),
        "target_label": view.get("target_label", "target"),
        "extent": view["extent"],
        "square": square(view["extent"]),
        "boxes": list(boxes),
        "names": list(boxes.values()) if len(boxes) <= NUMBERED else [],
        "target": None if view["target"] is None else _rows(values[cut]),
        "values": numbers(value_range(values), 4),
        "solutions": {label: _rows(solution) for label, solution in solutions.items()},
        "chosen": labels.get(chosen, chosen) if chosen is not None and chosen in view["arms"] else None,
    }
    if view["target"] is not None:
        payload["errors"] = {label: _rows(error) for label, error in errors.items()}
        payload["range"] = list(error_range(errors.values()))
    return payload


def _names(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients if len(clients) <= 3 else [*clients[:2], "..."]))
    return f"client{'s' if len(clients) > 1 else ''} {shown}"


def _rows(grid: statistics.Array) -> list[list[float | None]]:
    return [numbers(row, 4) for row in grid]


def _schedule(record: Record) -> Json:
    columns = {key: by_client(record, key) for key in SCHEDULE}
    moving = {key: lines for key, lines in columns.items() if varies(v for line in lines.values() for v in line)}
    if not moving:
        return {}
    seen = thin(len(record["metric"]), POINTS)
    total = max(map(len, moving.values()))
    shown = {key: dict(list(lines.items())[:CLIENTS]) for key, lines in moving.items()}
    lines = {key: {c: numbers(_pick(v, seen)) for c, v in clients.items()} for key, clients in shown.items()}
    return {"rounds": _rounds(record, seen), "clients": total, "lines": lines}


def _steering(record: Record, seen: np.ndarray[Any, np.dtype[np.int64]]) -> Json:
    keys = [key for key in STEERING if varies(record.get(key) or [])]
    accepted = record.get("accepted") or []
    if not keys and all(accepted):
        return {}
    lines = {key: numbers(_pick(record[key], seen)) for key in keys}
    return {"rounds": _rounds(record, seen), "lines": lines, "accepted": _pick(accepted, seen) if accepted else []}


def _rounds(record: Record, seen: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
    """The numbers of the rounds at these places, counted on from the warm-up."""
    return (seen + 1 + int(record.get("after") or 0)).tolist()


def _pick(values: Sequence[Any], seen: np.ndarray[Any, np.dtype[np.int64]]) -> list[Any]:
    return [values[place] for place in seen.tolist()]
