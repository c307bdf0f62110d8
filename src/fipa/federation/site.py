"""The clients' side of a round, for any of the clients, in whichever process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.clients.client import Client, pooled
from fipa.clients.features import FeatureRule, Moon
from fipa.clients.local_rules import Descent, GaussNewton, LocalRule, Scaffold, descend
from fipa.clients.objective import Objective, StackedObjective, Traces
from fipa.curvature.sketch import Sketch, SketchPlan
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, Occasion
from fipa.errors import Diverged, FipaError, NotFinite
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.problem import Problem
from fipa.kernels.small_cnn import SmallCNN
from fipa.randomness import generator_for, seed_for

KEPT = 256 * 2**20  # bytes of clients' data, ready for use
SERVER = -1  # the server's place among the control variates


@dataclass(frozen=True, eq=False)
class Order:
    """What the server broadcasts: the model, and what to do with it."""

    round_number: int
    theta: Tensor
    local: LocalRule
    lr_scale: float = 1.0
    plan: CurvaturePlan | None = None
    adaptive_rank: AdaptiveRank | None = None
    adaptive_steps: AdaptiveSteps | None = None
    gradient_norm: float | None = None  # of the sum over the clients
    variates: Mapping[int, Tensor] = field(default_factory=dict)  # SCAFFOLD's, and MOON's last local models

    @property
    def asks_for_gradients(self) -> bool:
        """Whether clients need to know the norm of the summed gradient first."""
        return self.adaptive_rank is not None


@dataclass(frozen=True, eq=False)
class Reply:
    """What a client sends back."""

    update: ClientUpdate
    loss: float  # at the broadcast model
    local_steps: int
    notes: tuple[str, ...] = ()
    variate_change: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Uplink: update, curvature, loss (8 bytes) and SCAFFOLD's change of variates."""
        curvature = self.update.sketch.sent_bytes if self.update.sketch is not None else 0
        tensors = [t for t in (self.update.delta, self.variate_change) if isinstance(t, Tensor)]
        return 8 + curvature + sum(t.numel() * t.element_size() for t in tensors)


class Site:
    """All clients of a problem. Stateless between rounds: what lasts is passed in and out."""

    def __init__(
        self, problem: Problem, seed: int, *, centralised: bool = False, initial: Tensor | None = None
    ) -> None:
        self.problem = problem
        self.seed = seed
        self.initial = problem.initial if initial is None else initial
        self._centralised = centralised
        self._traces: Traces = {}
        self._small = SmallCNN.of(problem.model, problem.layout)
        self._round = 0
        self._take(problem.clients)

    def _take(self, clients: Sequence[Client]) -> None:
        self.clients: tuple[Client, ...] = (pooled(clients),) if self._centralised else tuple(clients)
        self._objectives = [
            Objective(self.problem.model, self.problem.layout, client, self._small) for client in self.clients
        ]
        self._stacks: dict[tuple[int, ...], StackedObjective] = {}

    def _turn(self, round_number: int) -> None:
        """Have the data of that round, if they change with the rounds."""
        if self.problem.resample is not None and round_number != self._round:
            forms = [objective.form for objective in self._objectives]
            self._take([Client.of(one) for one in self.problem.resample(round_number)])
            if [objective.form for objective in self._objectives] != forms:
                raise FipaError(f"resample({round_number}) returned data of another form than the problem's clients")
            self._round = round_number

    def groups(self, clients: Sequence[int], size: int) -> list[tuple[int, ...]]:
        """Cut clients, in order, into groups of at most `size` that can be trained side by side."""
        groups: list[tuple[int, ...]] = []
        for client in clients:
            last = groups[-1] if groups else ()
            alike = bool(last) and self._objectives[last[0]].form == self._objectives[client].form
            if alike and len(last) < size:
                groups[-1] = (*last, client)
            else:
                groups.append((client,))
        return groups

    def losses(self, clients: Sequence[int], theta: Tensor, round_number: int = 0) -> list[float]:
        """Each client's loss at the same parameters, on the data of a round."""
        self._turn(round_number)
        self.problem.model.eval()
        stack = self._stack(clients)
        return stack.losses(theta.expand(len(clients), -1)).tolist()

    def gradients(self, clients: Sequence[int], theta: Tensor, round_number: int = 0) -> Tensor:
        """Each client's full gradient (M x p) at the same parameters, on the data of a round."""
        self._turn(round_number)
        self.problem.model.eval()
        return self._stack(clients).gradients(theta.expand(len(clients), -1))

    def bends(self, clients: Sequence[int], theta: Tensor, direction: Tensor, round_number: int = 0) -> Tensor:
        """How each client's residuals bend along a step, seen as gradients (M x p)."""
        self._turn(round_number)
        self.problem.model.eval()
        with torch.no_grad():
            return torch.stack([self._objectives[client].bend(theta, direction) for client in clients])

    def prepare(self, clients: Sequence[int], theta: Tensor, bends: bool = False) -> None:
        """Stack and trace what rounds will need, so that the first round takes no longer than the others."""
        self.losses(clients, theta)
        self.gradients(clients, theta)
        if bends:
            self.bends(clients, theta, theta)
        self.problem.model.train()
        self._stack(clients).gradients(theta.expand(len(clients), -1))
        self.problem.model.eval()

    def work(self, clients: Sequence[int], order: Order) -> list[Reply]:
        """Local training and curvature of a group of clients."""
        losses = self.losses(clients, order.theta, order.round_number)
        for client, loss in zip(clients, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(
                    f"round {order.round_number}: the loss of client {client} is {loss} at the broadcast model"
                )
        needs_gradients = order.asks_for_gradients or isinstance(order.local, GaussNewton)
        gradients = self.gradients(clients, order.theta, order.round_number) if needs_gradients else None
        notes: dict[int, list[str]] = {client: [] for client in clients}
        self.problem.load(order.theta)

        sketches: dict[int, Sketch] = {}
        for row, client in enumerate(clients):
            if order.plan is not None and issubclass(order.plan.makes, Sketch):  # local rules may need it
                norm = float(gradients[row].norm()) if gradients is not None else None
                sketches[client] = self._sketch(client, order, norm, notes[client])

        if isinstance(order.local, GaussNewton):
            assert gradients is not None
            deltas = [
                order.local(sketches.get(client) or self._whole_sketch(client, order.round_number), gradient)
                for client, gradient in zip(clients, gradients, strict=True)
            ]
            steps = [1] * len(clients)
            changes: list[Tensor] | list[None] = [None] * len(clients)
        else:
            steps = self._steps(clients, order, sketches, gradients, notes)
            deltas, changes = self._descend(clients, order, order.local, steps)

        replies = []
        for client, delta, loss, count, change in zip(clients, deltas, losses, steps, changes, strict=True):
            if not bool(delta.isfinite().all()):
                raise Diverged(
                    f"round {order.round_number}: local training of client {client} ended in NaN or infinity"
                )
            curvature: CurvatureSummary | None = sketches.get(client)
            if curvature is None and order.plan is not None:  # after training, but still at the broadcast model
                curvature = self._compute(order.plan, client, order.round_number, delta)
            update = ClientUpdate(delta, self.clients[client].num_examples, curvature, client)
            replies.append(Reply(update, loss, count, tuple(notes[client]), change))
        return replies

    def _stack(self, clients: Sequence[int]) -> StackedObjective:
        key = tuple(clients)
        if key not in self._stacks:
            stack = StackedObjective([self._objectives[client] for client in clients], self._traces)
            while self._stacks and stack.nbytes + sum(kept.nbytes for kept in self._stacks.values()) > KEPT:
                self._stacks.pop(next(iter(self._stacks)))  # with partial participation, few come again soon
            self._stacks[key] = stack
        return self._stacks[key]

    def _ready(self, client: int) -> Client:
        """The client with what the model sees as its data, which training has at hand."""
        one = self.clients[client]
        if one.transform is None:
            return one
        (data,) = self._stack((client,)).terms
        return replace(one, data=data, transform=None)

    def _compute(
        self, plan: CurvaturePlan, client: int, round_number: int, delta: Tensor | None = None
    ) -> CurvatureSummary:
        seed = seed_for(self.seed, "sketch", round_number, client)
        occasion = Occasion(seed, seed_for(self.seed, "test matrix", round_number), delta)
        try:
            return plan.compute(self.problem.model, self.problem.layout, self._ready(client), occasion)
        except (NotFinite, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise Diverged(f"round {round_number}: no {plan.makes.kind} of client {client}: {error}") from error

    def _whole_sketch(self, client: int, round_number: int) -> Sketch:
        found = self._compute(SketchPlan(rank=None), client, round_number)
        assert isinstance(found, Sketch)
        return found

    def _sketch(self, client: int, order: Order, norm: float | None, notes: list[str]) -> Sketch:
        plan: Any = order.plan
        if order.adaptive_rank is not None:
            assert norm is not None
            assert order.gradient_norm is not None
            rank, note = order.adaptive_rank.choose(
                order.round_number, norm, order.gradient_norm, self.clients[client].num_examples
            )
            plan = replace(plan, rank=rank)
            notes += [note] if note else []
        found = self._compute(plan, client, order.round_number)
        assert isinstance(found, Sketch)
        return found

    def _steps(
        self,
        clients: Sequence[int],
        order: Order,
        sketches: Mapping[int, Sketch],
        gradients: Tensor | None,
        notes: Mapping[int, list[str]],
    ) -> list[int]:
        assert isinstance(order.local, Descent)
        if order.adaptive_steps is None:
            return [order.local.steps_for(self._objectives[client].lengths[0]) for client in clients]
        assert gradients is not None
        steps = []
        for client, gradient in zip(clients, gradients, strict=True):
            smallest = float(sketches[client].eigenvalues[-1])
            count, note = order.adaptive_steps.choose(
                order.round_number,
                float(gradient.norm()),
                self._lr(order, order.local),
                smallest,
                self.clients[client].num_examples,
            )
            steps.append(count)
            if note:
                notes[client].append(note)
        return steps

    def _descend(
        self, clients: Sequence[int], order: Order, rule: Descent, steps: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor] | list[None]]:
        generators = [generator_for(self.seed, "batches", order.round_number, client) for client in clients]
        lr = self._lr(order, rule)
        correction = None
        server = order.variates.get(SERVER, torch.zeros_like(order.theta))
        if isinstance(rule, Scaffold):
            own = [order.variates.get(client, torch.zeros_like(order.theta)) for client in clients]
            correction = torch.stack([server - c for c in own])
        if isinstance(rule, FeatureRule):
            return self._descend_by_features(clients, order, rule, steps, generators)
        self.problem.model.train()
        with torch.random.fork_rng(devices=[]):  # dropout knows no other generator
            torch.manual_seed(seed_for(self.seed, "noise", order.round_number, clients[0]))
            deltas = descend(
                self._stack(clients), order.theta, rule, steps, lr=lr, generators=generators, correction=correction
            )
        self.problem.model.eval()
        if correction is None:
            return [delta.clone() for delta in deltas], [None] * len(clients)  # each with its own memory, to be sent
        changes = [-server - delta / (count * lr) for delta, count in zip(deltas, steps, strict=True)]
        return [delta.clone() for delta in deltas], changes

    def _descend_by_features(
        self,
        clients: Sequence[int],
        order: Order,
        rule: FeatureRule,
        steps: Sequence[int],
        generators: Sequence[torch.Generator],
    ) -> tuple[list[Tensor], list[None]]:
        """One client after the other: features cannot be had side by side."""
        model, levels, deltas = self.problem.model, rule.levels_of(self.problem.model), []
        model.train()
        for client, count, generator in zip(clients, steps, generators, strict=True):
            if self.clients[client].loss != "cross_entropy":
                raise FipaError(f"{type(rule).__name__} is for classification: client {client} has another loss")
            stack = self._stack((client,))
            previous = order.variates.get(client, order.theta) if isinstance(rule, Moon) else order.theta
            extra = rule.extra(stack.features_at(levels), order.theta, previous)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_for(self.seed, "noise", order.round_number, client))
                delta = descend(
                    stack, order.theta, rule, [count], lr=self._lr(order, rule), generators=[generator], extra=extra,
                    levels=levels,
                )  # fmt: skip
            deltas.append(delta[0])
        model.eval()
        return deltas, [None] * len(clients)

    @staticmethod
    def _lr(order: Order, rule: Descent) -> float:
        return rule.lr * order.lr_scale * rule.lr_decay ** (order.round_number - 1)
