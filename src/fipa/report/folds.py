"""The charts of the page that are folded until they are asked for: what each is called, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fipa.report.payload import CLIENTS, LABELS
from fipa.report.sections import Shown
from fipa.report.words import capitalised, listed

ONE_SEED = "First seed of the arm."


@dataclass(frozen=True)
class Chart:
    """A chart with its heading.

    menus
        Drop-downs above it that the page fills: "arm", or "arm" and "round".
    series
        Options of a drop-down for other series of a round, by their keys.
    """

    heading: str
    key: str
    note: str = ""
    menus: tuple[str, ...] = ()
    series: tuple[tuple[str, str], ...] = ()


def charts(group: Sequence[Shown], data: dict[str, Any]) -> list[Chart]:
    """The charts that these runs have data for, in the order of the page."""
    return [*_of_rounds(group, data), *_of_clients(data), *_of_models(data)]


def _of_rounds(group: Sequence[Shown], data: dict[str, Any]) -> Iterator[Chart]:
    for index, view in enumerate(data["views"]):
        if "warmup" in view:
            heading = "Warm-up" if len(group) == 1 else f"Warm-up of {group[index].results['experiment']}"
            yield Chart(heading, f"warmup-{index}", _warm_up_note(view["warmup"]))
    known = {key for arm in data["arms"] for key, band in arm.get("series", {}).items() if any(band["median"])}
    shown = tuple((key, name) for key, name in LABELS.items() if key in known)
    if shown:
        yield Chart("Round by round", "series", series=shown)


def _of_clients(data: dict[str, Any]) -> Iterator[Chart]:
    some = {key for arm in data["arms"] for key in arm}
    if "spectra" in some:
        note = f"Eigenvalues that each client sent. {ONE_SEED}"
        yield Chart("Spectra of the clients", "spectra", note, ("arm", "round"))
    if "schedule" in some:
        note = f"{ONE_SEED} With more than {CLIENTS} clients, the first {CLIENTS} are shown."
        yield Chart("Ranks and local steps of the clients", "schedule", note, ("arm",))
    if "steering" in some:
        yield Chart("Step control", "steering", f"{ONE_SEED} A cross marks a round whose step was rejected.", ("arm",))
    if "gap" in some:
        note = "Distance of the parameters to the reference's, relative to their norm, median over the seeds; "
        yield Chart("Gap to the reference trajectory", "gap", note + "dotted: the nearest c/K.")


def _of_models(data: dict[str, Any]) -> Iterator[Chart]:
    for index, view in enumerate(data["views"]):
        if "curves" in view:
            title = view["curves"]["title"]
            yield Chart(capitalised(title) or "Fitted functions", f"fit-{index}")
            if "errors" in view["curves"]:
                yield Chart("Pointwise error" + (f": {title}" if title else ""), f"error-{index}")
        if "maps" in view:
            errors = "errors" in view["maps"]
            note = "Errors as powers of ten; the" if errors else "The"
            note += " colour scales are the same for all arms. Boxes: the clients' regions."
            heading = view["maps"]["title"] or ("Solutions and errors" if errors else "Solutions")
            yield Chart(capitalised(heading), f"maps-{index}", note, ("arm",))
        if "shares" in view:
            note = f"{view['shares']['note']} An empty cell: none of this class. First seed."
            yield Chart("Classes of the clients", f"shares-{index}", note)


def _warm_up_note(warm_up: dict[str, Any]) -> str:
    starts = [str(k) for k in warm_up["starts"]]
    rounds = f"round{'s' if len(starts) > 1 else ''} {listed(starts)}" if starts else ""
    note = f"Arms start from the model after {rounds}." if starts else "No arm starts from it."
    return (f"Thin lines: the {len(warm_up['seeds'])} seeds; thick: their mean. " if warm_up["seeds"] else "") + note
