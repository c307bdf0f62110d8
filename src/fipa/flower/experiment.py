"""The experiments of `fipa run` on Flower: the same clients, the same rules, the same numbers to the last bit.

`app = client_app()` is all of a client_app.py, `app = server_app("demo", "FIPA controlled")` all of a server_app.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor

from fipa.config.load import load, validate
from fipa.config.schema import Experiment, dump
from fipa.errors import FipaError, instead_of
from fipa.federation.arm import Arm
from fipa.federation.parameters import Seen, save_theta
from fipa.federation.problem import Problem
from fipa.federation.site import Site
from fipa.federation.storage import write_json
from fipa.flower.client import client
from fipa.flower.node import framed
from fipa.flower.request import Request
from fipa.flower.strategy import FIPA
from fipa.layout import Layout, selected
from fipa.threads import threads

SETTINGS = ("seed", "rounds", "checkpoint", "output", "deadline", "quorum", "grace", "min-available-nodes", "precision")


def client_app() -> ClientApp:
    """Clients of any experiment: what to do comes with the messages."""
    return client(ClientApp(), site_of=_site_of)


def server_app(experiment: str, arm: str, overrides: Iterable[str] = (), **settings: Any) -> ServerApp:
    """A server that runs one arm of an experiment, with the `settings` of `run`.

    The app's run config comes before all of them: `experiment`, `arm`, `set` (changes with ";" in between), `seed`,
    `rounds`, `checkpoint`, `output`, `deadline`, `quorum`, `grace`, `min-available-nodes`, `precision`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given: dict[str, Any] = {name: value for name, value in context.run_config.items() if value != ""}
        changes = str(given["set"]).split(";") if "set" in given else overrides
        chosen = {name.replace("-", "_"): given[name] for name in SETTINGS if name in given}
        run(grid, given.get("experiment", experiment), given.get("arm", arm), changes, **settings | chosen)

    return app


def run(
    grid: Grid,
    name: str,
    arm_name: str,
    overrides: Iterable[str] = (),
    *,
    seed: int | None = None,
    rounds: int | None = None,
    output: str | Path | None = None,
    checkpoint: str | Path | None = None,
    **settings: Any,
) -> tuple[Tensor, Result]:
    """Run one arm of an experiment on the clients of a grid; return the trained parameters and Flower's result.

    Its warm-up comes first. The metric that `fipa run` reports is computed on the server after every round. The
    parameters also go to the safetensors file `output`, the metrics to a JSON file beside it. `settings` are those of
    `FIPA`.
    """
    _, experiment = load(name, overrides)
    seed = experiment.seeds[0] if seed is None else seed
    problem = experiment.factory()(seed)
    parts = _parts(experiment, problem, arm_name)
    config: dict[str, Any] = {"experiment": json.dumps(dump(experiment)), "seed": seed}
    config["threads"] = experiment.engine.threads  # for the same bits everywhere
    arrays = ArrayRecord(problem.load(problem.initial).state_dict())
    result: Result | None = None
    seen: Seen = {}

    def evaluate(k: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"metric": float(problem.evaluate(_flat(problem.layout, arrays)))})

    for part in parts:
        file = None if checkpoint is None else Path(checkpoint)
        if file is not None and part is not parts[-1]:
            file = file.with_name(f"{file.name}.warmup")
        strategy = FIPA(
            arm=part, seed=seed, params=part.params or problem.layout.names, checkpoint=file, fraction_evaluate=0.0,
            seen=seen if part.params is None else {},
            **{"min_available_nodes": len(problem.clients)} | settings,
        )  # fmt: skip
        last = part.last if rounds is None or part is not parts[-1] else rounds
        with threads(experiment.engine.threads):
            result = strategy.start(grid, arrays, last, train_config=ConfigRecord(config), evaluate_fn=evaluate)
        arrays, seen = result.arrays, strategy.seen
    assert result is not None
    names = problem.layout.names if parts[-1].params is None else selected(problem.layout.names, parts[-1].params)
    shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
    theta = _flat(Layout(tuple(names), tuple(shapes[name] for name in names)), arrays)
    if output is not None:
        save_theta(Path(output), theta)
        kinds = ("train_metrics_clientapp", "evaluate_metrics_serverapp")
        history = {kind: {k: dict(m) for k, m in getattr(result, kind).items()} for kind in kinds}
        write_json(Path(output).with_suffix(".json"), history)
    return theta, result


def _flat(layout: Layout, arrays: ArrayRecord) -> Tensor:
    tensors = arrays.to_torch_state_dict()
    return layout.flatten({name: tensors[name] for name in layout.names})


def _parts(experiment: Experiment, problem: Problem, name: str) -> list[Arm]:
    """An arm after its warm-up, or an error that says why it has no meaning on Flower."""
    arms = {arm.name: arm for arm in experiment.build(problem.least_squares)}
    if name not in arms:
        raise FipaError(f"there is no arm {name!r}: {instead_of(name, arms)}")
    arm, warmup = arms[name], experiment.build_warmup(problem.least_squares)
    parts = [warmup, arm] if warmup is not None and arm.after else [arm]
    reasons = {
        "it has no clients": arm.centralised,
        "its faults are simulated: here they are real": any(p.faults.drop + p.faults.late > 0 for p in parts),
        "clients are drawn by their examples, which the server does not know": any(
            p.participation.kind == "weighted" for p in parts
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise FipaError(f"the arm {name!r} runs with `fipa run`, not on Flower: {reason}")
    if len(parts) == 2 and arm.after < parts[0].last:  # it starts in the middle of the warm-up
        parts[0] = _shortened(parts[0], arm.after)
    return parts


def _shortened(arm: Arm, rounds: int) -> Arm:
    stages, left = [], rounds
    for stage in arm.stages:
        if left > 0:
            stages.append(replace(stage, rounds=min(stage.rounds, left)))
            left -= stage.rounds
    return replace(arm, stages=tuple(stages))


_sites: dict[tuple[Any, ...], Site] = {}


def _site_of(context: Context, request: Request, frame: Mapping[str, Tensor], config: Mapping[str, Any]) -> Site:
    """All clients of an experiment. The last site is kept: building the problem may take longer than a round."""
    key = (config["experiment"], config["seed"], request.params, request.frame)
    if key not in _sites:
        seed = int(config["seed"])
        problem = validate(json.loads(str(config["experiment"]))).factory()(seed)
        site = Site(framed(problem, request, frame), seed)
        _sites.clear()
        _sites[key] = site
    return _sites[key]
