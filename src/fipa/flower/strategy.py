"""`FIPA`: any rule of this library as a Flower strategy, for servers that live longer than some of their clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

import fipa
from fipa.aggregation.rule import Rule, aggregator, plan_for
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import FipaError
from fipa.federation.participation import Participation
from fipa.flower import checkpoint as checkpoints
from fipa.flower.answer import Answer, Limits, finite_numbers
from fipa.flower.checkpoint import Progress
from fipa.flower.codec import Precision, check_precision, nbytes
from fipa.flower.inbox import Expected, Inbox
from fipa.flower.request import KEY, Request
from fipa.flower.roster import Roster, exchange
from fipa.layout import Layout, ParamSelection, selected
from fipa.randomness import seed_for

BUFFERS = ("running_mean", "running_var")  # of BatchNorm: averaged, not trained
TRAIN, EVALUATE, CENTRAL = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"


@dataclass(frozen=True)
class Phase:
    """What happens in a round: the server's rule, what clients tell of their curvature, and how fast they learn."""

    rule: Rule
    plan: CurvaturePlan | None
    lr_scale: float = 1.0
    since: int = 1  # round in which it began: what another rule remembered before is of no use


class FIPA(FedAvg):
    """Fisher-informed aggregation, or any other rule of `fipa`, in the place of Flower's `FedAvg`.

    Clients answer with `fipa.flower.reply`, and their apps are made with `fipa.flower.client`.

    Parameters
    ----------
    rule
        Default: `fipa.CompletedFIPA(damping=0.5, step=0.25)`.
    plan
        What clients tell of their curvature; by default what the rule needs, sketches of rank 20.
    warmup_rounds, warmup_rule
        So many rounds with that rule, `fipa.FedAvg()`, first.
    lr_scale
        Factor for the clients' learning rate after the warm-up: `message.content["config"]["lr-scale"]`.
    params
        Names or patterns of the parameters that are trained; by default all arrays of floating-point numbers but the
        statistics of BatchNorm, which are averaged.
    precision
        Of matrices on their way to the server: `"float32"`, `"bfloat16"` or `"int8"`.
    deadline, quorum
        A round goes on after so many seconds if that share of its clients has answered. Without a deadline it waits
        for all of them, up to the `timeout` of `start`.
    late
        A late answer counts in a later round, with the sketch it was made with, and its weight times this to the
        power of its age in rounds; None for not at all.
    limits
        What is taken from a client at most.
    seed
        Of all choices: the same seed gives the same run, whatever the nodes' ids and the order of their replies.
    checkpoint
        File for the state after every round. If it is there already, `start` goes on from it.
    **settings
        Of Flower's `FedAvg`: `fraction_train`, `min_available_nodes` and so on.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        plan: CurvaturePlan | None = None,
        warmup_rounds: int = 0,
        warmup_rule: Rule | None = None,
        lr_scale: float = 1.0,
        params: ParamSelection = None,
        precision: Precision = "float32",
        deadline: float | None = None,
        quorum: float = 0.5,
        late: float | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_precision(precision)
        if not 0 < quorum <= 1 or (late is not None and not 0 < late <= 1) or warmup_rounds < 0:
            raise FipaError("FIPA: quorum and late lie between 0 and 1, and warmup_rounds is not negative")
        self.rule = fipa.CompletedFIPA(damping=0.5, step=0.25) if rule is None else rule
        self.plan = plan_for(self.rule) if plan is None else plan
        self.warmup_rounds = warmup_rounds
        self.warmup_rule = fipa.FedAvg() if warmup_rule is None else warmup_rule
        self.lr_scale = lr_scale
        self.params = params
        self.precision = precision
        self.deadline = deadline
        self.quorum = quorum
        self.seed = seed
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        self.inbox = Inbox(limits or Limits(), late)
        self._roster = Roster()
        self._asked: dict[int, Request] = {}  # of this round, by node
        self._progress = Progress({})

    def phase(self, round_number: int) -> Phase:
        """What happens in a round, counted from 1."""
        if round_number <= self.warmup_rounds:
            return Phase(self.warmup_rule, plan_for(self.warmup_rule))
        return Phase(self.rule, self.plan, self.lr_scale, since=self.warmup_rounds + 1)

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        log(INFO, "\t└──> Rule: %s after %d rounds of %s", self.rule, self.warmup_rounds, self.warmup_rule)

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
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self.summary()
        self._progress = self._resumed(initial_arrays)
        arrays = _record(self._progress.arrays)
        if evaluate_fn and self._progress.round_number == 0:
            self._note(CENTRAL, 0, evaluate_fn(0, arrays))
        for k in range(self._progress.round_number + 1, num_rounds + 1):
            messages = list(self.configure_train(k, arrays, train_config, grid))
            changed, metrics = self.aggregate_train(k, self.collect(grid, messages, timeout))
            arrays = arrays if changed is None else changed
            self._note(TRAIN, k, metrics)
            questions = list(self.configure_evaluate(k, arrays, evaluate_config, grid))
            if questions:
                answers, _ = exchange(grid, questions, self._enough(len(questions)), self.deadline, timeout)
                self._note(EVALUATE, k, self.aggregate_evaluate(k, answers))
            if evaluate_fn:
                self._note(CENTRAL, k, evaluate_fn(k, arrays))
            if self.checkpoint is not None:
                checkpoints.save(self.checkpoint, self._progress, self._settings())
        history = self._progress.metrics
        records = {
            kind: {k: MetricRecord(numbers) for k, numbers in history.get(kind, {}).items()}
            for kind in (TRAIN, EVALUATE, CENTRAL)
        }
        return Result(arrays, **records)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients of a round."""
        phase = self.phase(server_round)
        layout, _ = self._trained()
        present = self._present(grid)
        chosen = self._draw(present, self._count(len(present)), self.seed, server_round)
        config = ConfigRecord(dict(config) | {"server-round": server_round, "lr-scale": phase.lr_scale})
        self._asked, messages = {}, []
        for client, node in chosen.items():
            request = Request(
                server_round, client, layout.names, phase.plan, self.precision,
                seed_for(self.seed, "sketch", server_round, client), seed_for(self.seed, "test matrix", server_round),
                phase.lr_scale, tuple(self._buffers(layout)),
            )  # fmt: skip
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config, KEY: request.record()})
            self._asked[node] = request
            messages.append(Message(content, dst_node_id=node, message_type=MessageType.TRAIN))
        log(INFO, "round %d: %d of %d clients are asked", server_round, len(chosen), len(present))
        return messages

    def collect(self, grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
        """Send a round's messages and wait for replies, late ones to earlier rounds included."""
        waiting, enough = self.inbox.waiting, self._enough(len(messages))
        replies, ids = exchange(grid, messages, enough, self.deadline, timeout, waiting)
        self._remember(ids, messages)
        return replies

    def _remember(self, ids: Sequence[str], messages: Sequence[Message]) -> None:
        for name, message in zip(ids, messages, strict=True):
            self.inbox.sent(name, self._asked[message.metadata.dst_node_id])

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the server's step with all replies that stand the checks; no arrays if there are too few."""
        replies = list(replies)
        layout, theta = self._trained()
        expected = Expected(server_round, self.phase(server_round).since, layout, theta, self._buffers(layout))
        answers, late = self.inbox.open(replies, expected)
        present = {answer.update.client_id for answer in answers}
        for node, request in self._asked.items():
            self._roster.heard(node, request.client in present)
        metrics = _means([(answer.update.num_examples, answer.metrics) for answer in answers])
        size = sum(nbytes(*reply.content.array_records.values()) for reply in replies if reply.has_content())
        metrics |= {"clients": len(answers), "late": 0, "uplink-bytes": size}
        updates: list[ClientUpdate] = []
        if self._is_quorum(len(answers), len(self._asked)):
            updates = [*(answer.update for answer in answers), *late]
            metrics["late"] = len(late)
            self.inbox.used(server_round)
        else:
            few = f"{len(answers)} of {len(self._asked)} clients answered, fewer than the quorum"
            self.inbox.event(server_round, None, f"{few}: the model stays as it is", WARNING)
        return self._step(server_round, updates, _averaged(answers), metrics)

    def _step(
        self, k: int, updates: Sequence[ClientUpdate], buffers: Mapping[str, Tensor], metrics: dict[str, Any]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Change the model by the round's rule; not at all without updates, or if the rule refuses them."""
        phase, progress, (layout, theta) = self.phase(k), self._progress, self._trained()
        state = {} if phase.since == k else progress.rule_state
        new: dict[str, Tensor] | None = None
        if updates:
            try:
                result = aggregator(theta, updates)(phase.rule, state)
            except (FipaError, RuntimeError) as error:  # also what LAPACK makes of odd matrices
                self.inbox.event(k, None, f"no step, the model stays as it is: {error}", WARNING)
            else:
                changed = {name: tensor.clone() for name, tensor in layout.unflatten(result.theta).items()}
                new, state = progress.arrays | changed | dict(buffers), result.state
                metrics["step-length"] = result.diagnostics.step_length
        self._progress = replace(progress, arrays=new or progress.arrays, round_number=k, rule_state=state)
        return (None if new is None else _record(new)), MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to judge the model, as many as `fraction_evaluate` says."""
        if self.fraction_evaluate == 0.0:
            return []
        present = self._present(grid)
        count = max(int(len(present) * self.fraction_evaluate), self.min_evaluate_nodes)
        chosen = self._draw(present, count, seed_for(self.seed, "evaluate"), server_round)
        config = ConfigRecord(dict(config) | {"server-round": server_round})
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(content, list(chosen.values()), MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Weighted means of the clients' numbers, added up in the order of the clients."""
        rows = []
        for reply in sorted(replies, key=lambda reply: self._roster.partition(reply.metadata.src_node_id)):
            node = f"node {reply.metadata.src_node_id}"
            if reply.has_error() or len(reply.content.metric_records) != 1:
                reason = reply.error.reason if reply.has_error() else "has not one MetricRecord"
                self.inbox.refuse(server_round, None, f"the evaluation of {node} {reason}")
                continue
            numbers: dict[str, Any] = dict(next(iter(reply.content.metric_records.values())))
            weight = numbers.pop(self.weighted_by_key, None)
            if type(weight) is not int or not 0 < weight <= self.inbox.limits.examples:
                self.inbox.refuse(
                    server_round, None, f"the evaluation of {node} has {self.weighted_by_key} = {weight!r}"
                )
                continue
            rows.append((weight, finite_numbers(numbers)))
        return MetricRecord(_means(rows)) if rows else None

    def _present(self, grid: Grid) -> dict[int, int]:
        return self._roster.present(grid, max(self.min_available_nodes, self.min_train_nodes))

    def _count(self, present: int) -> int:
        """How many of those who are there are asked to train."""
        return max(int(present * self.fraction_train), self.min_train_nodes)

    @staticmethod
    def _draw(clients: Mapping[int, int], count: int, seed: int, round_number: int) -> dict[int, int]:
        """So many of the clients, at most all, in their order."""
        participation = Participation("uniform", min(count, len(clients)))
        places = participation.select([1] * len(clients), seed, round_number)
        return {client: clients[client] for client in (list(clients)[place] for place in places)}

    def _trained(self) -> tuple[Layout, Tensor]:
        """Which of the arrays are trained, and their present values, flat."""
        arrays = self._progress.arrays
        floating = [name for name, tensor in arrays.items() if tensor.is_floating_point()]
        names = selected(floating, self.params) if self.params else [name for name in floating if not _is_buffer(name)]
        chosen = {name: arrays[name] for name in names}
        layout = Layout.of(chosen)
        return layout, layout.flatten(chosen)

    def _buffers(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays that are averaged instead of trained."""
        return {
            name: tuple(tensor.shape)
            for name, tensor in self._progress.arrays.items()
            if tensor.is_floating_point() and name not in layout.names and _is_buffer(name)
        }

    def _enough(self, asked: int) -> Callable[[Sequence[Message]], bool]:
        return lambda replies: self._is_quorum(sum(not reply.has_error() for reply in replies), asked)

    def _is_quorum(self, answered: int, asked: int) -> bool:
        return answered >= max(1, math.ceil(self.quorum * asked))

    def _resumed(self, initial: ArrayRecord) -> Progress:
        before = checkpoints.load(self.checkpoint, self._settings()) if self.checkpoint is not None else None
        if before is None:
            return Progress(dict(initial.to_torch_state_dict()))
        log(INFO, "going on after round %d of %s", before.round_number, self.checkpoint)
        return before

    def _settings(self) -> dict[str, str]:
        """What must not change between a checkpoint and its use."""
        chosen = (
            *("rule", "plan", "warmup_rounds", "warmup_rule", "lr_scale", "params", "precision", "seed"),
            *("fraction_train", "min_train_nodes"),
        )
        return {name: repr(getattr(self, name)) for name in chosen}

    def _note(self, kind: str, k: int, metrics: MetricRecord | None) -> None:
        if metrics is not None:
            log(INFO, "round %d, %s: %s", k, kind, dict(metrics))
            self._progress.metrics.setdefault(kind, {})[k] = dict(metrics)


def _record(arrays: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord(dict(arrays))


def _is_buffer(name: str) -> bool:
    return name.endswith(BUFFERS)


def _means(rows: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Weighted means of the numbers that all rows have."""
    total = sum(weight for weight, _ in rows)
    shared = [name for name in (rows[0][1] if rows else ()) if all(name in numbers for _, numbers in rows)]
    return {name: sum(weight * float(numbers[name]) for weight, numbers in rows) / total for name in shared}


def _averaged(answers: Sequence[Answer]) -> dict[str, Tensor]:
    """Buffers, weighted by the clients' examples."""
    total = sum(answer.update.num_examples for answer in answers)
    names = answers[0].buffers if answers else {}
    return {
        name: sum((a.buffers[name] * (a.update.num_examples / total) for a in answers[1:]),
                  answers[0].buffers[name] * (answers[0].update.num_examples / total))
        for name in names
    }  # fmt: skip
