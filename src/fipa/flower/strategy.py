"""`FIPA`: any rule of this library as a Flower strategy, for servers that live longer than some of their clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

import fipa
from fipa.aggregation.rule import Rule, plan_for
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.rule import LocalRule
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError
from fipa.federation.arm import Arm
from fipa.federation.checkpoint import load_state, save_state
from fipa.federation.control import StepControl
from fipa.federation.coordinator import Coordinator, State, means
from fipa.federation.engine import carry
from fipa.federation.parameters import Seen
from fipa.federation.participation import Faults, Share
from fipa.federation.record import RoundRecord, event
from fipa.federation.stage import Stage
from fipa.flower.answer import Limits, finite_numbers
from fipa.flower.codec import Precision, check_precision
from fipa.flower.roster import Roster, collect, post
from fipa.flower.transport import Cargo, FlowerTransport, Patience
from fipa.layout import Layout, ParamSelection, selected
from fipa.randomness import seed_for

BUFFERS = ("running_mean", "running_var")  # of BatchNorm: averaged, not trained
TRAIN, EVALUATE, CENTRAL = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"
OURS = ("configure_train", "aggregate_train")  # of Flower's strategies, which a coordinator does instead
KEPT = 10_000  # events
FLOOR = 0.01


class FIPA(FedAvg):
    """Fisher-informed aggregation, or any other rule of `fipa`, in the place of Flower's `FedAvg`.

    Clients are apps made with `fipa.flower.client`. Those that train by themselves answer with `fipa.flower.reply`.
    Those that have an objective are told how to train by `local`, and can judge the server's steps.

    Parameters
    ----------
    rule
        Default: `fipa.CompletedFIPA(damping=0.5, step=0.25)`; with Gauss-Newton clients `fipa.FIPA(floor=0.01)`.
    local
        How clients with an objective train: `fipa.GaussNewton()`, `fipa.SGD(...)`, ...; None leaves it to the app.
    plan
        What clients tell of their curvature; by default what the rule needs, sketches of rank 20.
    control
        Adapts damping or step to the loss that clients report of a proposed model. Default with Gauss-Newton clients:
        `fipa.StepControl(select="best", initial=0.01)`, else none; `False` for none.
    warmup_rounds, warmup_rule, warmup_local
        So many rounds with that rule, `fipa.FedAvg()`, and that training first.
    lr_scale
        Factor for the clients' learning rate after the warm-up: `message.content["config"]["lr-scale"]`.
    params
        Names or patterns of the parameters that are trained; by default all arrays of floating-point numbers but the
        statistics of BatchNorm, which are averaged.
    precision
        Of matrices on their way to the server: `"float32"`, `"bfloat16"` or `"int8"`.
    deadline, quorum, grace
        A question is closed after so many seconds if that share of the clients asked has answered, and the others have
        had so many seconds of grace since. Without a deadline it waits for all of them, up to the `timeout` of `start`.
    late
        A late answer counts in a later round, with the sketch it was made with, and its weight times this to the
        power of its age in rounds; None for not at all.
    limits
        What is taken from a client at most.
    seed
        Of all choices: the same seed gives the same run, whatever the nodes' ids and the order of their replies.
    checkpoint
        File for the state after every round. If it is there already, `start` resumes from it.
    arm
        Stages and participation all at once, as experiments have them, in the place of the settings above.
    seen
        What an earlier strategy's `seen` tells of the clients, for a rule that remembers them.
    **settings
        Of Flower's `FedAvg`: `fraction_train`, `min_available_nodes` and so on.

    Attributes
    ----------
    records
        Of all rounds so far.
    events
        What happened, by round and client.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        local: LocalRule | None = None,
        plan: CurvaturePlan | None = None,
        control: StepControl | bool | None = None,
        warmup_rounds: int = 0,
        warmup_rule: Rule | None = None,
        warmup_local: LocalRule | None = None,
        lr_scale: float = 1.0,
        params: ParamSelection = None,
        precision: Precision = "float32",
        deadline: float | None = None,
        quorum: float = 0.5,
        grace: float = 5.0,
        late: float | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        arm: Arm | None = None,
        seen: Seen | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_precision(precision)
        if (late is not None and not 0 < late <= 1) or warmup_rounds < 0 or not lr_scale > 0:
            raise FipaError("FIPA: late lies between 0 and 1, warmup_rounds is not negative, and lr_scale positive")
        replaced = [name for name in OURS if getattr(type(self), name) is not getattr(FedAvg, name)]
        if replaced:
            raise FipaError(f"{type(self).__name__}.{replaced[0]} would never be called: FIPA has rounds of its own")
        newton = isinstance(local, GaussNewton)
        default = fipa.FIPA(floor=FLOOR) if newton else fipa.CompletedFIPA(damping=0.5, step=0.25)
        self.rule = default if rule is None else rule
        if control is True or (control is None and newton and rule is None):
            control = StepControl(select="best", initial=FLOOR) if newton else StepControl()
        plan = plan_for(self.rule) if plan is None else plan
        first = fipa.FedAvg() if warmup_rule is None else warmup_rule
        self._main = Stage(self.rule, local, 1, plan, lr_scale, control=control or None)
        self._warmup = Stage(first, warmup_local, warmup_rounds, plan_for(first)) if warmup_rounds else None
        self._arm, self.params, self.precision, self.seed, self.late = arm, params, precision, seed, late
        self.patience = Patience(deadline, quorum, grace, least=max(self.min_available_nodes, self.min_train_nodes))
        self.limits = limits or Limits()
        self.seen: Seen = dict(seen or {})
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        self.records: list[RoundRecord] = []
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._roster = Roster()
        self._metrics: dict[str, dict[int, dict[str, Any]]] = {}

    def arm(self, num_rounds: int) -> Arm:
        """What happens in so many rounds."""
        share = Share(self.fraction_train, self.min_train_nodes)
        if self._arm is not None:
            count = self._arm.participation.count
            return replace(self._arm, participation=Share(1.0) if count is None else Share(0.0, count), average=0)
        warmup = () if self._warmup is None else (self._warmup,)
        length = max(1, num_rounds - sum(stage.rounds for stage in warmup))
        faults = Faults(use_late=self.late is not None, discount=self.late or 1.0)
        return Arm("FIPA", (*warmup, replace(self._main, rounds=length)), share, faults, average=0)

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        log(INFO, "\t└──> Stages: %s", "; ".join(str(stage) for stage in self.arm(10**9).stages))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run up to `num_rounds` rounds, those of an earlier process included; arguments as for Flower's strategies."""
        self.summary()
        initial = dict(initial_arrays.to_torch_state_dict())
        cargo, theta = self._cargo(initial)
        coordinator = Coordinator(self.arm(num_rounds), self.seed, survives=True)
        transport = self._transport(grid, cargo, tuple(initial), replace(self.patience, timeout=timeout), train_config)
        state = self._resumed(coordinator.start(theta, cargo.buffers, self.seen))
        arrays = cargo.arrays(state.theta, state.buffers, tuple(initial))
        if evaluate_fn and state.round_number == coordinator.arm.after:
            self._note(CENTRAL, state.round_number, evaluate_fn(state.round_number, arrays))
        while state.round_number < num_rounds:
            state, record = carry(coordinator.round(state), transport)
            k, arrays = state.round_number, cargo.arrays(state.theta, state.buffers, tuple(initial))
            self._keep(record)
            self._evaluate(k, arrays, transport, evaluate_config or ConfigRecord())
            if evaluate_fn:
                self._note(CENTRAL, k, evaluate_fn(k, arrays))
            if self.checkpoint is not None:
                save_state(self.checkpoint, state, durable=True, settings=self._settings(), metrics=self._metrics)
        self.seen = state.seen
        numbers = {
            kind: {k: MetricRecord(values) for k, values in self._metrics.get(kind, {}).items()}
            for kind in (TRAIN, EVALUATE, CENTRAL)
        }
        return Result(arrays, **numbers)

    def _transport(
        self, grid: Grid, cargo: Cargo, names: tuple[str, ...], patience: Patience, config: ConfigRecord | None
    ) -> FlowerTransport:
        return FlowerTransport(
            grid, cargo, names, seed=self.seed, patience=patience, precision=self.precision, limits=self.limits,
            config=config, roster=self._roster,
        )  # fmt: skip

    def _cargo(self, arrays: Mapping[str, Tensor]) -> tuple[Cargo, Tensor]:
        """Which of the arrays are trained, averaged or left alone; and the trained ones, flat."""
        floating = [name for name, tensor in arrays.items() if tensor.is_floating_point()]
        statistics = [name for name in floating if name.endswith(BUFFERS)]
        names = selected(floating, self.params) if self.params else [n for n in floating if n not in statistics]
        trained = {name: arrays[name] for name in names}
        buffers = {name: arrays[name] for name in statistics if name not in trained}
        frame = {name: tensor for name, tensor in arrays.items() if name not in trained and name not in buffers}
        layout = Layout.of(trained)
        return Cargo(layout, buffers, frame), layout.flatten(trained)

    def _keep(self, record: RoundRecord) -> None:
        """Log a round, and keep what is known of it."""
        self.records.append(record)
        for happened in record.events:
            self._event(happened, WARNING if "refused" in happened["text"] or happened["client"] is None else INFO)
        self._note(TRAIN, record.round, MetricRecord(numbers_of(record)))

    def _event(self, happened: dict[str, Any], level: int) -> None:
        self.events.append(happened)
        who = "server" if happened["client"] is None else f"client {happened['client']}"
        log(level, "round %d, %s: %s", happened["round"], who, happened["text"])

    def _evaluate(self, k: int, arrays: ArrayRecord, transport: FlowerTransport, config: ConfigRecord) -> None:
        """Let clients judge the model, as many as `fraction_evaluate` says."""
        questions = list(self.configure_evaluate(k, arrays, config, transport.grid))
        if questions:
            replies = collect(transport.grid, post(transport.grid, questions), transport.patience)
            self._note(EVALUATE, k, self.aggregate_evaluate(k, replies))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to judge the model, as many as `fraction_evaluate` says."""
        if self.fraction_evaluate == 0.0:
            return []
        present = self._roster.present(grid, self.patience.least)
        share, seed = Share(self.fraction_evaluate, self.min_evaluate_nodes), seed_for(self.seed, "evaluate")
        nodes = [list(present.values())[place] for place in share.select([1] * len(present), seed, server_round)]
        config = ConfigRecord(dict(config) | {"server-round": server_round})
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(content, nodes, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Weighted means of the clients' numbers, added up in the order of the clients."""
        rows = []
        for reply in sorted(replies, key=lambda reply: self._roster.partition(reply.metadata.src_node_id)):
            reason, weight, numbers = self._judgement(reply)
            if reason is None:
                rows.append((weight, finite_numbers(numbers)))
            else:
                text = f"refused: the evaluation of node {reply.metadata.src_node_id} {reason}"
                self._event(event(server_round, None, text), WARNING)
        return MetricRecord(dict(means(rows))) if rows else None

    def _judgement(self, reply: Message) -> tuple[str | None, int, dict[str, Any]]:
        """What is wrong with an evaluation, its weight, and its numbers."""
        if reply.has_error() or len(reply.content.metric_records) != 1:
            return (reply.error.reason if reply.has_error() else "has not one MetricRecord"), 0, {}
        numbers: dict[str, Any] = dict(next(iter(reply.content.metric_records.values())))
        weight = numbers.pop(self.weighted_by_key, None)
        if type(weight) is not int or not 0 < weight <= self.limits.examples:
            return f"has {self.weighted_by_key} = {weight!r}", 0, {}
        return None, weight, numbers

    def _resumed(self, start: State) -> State:
        try:
            loaded = load_state(self.checkpoint) if self.checkpoint is not None else None
        except FipaError as error:
            raise FipaError(f"the checkpoint {error}: delete it to begin anew, or choose another file") from error
        if loaded is None:
            return start
        state, extra = loaded
        before, now = extra.get("settings", {}), self._settings()
        for name in now:
            if now[name] != before.get(name):
                raise FipaError(
                    f"the checkpoint {self.checkpoint} was written with {name} = {before.get(name)}, now it is "
                    f"{now[name]}: use the same settings, or another checkpoint"
                )
        if state.theta.shape != start.theta.shape:
            raise FipaError(
                f"the checkpoint {self.checkpoint} has {state.theta.numel()} parameters, the model "
                f"{start.theta.numel()}: use the same model, or another checkpoint"
            )
        log(INFO, "resuming after round %d of %s", state.round_number, self.checkpoint)
        self._metrics = extra.get("metrics", {})
        return state

    def _settings(self) -> dict[str, str]:
        """What must not change between a checkpoint and its use."""
        arm = self.arm(10**9)
        settings = {f"stage {i}": repr(stage) for i, stage in enumerate(arm.stages)}
        settings |= {"participation": repr(arm.participation), "params": repr(self.params)}
        return settings | {name: repr(getattr(self, name)) for name in ("precision", "seed")}

    def _note(self, kind: str, k: int, metrics: MetricRecord | None) -> None:
        if metrics is not None:
            log(INFO, "round %d, %s: %s", k, kind, dict(metrics))
            self._metrics.setdefault(kind, {})[k] = dict(metrics)


def numbers_of(record: RoundRecord) -> dict[str, Any]:
    """A round as Flower's metrics: what clients reported, and what it took."""
    in_time = int(record.metrics.get("pooled-clients", len(record.local_steps)))
    known = {"loss": record.loss, "damping": record.damping, "step": record.step}
    return dict(record.metrics) | {name: value for name, value in known.items() if value is not None} | {
        "clients": in_time, "late": max(0, len(record.clients) - in_time), "trials": record.trials,
        "accepted": int(record.accepted), "step-length": record.step_length, "uplink-bytes": record.uplink_bytes,
        "downlink-bytes": record.downlink_bytes, "trips": record.trips, "messages": record.messages,
        "seconds": record.seconds,
    }  # fmt: skip
