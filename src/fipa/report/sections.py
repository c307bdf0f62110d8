"""What the charts of runs that share a metric draw: one payload for the report and for the page that watches runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fipa.errors import FipaError
from fipa.report import axes
from fipa.report.data import Results, best_federated
from fipa.report.payload import LABELS, arm_payload, view_payload
from fipa.report.stages import shares_payload, warm_up_payload
from fipa.report.style import arm_styles
from fipa.report.verdict import COLOURED, in_colour


@dataclass(frozen=True)
class Shown:
    """One loaded run and the labels of its arms on this page."""

    results: Results
    views: dict[str, Any]
    labels: dict[str, str]


def labelled(names: Sequence[str], contents: Sequence[tuple[Results, dict[str, Any]]]) -> list[Shown]:
    """Results and views of runs, with labels for their arms: those of several runs begin with the run's name."""
    runs = []
    for name, (results, views) in zip(names, contents, strict=True):
        labels = {arm: arm if len(names) == 1 else f"{name}: {arm}" for arm in results["arms"]}
        runs.append(Shown(results, views, labels))
    repeated = [label for label, count in Counter(x for r in runs for x in r.labels.values()).items() if count > 1]
    if repeated:
        raise FipaError(f"the same run was given twice: {repeated[0]!r}")
    return runs


def grouped(runs: Sequence[Shown]) -> list[list[Shown]]:
    """Runs with the same metric side by side: they share their charts."""
    groups: dict[tuple[str, ...], list[Shown]] = {}
    for run in runs:
        groups.setdefault(tuple(str(v) for v in run.results["metric"].values()), []).append(run)
    return list(groups.values())


def section_payload(group: Sequence[Shown]) -> dict[str, Any]:
    """All that the charts of a group draw."""
    arms = [(run, arm) for run in group for arm in run.results["arms"]]
    controls = [run.labels.get(run.results["control"]) for run in group]
    chosen = [run.labels[arm] for run in group for arm in in_colour(run.results, max(2, COLOURED // len(group)))]
    styles = arm_styles([run.labels[arm] for run, arm in arms], controls, chosen)
    payloads = [arm_payload(run.results, arm, run.labels[arm], styles[run.labels[arm]]) for run, arm in arms]
    if len({payload.get("after", 0) for payload in payloads}) > 1:  # to be compared, arms need a common start
        for payload in payloads:
            payload["own"] = [k - payload.get("after", 0) for k in payload["rounds"]]
    metric = group[0].results["metric"]
    return {
        "metric": metric,
        "axes": _axes(payloads, metric["goal"]),
        "names": LABELS,
        "arms": payloads,
        "chosen": chosen,
        "views": [_view(run) for run in group],
    }


def _axes(arms: Sequence[dict[str, Any]], goal: str) -> list[dict[str, Any]]:
    """The axes that some arm has, the one that the page opens with first."""
    warm = any("after" in arm for arm in arms)
    return [
        {
            "key": key,
            "button": axes.AXES[key].button,
            "title": axes.AXES[key].title + (f"<br>{axes.SINCE}" if warm and key != "rounds" else ""),
            "log": axes.AXES[key].log,
        }
        for key in axes.in_order(goal)
        if any(key in arm for arm in arms)
    ]


def _view(run: Shown) -> dict[str, Any]:
    """What is shown of one run alone: pictures, the warm-up, the clients' classes."""
    view = view_payload(run.views, run.labels, best_federated(run.results))
    if shares := run.views.get("shares"):
        view["shares"] = shares_payload(shares)
    if warm_up := warm_up_payload(run.results):
        view["warmup"] = warm_up
    return view
