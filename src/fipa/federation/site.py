"""The clients' side of a round, for any of the clients, in whichever process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fipa.aggregation.update import ClientUpdate
from fipa.clients.client import Client, united
from fipa.clients.descent import Descent
from fipa.clients.gradient import FullGradient
from fipa.clients.objective import StackedObjective, Traces, fast_way, objectives
from fipa.clients.rule import LocalRule, LocalWork, Memory
from fipa.coding import Coded, whole_of
from fipa.curvature.basis import BasisCurvature
from fipa.curvature.sketch import Sketch, SketchPlan
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, Occasion
from fipa.errors import Diverged, FipaError, NotFinite
from fipa.federation.messages import Order, Reply
from fipa.federation.problem import Problem
from fipa.randomness import generator_for, seed_for

KEPT = 256 * 2**20  # bytes of clients' data, ready for use


class Site:
    """All clients of a problem. Stateless between rounds: what lasts is passed in and out.

    Parameters
    ----------
    centralised
        One client holds all data.
    initial
        Parameters to start from; the problem's own without.
    ids
        The clients' numbers, where the problem has only some of a federation's clients.
    trace
        Whether gradients of clients that are trained alone are traced.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        *,
        centralised: bool = False,
        initial: Tensor | None = None,
        ids: Sequence[int] | None = None,
        trace: bool = False,
    ) -> None:
        self.problem = problem
        self._trace = trace
        self.seed = seed
        self.initial = problem.initial if initial is None else initial
        self._centralised = centralised
        self._ids = tuple(range(1 if centralised else len(problem.clients))) if ids is None else tuple(ids)
        self._traces: Traces = {}
        self._fast = fast_way(problem.model, problem.layout)
        self._round = 0
        self._take(problem.clients)

    def _take(self, clients: Sequence[Client]) -> None:
        here = (united(clients),) if self._centralised else clients
        self.clients: dict[int, Client] = dict(zip(self._ids, here, strict=True))
        self._objective = objectives(self.problem.model, self.problem.layout, self.clients, self._fast)
        self._stacks: dict[tuple[int, ...], StackedObjective] = {}

    def _turn(self, round_number: int) -> None:
        """Have the data of that round, if they change with the rounds."""
        if self.problem.resample is not None and round_number != self._round:
            forms = [self._objective(client).form for client in self._ids]
            fresh = [Client.of(one) for one in self.problem.resample(round_number)]
            fits = len(fresh) == len(self.problem.clients)
            if fits:
                self._take(fresh)
            if not fits or [self._objective(client).form for client in self._ids] != forms:
                raise FipaError(f"resample({round_number}) returned data of another form than the problem's clients")
            self._round = round_number

    def groups(self, clients: Sequence[int], size: int) -> list[tuple[int, ...]]:
        """Cut clients, in order, into groups of at most `size` that can be trained side by side."""
        groups: list[tuple[int, ...]] = []
        for client in clients:
            last = groups[-1] if groups else ()
            alike = bool(last) and self._objective(last[0]).form == self._objective(client).form
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

    def varied_losses(self, clients: Sequence[int], theta: Tensor, round_number: int = 0) -> list[float]:
        """Each client's loss on its examples as they are varied in a round."""
        self._turn(round_number)
        self.problem.model.eval()
        varied = self._stack(clients).varied(self._generators(clients, round_number))
        return varied.losses(theta.expand(len(clients), -1)).tolist()

    def _generators(self, clients: Sequence[int], round_number: int) -> list[torch.Generator]:
        """The clients' random numbers for their training in a round."""
        return [generator_for(self.seed, "batches", round_number, client) for client in clients]

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
            return torch.stack([self._objective(client).bend(theta, direction) for client in clients])

    def remainders(self, clients: Sequence[int], theta: Tensor, direction: Tensor, round_number: int = 0) -> Tensor:
        """What a step leaves of each client's residuals, seen as gradients (M x p) where it began."""
        self._turn(round_number)
        self.problem.model.eval()
        with torch.no_grad():
            return torch.stack([self._objective(client).remainder(theta, direction) for client in clients])

    def curvatures(
        self,
        clients: Sequence[int],
        theta: Tensor,
        basis: Tensor,
        plan: CurvaturePlan,
        deltas: Mapping[int, Tensor],
        bits: int = 8,
        round_number: int = 0,
    ) -> list[Tensor]:
        """Each client's curvature in a shared basis, as it travels."""
        self._turn(round_number)
        self.problem.load(theta)
        found = []
        for client in clients:
            summary = self._compute(plan, client, round_number, deltas.get(client), basis)
            assert isinstance(summary, BasisCurvature)
            found.append(summary.packed(bits))
        return found

    def prepare(self, clients: Sequence[int], theta: Tensor, bends: bool = False) -> list[None]:
        """Stack and trace what rounds will need, so that the first round takes no longer than the others."""
        self.losses(clients, theta)
        self.gradients(clients, theta)
        if bends:
            self.bends(clients, theta, theta)
        self.problem.model.train()
        self._stack(clients).gradients(theta.expand(len(clients), -1))
        self.problem.model.eval()
        return [None] * len(clients)

    def work(self, clients: Sequence[int], order: Order) -> list[Reply]:
        """Local training and curvature of a group of clients."""
        rule = order.local
        if rule is None:
            raise FipaError("an order for these clients must say how to train: its local rule is missing")
        losses = (self.varied_losses if rule.varies else self.losses)(clients, order.theta, order.round_number)
        for client, loss in zip(clients, losses, strict=True):
            if not math.isfinite(loss):
                k = order.round_number
                raise Diverged(f"round {k}: the loss of client {client} is {loss} at the broadcast model")
        needs_gradients = bool(order.adaptive_rank or order.adaptive_steps) or rule.needs_curvature
        gradients = self.gradients(clients, order.theta, order.round_number) if needs_gradients else None
        notes: dict[int, list[str]] = {client: [] for client in clients}
        self.problem.load(order.theta)

        sketches: dict[int, Sketch] = {}
        for row, client in enumerate(clients):
            if order.plan is not None and issubclass(order.plan.makes, Sketch):  # local rules may need it
                norm = float(gradients[row].norm()) if gradients is not None else None
                sketches[client] = self._sketch(client, order, norm, notes[client])

        steps = self._steps(clients, order, rule, sketches, gradients, notes)
        trained = self._train(clients, order, rule, steps, sketches, gradients)
        replies = []
        for client, delta, loss, count in zip(clients, trained, losses, steps, strict=True):
            coded = tuple(Coded.of(part) for part in delta) if order.parts else ()
            delta = whole_of(coded, order.theta) if coded else delta
            if not bool(delta.isfinite().all()):
                k = order.round_number
                raise Diverged(f"round {k}: local training of client {client} ended in NaN or infinity")
            curvature: CurvatureSummary | None = sketches.get(client)
            if curvature is None and order.plan is not None:  # after training, but still at the broadcast model
                curvature = self._compute(order.plan, client, order.round_number, delta)
            update = ClientUpdate(delta, self.clients[client].num_examples, curvature, client)
            lr, memory = rule.lr_at(order.round_number, order.lr_scale), order.memories.get(client, {})
            kept, told = rule.outcome(order.theta, delta, count, lr, memory, order.shared)
            _check_outcome(rule, kept, told)
            held = kept if rule.remembers else None
            replies.append(Reply(update, loss, count, tuple(notes[client]), told, held, coded=coded))
        return replies

    def _stack(self, clients: Sequence[int]) -> StackedObjective:
        key = tuple(clients)
        if key not in self._stacks:
            stack = StackedObjective([self._objective(client) for client in clients], self._traces, alone=self._trace)
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
        self,
        plan: CurvaturePlan,
        client: int,
        round_number: int,
        delta: Tensor | None = None,
        basis: Tensor | None = None,
    ) -> CurvatureSummary:
        seed = seed_for(self.seed, "sketch", round_number, client)
        occasion = Occasion(seed, seed_for(self.seed, "test matrix", round_number), delta, basis)
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
        rule: LocalRule,
        sketches: Mapping[int, Sketch],
        gradients: Tensor | None,
        notes: Mapping[int, list[str]],
    ) -> list[int]:
        if order.adaptive_steps is None or not isinstance(rule, Descent):
            return [rule.steps_for(self._objective(client).lengths[0]) for client in clients]
        assert gradients is not None
        steps = []
        for client, gradient in zip(clients, gradients, strict=True):
            smallest = float(sketches[client].eigenvalues[-1])
            count, note = order.adaptive_steps.choose(
                order.round_number,
                float(gradient.norm()),
                rule.lr_at(order.round_number, order.lr_scale),
                smallest,
                self.clients[client].num_examples,
            )
            steps.append(count)
            if note:
                notes[client].append(note)
        return steps

    def _train(
        self,
        clients: Sequence[int],
        order: Order,
        rule: LocalRule,
        steps: Sequence[int],
        sketches: Mapping[int, Sketch],
        gradients: Tensor | None,
    ) -> list[Tensor]:
        """Each client's update, or its parts, of those together that can be trained side by side."""
        k, together = order.round_number, len(clients) if rule.side_by_side else 1
        curvature: list[Sketch] = []
        if rule.needs_curvature:  # of those who send no sketch, all of it
            curvature = [sketches.get(client) or self._whole_sketch(client, k) for client in clients]
        deltas: list[Tensor] = []
        for first in range(0, len(clients), together):
            some = slice(first, first + together)
            chosen = tuple(clients[some])
            work = LocalWork(
                clients=chosen,
                loss=self.clients[chosen[0]].loss,
                theta=order.theta,
                model=self.problem.model,
                objective=self._stack(chosen),
                steps=steps[some],
                lr=rule.lr_at(k, order.lr_scale),
                generators=self._generators(chosen, k),
                memories=[order.memories.get(client, {}) for client in chosen],
                shared=order.shared,
                gradients=None if gradients is None else gradients[some],
                sketches=curvature[some],
                floor=order.floor,
            )
            with self._training(k, chosen[0]):
                if order.parts and isinstance(rule, FullGradient):
                    deltas += list(rule.split(work, order.parts))
                    continue
                trained = rule.train(work)
            shapes = [tuple(delta.shape) for delta in trained]
            if shapes != [tuple(order.theta.shape)] * len(chosen):
                kind, p = type(rule).__name__, len(order.theta)
                raise FipaError(f"{kind}.train must return updates of shape {len(chosen)} x {p}, got {shapes}")
            deltas += [delta.clone() for delta in trained]  # each a tensor of its own, to be sent
        return deltas

    @contextmanager
    def _training(self, round_number: int, client: int) -> Iterator[None]:
        """The model in training mode, with noise of its own: dropout knows no generator but torch's."""
        self.problem.model.train()
        try:
            with torch.random.fork_rng(devices=[]):
                _seed(seed_for(self.seed, "noise", round_number, client), self.problem.initial.device)
                yield
        finally:
            self.problem.model.eval()


def _seed(seed: int, device: torch.device) -> None:
    """Seed torch's own noise; `manual_seed` also notes it, with a traceback each, for kinds of devices not yet used."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _check_outcome(rule: LocalRule, kept: Memory, told: Memory) -> None:
    """A rule that tells or keeps what it does not announce would be sent past noise, or be forgotten."""
    kind = type(rule).__name__
    if kept and not rule.remembers:
        raise FipaError(f"{kind}.outcome returned {', '.join(kept)} to keep: say `remembers: ClassVar[bool] = True`")
    if set(told) != set(rule.tells):
        raise FipaError(f"{kind}.outcome tells {tuple(told)}: say `tells: ClassVar[tuple[str, ...]] = {tuple(told)}`")
