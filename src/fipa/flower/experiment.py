"""The experiments of `fipa run` on Flower: the same clients, the same rules, the same numbers to the last bit.

`app = client_app()` is all of a client_app.py, `app = server_app("demo", "FIPA completed")` all of a server_app.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor

from fipa.config.load import load, validate
from fipa.config.schema import Experiment, dump
from fipa.errors import FipaError
from fipa.federation.engine import Arm
from fipa.federation.messages import Order
from fipa.federation.parameters import save_theta
from fipa.federation.problem import Problem
from fipa.federation.site import Site
from fipa.federation.stage import floor_of, stage_at
from fipa.federation.storage import write_json
from fipa.flower.answer import Answer, encode
from fipa.flower.client import ARRAYS, client
from fipa.flower.request import Request
from fipa.flower.strategy import FIPA, Phase
from fipa.layout import Layout

CONFIG = "config"


class ArmStrategy(FIPA):
    """An arm's stages and participation as a strategy."""

    def __init__(self, arm: Arm, seed: int, **settings: Any) -> None:
        super().__init__(arm.stages[-1].rule, seed=seed, fraction_evaluate=0.0, **settings)
        self._arm = arm

    def phase(self, round_number: int) -> Phase:
        """What the arm does in a round."""
        stage, place = stage_at(self._arm.stages, round_number)
        return Phase(stage.rule_at(place, self.seed), stage.plan, stage.lr_scale, since=round_number - place)

    def _count(self, present: int) -> int:
        return self._arm.participation.count or present

    def _settings(self) -> dict[str, str]:
        stages = {f"stage {i}": repr(stage) for i, stage in enumerate(self._arm.stages)}
        return super()._settings() | stages | {"participation": repr(self._arm.participation)}


def client_app() -> ClientApp:
    """Clients of any experiment: what to do comes with the messages."""
    app = client(ClientApp())

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request, config = Request.of(message.content), message.content.config_records[CONFIG]
        site, arm = _site(str(config["experiment"]), str(config["arm"]), int(str(config["seed"])))
        stage, _ = stage_at(arm.stages, request.round_number)
        arrays = message.content.array_records[ARRAYS].to_torch_state_dict()
        theta = site.problem.layout.flatten({name: arrays[name] for name in site.problem.layout.names})
        order = Order(
            request.round_number, theta, stage.local, stage.lr_scale, stage.plan, floor_of(stage.rule),
            adaptive_steps=stage.adaptive_steps,
        )  # fmt: skip
        (answer,) = site.work((request.client,), order)
        assert answer.loss is not None
        content = encode(request, Answer(answer.update, metrics={"loss": answer.loss}))
        return Message(content, reply_to=message)

    return app


SETTINGS = ("seed", "rounds", "checkpoint", "output", "deadline", "quorum", "min-available-nodes", "precision")


def server_app(experiment: str, arm: str, overrides: Iterable[str] = (), **settings: Any) -> ServerApp:
    """A server that runs one arm of an experiment, with the `settings` of `run`.

    The app's run config comes before all of them: `experiment`, `arm`, `set` (changes with ";" in between), `seed`,
    `rounds`, `checkpoint`, `output`, `deadline`, `quorum`, `min-available-nodes`, `precision`.
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
    **settings: Any,
) -> tuple[Tensor, Result]:
    """Run one arm of an experiment on the clients of a grid; return the final parameters and Flower's result.

    The metric that `fipa run` reports is computed on the server after every round. The parameters also go to the
    safetensors file `output`, the metrics to a JSON file beside it. `settings` are those of `FIPA`.
    """
    _, experiment = load(name, overrides)
    seed = experiment.seeds[0] if seed is None else seed
    problem = experiment.factory()(seed)
    arm = _arm(experiment, problem, arm_name)
    strategy = ArmStrategy(arm, seed, **{"min_available_nodes": len(problem.clients)} | settings)
    config: dict[str, Any] = {"experiment": json.dumps(dump(experiment)), "arm": arm_name, "seed": seed}

    def evaluate(k: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"metric": float(problem.evaluate(_flat(problem.layout, arrays)))})

    result = strategy.start(
        grid,
        ArrayRecord({key: t.clone() for key, t in problem.layout.unflatten(problem.initial).items()}),
        num_rounds=rounds or arm.last,
        train_config=ConfigRecord(config),
        evaluate_fn=evaluate,
    )
    theta = _flat(problem.layout, result.arrays)
    if output is not None:
        save_theta(Path(output), theta)
        kinds = ("train_metrics_clientapp", "evaluate_metrics_serverapp")
        history = {kind: {k: dict(m) for k, m in getattr(result, kind).items()} for kind in kinds}
        write_json(Path(output).with_suffix(".json"), history)
    return theta, result


def _flat(layout: Layout, arrays: ArrayRecord) -> Tensor:
    tensors = arrays.to_torch_state_dict()
    return layout.flatten({name: tensors[name] for name in layout.names})


def _arm(experiment: Experiment, problem: Problem, name: str) -> Arm:
    """An arm with its warm-up that can be run on Flower, or an error that says why it cannot."""
    arms = {arm.name: arm for arm in experiment.build(problem.least_squares)}
    if name not in arms:
        raise FipaError(f"there is no arm {name!r}: choose one of {', '.join(map(repr, arms))}")
    arm, warmup = arms[name], experiment.build_warmup(problem.least_squares)
    if warmup is not None and arm.after and arm.start is None and warmup.participation == arm.participation:
        arm = replace(arm, stages=warmup.stages + arm.stages, after=0)
    reasons = {
        "step_control asks clients again within a round: set it to false": any(s.control for s in arm.stages),
        "an adaptive rank asks clients for gradients first": any(s.adaptive_rank for s in arm.stages),
        "its clients remember things from round to round": any(s.local.remembers for s in arm.stages),
        "it has no clients": arm.centralised,
        "its faults are simulated: here they are real": arm.faults.drop + arm.faults.late > 0,
        "clients are drawn by their examples, which the server does not know": arm.participation.kind == "weighted",
        "it starts in a warm-up with other clients, or trains some parameters only": bool(arm.params or arm.after),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise FipaError(f"the arm {name!r} runs with `fipa run`, not on Flower: {reason}")
    return arm


@lru_cache(maxsize=1)
def _site(experiment: str, arm: str, seed: int) -> tuple[Site, Arm]:
    """Built once per process."""
    config = validate(json.loads(experiment))
    problem = config.factory()(seed)
    return Site(problem, seed), _arm(config, problem, arm)
