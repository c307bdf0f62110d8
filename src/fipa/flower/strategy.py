"""`FIPA`: any rule of this library as a Flower strategy, for servers that live longer than some of their clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fipa.aggregation.rule import Rule
from fipa.aggregation.shared import SharedFIPA
from fipa.clients.gradient import FullGradient
from fipa.clients.rule import LocalRule
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError
from fipa.federation.arm import Arm
from fipa.federation.coordinator import means
from fipa.federation.parameters import Seen
from fipa.federation.participation import Faults, Share
from fipa.federation.record import RoundRecord, event
from fipa.federation.safety import Safety
from fipa.federation.stage import Control
from fipa.flower.answer import Limits, judgements
from fipa.flower.checkpoints import Checkpoints
from fipa.flower.codec import Precision, check_precision
from fipa.flower.journal import Journal
from fipa.flower.request import OBJECTIVE
from fipa.flower.roster import Roster, collect, post
from fipa.flower.run import Run
from fipa.flower.settings import check, main_stage, settings_of, warmup_stage, whole
from fipa.flower.transport import Cargo, FlowerTransport, Patience, Validate
from fipa.layout import ParamSelection
from fipa.randomness import seed_for
from fipa.report.flower import ENDLESS, EVALUATE, TRAIN
from fipa.spill import MEMORY_LIMIT

OURS = ("configure_train", "aggregate_train")  # of Flower's strategies, which a coordinator does instead


class FIPA(FedAvg):
    """Fisher-informed aggregation, or any other rule of `fipa`, in the place of Flower's `FedAvg`.

    Clients are apps made with `fipa.flower.client`. Those that train by themselves answer with `fipa.flower.reply`.
    Those that have an objective are told how to train by `local`, and can judge the server's steps.

    Parameters
    ----------
    rule
        By default, if all clients have an objective, `fipa.SharedFIPA()` with `local=fipa.FullGradient()`; if apps
        train by themselves `fipa.CompletedFIPA(damping=1.0, pull=0.0)`, with `GaussNewton` `fipa.FIPA(floor=0.01)`.
    local
        How clients with an objective train: `fipa.FullGradient()`, `fipa.SGD(...)`, ...; None leaves it to the app.
    plan
        What clients report about their curvature, in full; by default what the rule needs.
    rank, labels, examples
        Instead of `plan`, for rules that need sketches: their rank (10), the number of labels per example that are
        sampled from the model's predictions (1; 0 for all classes), and the most examples (32, and fewer if that takes
        longer than training). Not with Gauss-Newton clients, whose sketches are exact.
    control
        Takes a step only if it lowers the loss: `fipa.StepControl(...)`, True or False. On by default with the default
        rule: at most four steps are tried, each a third as long as the one before.
    validate
        `validate(arrays)` computes the loss of a model on the server. Without it clients do: those with an objective
        use that, others the app's own `@app.evaluate()` function, which must return a loss.
    loss_name
        Name of the loss among the metrics of that function; by default the one name with "loss" in it.
    safety
        `fipa.federation.safety.Safety`: the longest step, slower clients after rounds without one, and the share of a
        client's time for curvature. By default on with the default rule; None for none.
    warmup_rounds, warmup_rule, warmup_local
        Number of rounds that come first, their rule, `fipa.FedAvg()` by default, and their training, which must be
        given with `local`.
    lr_scale
        Factor for the clients' learning rate after the warm-up. The `lr` of `train_config` is multiplied by it, or
        else it is `message.content["config"]["lr-scale"]`. A client that reads neither is refused.
    params
        Names or patterns of the parameters that are trained; by default those that clients do not freeze. Buffers of
        floating-point numbers that training changes, such as BatchNorm's statistics, are averaged.
    precision
        Precision of matrices on their way to the server: `"float32"`, `"bfloat16"` or `"int8"`.
    deadline, quorum, grace
        A question is closed after `deadline` seconds if a share `quorum` of the clients has answered, and the others
        have had `grace` more seconds since then. Without a deadline it waits for all of them, up to the `timeout` of
        `start`. If there is no quorum without nodes that died, the server waits for them and asks again: for all with
        `quorum=1.0`.
    late
        A late answer counts in a later round, with the sketch it was made with, and its weight times this to the power
        of its age in rounds; None drops it.
    seed
        Seed of all choices: the same seed gives the same run, whatever the nodes' ids and the order of their replies.
    checkpoint, keep
        File for the state after every round. If it exists, `start` resumes from it. Settings may differ, except for
        those that the error names. Next to it are the states after the last `keep` rounds, and the best one.
    stop_after
        Number of rounds in a row without a usable answer, a quorum or a judge after which the run ends with an error; 0
        for never.
    memory_limit
        Bytes of a round's replies that the server holds in memory. The rest goes to temporary files, and sketches that
        are larger together are solved with by iteration, see `fipa.aggregate`.
    limits, output
        Limits for what a client may send. A folder for results.json, from which `fipa report` makes a page.
    arm
        Stages and participation together, as experiments have them, instead of the settings above.
    seen, **settings
        What an earlier strategy's `seen` says about the clients. The settings of Flower's `FedAvg`: `fraction_train`,
        ...

    Attributes
    ----------
    records, events
        Records of all rounds so far; and events, each with its round and client.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        local: LocalRule | None = None,
        plan: CurvaturePlan | None = None,
        rank: int | None = None,
        labels: int | None = None,
        examples: int | None = None,
        control: Control | bool | None = None,
        validate: Validate | None = None,
        loss_name: str | None = None,
        safety: Safety | bool | None = True,
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
        memory_limit: int = MEMORY_LIMIT,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        keep: int = 3,
        stop_after: int = 3,
        output: str | Path | None = None,
        arm: Arm | None = None,
        seen: Seen | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_precision(precision)
        check(locals())
        replaced = [name for name in OURS if getattr(type(self), name) is not getattr(FIPA, name)]
        if replaced and type(self).start is FIPA.start:
            text = "would never be called: FIPA has rounds of its own, unless `start` is your own, too, and calls it"
            raise FipaError(f"{type(self).__name__}.{replaced[0]} {text}")
        sketches = {"rank": rank, "labels": labels, "examples": examples}
        self._main = main_stage(rule, local, plan, control, safety, lr_scale, sketches)
        self.rule = self._main.rule
        said = (rule, local, plan, arm, *sketches.values(), control, None if safety is True else safety or False)
        self._open = all(value is None for value in said) and lr_scale == 1.0 and not warmup_rounds
        self._warmup = warmup_stage(warmup_rounds, warmup_rule, warmup_local, local)
        self._arm, self.params, self.precision, self.seed, self.late = arm, params, precision, seed, late
        self.patience = Patience(deadline, quorum, grace, least=max(self.min_available_nodes, self.min_train_nodes))
        self.memory_limit = memory_limit if arm is None else arm.memory_limit
        self.limits, self._validate, self._loss_name = limits or Limits(), validate, loss_name
        self.lr_scale, self.stop_after, self.seen = lr_scale, stop_after, dict(seen or {})
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        self.output = Path(output) if output is not None else None
        self.checkpoints = Checkpoints(self.checkpoint, keep)
        self.journal = Journal()
        self._roster = Roster()
        self._run: Run | None = None  # of a subclass with a loop of its own

    @property
    def records(self) -> list[RoundRecord]:
        """Records of all rounds so far."""
        return self.journal.records

    @property
    def events(self) -> deque[dict[str, Any]]:
        """Events of all rounds so far, each with its round and client."""
        return self.journal.events

    def arm(self, num_rounds: int) -> Arm:
        """The stages and participation of a run of that many rounds."""
        share = Share(self.fraction_train, self.min_train_nodes)
        if self._arm is not None:
            count = self._arm.participation.count
            return replace(self._arm, participation=Share(1.0) if count is None else Share(0.0, count), average=0)
        warmup = () if self._warmup is None else (self._warmup,)
        length = max(1, num_rounds - sum(stage.rounds for stage in warmup))
        faults = Faults(use_late=self.late is not None, discount=self.late or 1.0)
        stages = (*warmup, replace(self._main, rounds=length))
        return Arm("FIPA", stages, share, faults, average=0, memory_limit=self.memory_limit)

    def decide(self, grid: Grid, stored: str | None) -> bool:
        """Choose the default rule and training: a shared basis if all clients have an objective, or as `stored`."""
        if self._open:
            there = {} if stored else self._roster.present(grid, self.patience.least)
            shared = stored == SharedFIPA.__name__ if stored else self._roster.all_have(OBJECTIVE, there.values())
            self._main = main_stage(None, FullGradient() if shared else None, None, None, True, 1.0, {})
            self.rule = self._main.rule
        return isinstance(self.rule, SharedFIPA) and self._open

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
        if not whole(num_rounds, 1):
            raise FipaError(f"start(num_rounds={num_rounds!r}): must be a whole number of at least 1")
        patience = replace(self.patience, timeout=timeout)
        initial = dict(initial_arrays.to_torch_state_dict())
        return Run(self, grid, initial, num_rounds, patience, train_config, evaluate_config).rounds(evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """For a `start` of your own that is written after Flower's: all of a round, which leaves no message to send.

        The config may change from round to round. The arrays may not: they are what the last round has come to.
        """
        if self._run is None:
            self._run = Run(self, grid, dict(arrays.to_torch_state_dict()), ENDLESS, self.patience, config)
        self._run.alone(arrays, config)
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The arrays and metrics of the round that `configure_train` has run."""
        if self._run is None:
            raise FipaError("FIPA.aggregate_train comes after configure_train: call super().start(...), or both")
        return self._run.arrays, MetricRecord(self.journal.metrics[TRAIN][self._run.state.round_number])

    def transport(
        self, grid: Grid, cargo: Cargo, names: tuple[str, ...], patience: Patience, config: ConfigRecord | None,
        **more: Any,
    ) -> FlowerTransport:  # fmt: skip
        """The transport that carries the server's questions."""
        return FlowerTransport(
            grid, cargo, names, seed=self.seed, patience=patience, precision=self.precision, limits=self.limits,
            config=config, roster=self._roster, validate=self._validate, loss_name=self._loss_name,
            strict=self.lr_scale != 1.0, memory_limit=self.memory_limit, **more,
        )  # fmt: skip

    def judge(self, k: int, arrays: ArrayRecord, transport: FlowerTransport, config: ConfigRecord) -> None:
        """Let clients judge the model, as many as `fraction_evaluate` says."""
        questions = list(self.configure_evaluate(k, arrays, config, transport.grid))
        if questions:
            replies = collect(transport.grid, post(transport.grid, questions), transport.patience)
            self.journal.note(EVALUATE, k, self.aggregate_evaluate(k, replies))

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
        ordered = sorted(replies, key=lambda reply: self._roster.partition(reply.metadata.src_node_id))
        rows, refused = judgements(ordered, self.weighted_by_key, self.limits.examples)
        for text in refused:
            self.journal.say(event(server_round, None, text), WARNING)
        return MetricRecord(dict(means(rows))) if rows else None

    def settings(self) -> tuple[dict[str, str], dict[str, str]]:
        """What must not change between a checkpoint and its use, and what may."""
        fixed, free = settings_of(self.arm(10**9))
        fixed |= {"seed": repr(self.seed), "params": repr(self.params)}
        return fixed, free | {"precision": repr(self.precision)}
