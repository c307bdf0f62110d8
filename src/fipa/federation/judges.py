"""The clients of a round as judges of the server's step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fipa.aggregation.fedavg import FedAvg
from fipa.aggregation.rule import Result, Rule
from fipa.aggregation.update import ClientUpdate
from fipa.errors import Diverged, FipaError
from fipa.federation.control import Conversation
from fipa.federation.messages import Bend, Loss, Remainder, Reply, VariedLoss
from fipa.federation.stage import floor_of
from fipa.linalg import aligned


class Judges:
    """The clients of a round as judges of the server's step."""

    def __init__(
        self,
        round_: Any,
        apply: Any,
        updates: Sequence[ClientUpdate],
        replies: Mapping[int, Reply],
        weight_decay: float = 0.0,
    ) -> None:
        self._decay = weight_decay
        self._round, self._apply, self._updates, self._replies = round_, apply, updates, replies
        self._local: Any = round_.stage.local
        self.losses = {client: reply.loss for client, reply in replies.items() if reply.loss is not None}
        self._tried: list[tuple[Tensor, dict[int, float]]] = []
        self._buffers = {**round_.state.buffers, **averaged(list(replies.values()))}

    def called(self) -> Conversation[Judges]:
        """Ask for the loss at the broadcast model of those clients that have not told it yet."""
        known = self._round.state.judged
        self.losses = {client: known[client] for client in self._replies if client in known} | self.losses
        silent = [client for client in self._replies if client not in self.losses]
        if silent:
            answers = yield from self._round.ask(silent, Loss(self._round.state.theta, self._round.state.buffers))
            self.losses |= {client: loss for client, loss in answers.values.items() if math.isfinite(loss)}
        if not self.losses:
            raise FipaError(
                "step control needs the clients' loss, and none of them told it: give their apps an @app.evaluate() "
                'function that returns a loss (as "eval_loss"), or the server FIPA(validate=...), or control=False'
            )
        self.losses = dict(sorted(self.losses.items()))
        self.loss = self._round.mean(self._replies, self.losses) + self.penalty(self._round.state.theta)
        return self

    def at(self, theta: Tensor) -> dict[int, float]:
        """What the clients told of a model that was tried."""
        return next((told for tried, told in self._tried if tried is theta), {})

    def probe(self, theta: Tensor) -> Conversation[float]:
        """The clients' loss at a model. Who does not answer counts neither there nor at the broadcast model."""
        kind = VariedLoss if self._local is not None and self._local.varies else Loss
        answers = yield from self._round.ask(list(self.losses), kind(theta, self._buffers))
        if not answers.values or not answers.enough:
            return math.inf
        self._tried.append((theta, dict(answers.values)))
        before = self._round.mean(self._replies, {client: self.losses[client] for client in answers.values})
        missing = self.loss - self.penalty(self._round.state.theta) - before  # of those who did not answer
        return self._round.mean(self._replies, answers.values) + missing + self.penalty(theta)

    def penalty(self, theta: Tensor) -> float:
        """The server's own part of the loss."""
        return 0.5 * self._decay * float(theta @ theta) if self._decay else 0.0

    def follow(self, rule: Rule, result: Result[Tensor]) -> Conversation[tuple[Result[Tensor], float]]:
        """Each client's correction is an update like any other: the same rule weighs it.

        Late clients are not asked. Their curvature counts, their bend does not: the correction is then too short.
        """
        theta = self._round.state.theta
        v = result.theta - theta
        a = 0.5 * (yield from self._answered(rule, Bend(theta, v)))
        return self._moved(result, result.theta + a, v + a), 2 * float(a.norm()) / (float(v.norm()) or 1.0)

    def settle(self, rule: Rule, result: Result[Tensor]) -> Conversation[Result[Tensor]]:
        """The step with what the rule makes of the residuals that it leaves."""
        theta = self._round.state.theta
        d = result.theta - theta
        d = d + (yield from self._answered(rule, Remainder(theta, d)))
        return self._moved(result, theta + d, d)

    def _answered(self, rule: Rule, question: Bend) -> Conversation[Tensor]:
        """What the rule makes of the clients' answers, each of which is a gradient at the broadcast model."""
        local, theta, floor = self._local, self._round.state.theta, floor_of(rule)
        answers = yield from self._round.ask(list(self._replies), question)
        if len(answers.values) < len(self._replies):
            raise Diverged("a client does not tell how its residuals change along the step")
        if not all(bool(gradient.isfinite().all()) for gradient in answers.values.values()):
            raise Diverged("residuals along the step are no numbers")
        ids = (update.client_id for update in self._updates)
        corrections = {i: torch.zeros_like(theta) for i in ids if i is not None}
        for client, gradient in answers.values.items():
            corrections[client] = local(self._replies[client].update.sketch, aligned(gradient), floor)
        full: Any = rule
        step: Tensor = self._apply(replace(full, step=1.0), {}, corrections).theta - theta  # v and d have the rule's
        return step

    def _moved(self, result: Result[Tensor], theta: Tensor, d: Tensor) -> Result[Tensor]:
        """The same result with another model, and the step that leads there."""
        mean, length = self._apply(FedAvg()).theta - self._round.state.theta, float(d.norm())
        cosine = float(d @ mean) / (length * float(mean.norm()) or 1.0)
        diagnostics = replace(result.diagnostics, step_length=length, cosine_with_fedavg=cosine)
        return replace(result, theta=theta, diagnostics=diagnostics)


def averaged(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """Buffers, weighted by the clients' examples."""
    total = sum(reply.update.num_examples for reply in replies)
    shares = [reply.update.num_examples / total for reply in replies]
    return {
        name: sum((reply.buffers[name] * share for reply, share in zip(replies[1:], shares[1:], strict=True)),
                  replies[0].buffers[name] * shares[0])
        for name in (replies[0].buffers if replies else ())
    }  # fmt: skip
