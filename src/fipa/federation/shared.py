"""The server's part of a round in a shared basis: two trips, and a memory of every client.

The first trip has brought the clients' gradients. They widen the basis; the second trip brings each client's curvature
in it. The step is that of all clients ever seen, with what each of them told last.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fipa.aggregation.rule import aggregator
from fipa.aggregation.shared import SharedFIPA, usual_curvature
from fipa.aggregation.update import ClientUpdate
from fipa.clients.gradient import FullGradient
from fipa.curvature.basis import BasisCurvature
from fipa.errors import Diverged, SketchError
from fipa.federation.basis import ROOM, Basis, new_columns
from fipa.federation.control import Conversation, StepControl, controlled
from fipa.federation.exact import turned
from fipa.federation.judges import Judges
from fipa.federation.messages import POOL, Curve, Late, Reply
from fipa.federation.outcome import Outcome
from fipa.federation.quadratics import UNTOLD, News, Quadratics
from fipa.federation.trust import TrustRegion
from fipa.layout import Layout
from fipa.linalg import aligned
from fipa.parallel import inside

if TYPE_CHECKING:
    from fipa.federation.coordinator import _Round

TRAIL = 20  # rounds whose late answers can still be placed
STEEPEST = 1000  # times the usual curvature that one client may have
HIGHEST = 1e12  # curvature that anybody may have
SEEDS = 0.9  # share of a warm-up's updates that the basis begins with: the rest would cost more than it brings
LONGEST = 10  # times the usual length of a gradient: longer ones are shortened to that


@dataclass(frozen=True, eq=False)
class Shared:
    """What lasts from round to round.

    Attributes
    ----------
    basis, clients
        Q, and what is known of every client.
    holds
        The version of the basis that each client has a copy of.
    trail
        By round, where the model has moved since it was broadcast (k each): for answers that come late.
    full_length
        Whether the last step was as long as the radius allowed.
    """

    basis: Basis
    clients: Quadratics
    holds: Mapping[int, int] = field(default_factory=dict)
    trail: Mapping[int, Tensor] = field(default_factory=dict)
    full_length: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """As a rule's state."""
        parts = {f"basis.{name}": t for name, t in self.basis.tensors().items()}
        parts |= {f"clients.{name}": t for name, t in self.clients.tensors().items()}
        parts |= {f"trail.{k}": z for k, z in self.trail.items()}
        parts["holds"] = torch.tensor([*self.holds.items()], dtype=torch.int64).reshape(-1, 2)
        return parts | {"full_length": torch.tensor(self.full_length)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Shared:
        """What `tensors` gave."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        holds = {int(client): int(version) for client, version in tensors["holds"]}
        trail = {int(k): z for k, z in part("trail.").items()}
        known = Quadratics.of(part("clients."))
        return cls(Basis.of(part("basis.")), known, holds, trail, bool(tensors["full_length"]))

    def widened(self, basis: Basis) -> Shared:
        """With a basis that has more columns at its end."""
        extra = len(basis) - len(self.basis)
        trail = {k: torch.nn.functional.pad(z, (0, extra)) for k, z in self.trail.items()}
        return replace(self, basis=basis, clients=self.clients.widened(len(basis)), trail=trail)

    def with_room(self, new: int, limit: int, weights: Tensor) -> Shared:
        """With place for `new` columns: the leading directions of the clients' curvature stay."""
        if len(self.basis) + new <= limit:
            return self
        keep = max(0, min(limit - new, round((1 - ROOM) * limit)))
        gram, move = self.basis.gram(), self.basis.turn(self.clients.curvature(weights), keep)
        R = move.turn(gram)
        trail = {k: z @ (gram @ R).to(z) for k, z in self.trail.items()}
        basis = self.basis.moved(move, turned(self.basis.columns, R))
        return replace(self, basis=basis, clients=self.clients.turned(R, gram), trail=trail)

    def moved(self, k: int, step: Tensor, full_length: bool) -> Shared:
        """After the model of round k has moved by Q times `step`."""
        trail = {**self.trail, k: torch.zeros_like(step)}
        trail = {r: z + step.to(z) for r, z in trail.items() if r > k - TRAIL}
        return replace(self, clients=self.clients.moved(step), trail=trail, full_length=full_length)


class SharedStep:
    """The server's part of one round."""

    def __init__(self, round_: _Round, rule: SharedFIPA, replies: Mapping[int, Reply], late: Sequence[Late]) -> None:
        self.round, self.rule, self.replies, self.late = round_, rule, replies, late
        state = round_.state
        self.theta = state.theta
        self._layout = Layout.of({"parameters": state.theta})
        self.trains = not isinstance(round_.stage.local, FullGradient)
        self.bits = rule.bits or 32
        self.memory = Shared.of(state.rule_state) if state.rule_state else self._seeded()

    def run(self) -> Conversation[Outcome]:
        """Widen the basis, ask for curvatures, remember, and step."""
        radius, (ratio, age) = self.round.state.control_value, self._foretold()
        self._widen()
        yield from self._curvatures()
        outcome = Outcome(control_value=radius)
        if bool((self.memory.clients.rounds != UNTOLD).any()):
            outcome = yield from self._controlled(self._pooled(), radius, ratio, age)
        else:
            self.round.say(None, "nobody has told its curvature yet: the model stays as it is")
        step = torch.zeros(len(self.memory.basis), dtype=self.theta.dtype)
        if outcome.result is not None:
            step = inside(self.memory.basis.columns.to(self.theta), outcome.result.theta - self.theta)
        full = (
            outcome.result is not None and outcome.radius is not None and (float(step.norm()) > 0.99 * outcome.radius)
        )
        return replace(outcome, rule_state=self.memory.moved(self.round.k, step, full).tensors())

    def _seeded(self) -> Shared:
        """With the last updates of a warm-up as directions, and as gradients of clients that nobody has asked yet."""
        basis, seen = Basis.empty(len(self.theta)), self.round.state.seen
        kept = torch.bfloat16 if self.rule.memory.precision == "bfloat16" else None
        clients = Quadratics.none(self.theta, kept)
        if not self.trains:
            last = self.round.k - 1  # nobody knows any better
            clients = clients.told(*(News(client, n, last, -g) for client, (n, g) in sorted(seen.items())))
        if seen:
            directions = [gradient for _, (_, gradient) in sorted(seen.items())]
            basis = self._with(basis, directions, self.rule.columns, SEEDS)
        return Shared(basis, clients.widened(len(basis)))

    def _foretold(self) -> tuple[float, float]:
        """What the losses of those who came back fell by over what was foretold, and their mean absence in rounds."""
        if self.trains:  # training goes elsewhere than down the quadratic
            return math.nan, 1.0
        clients = self.memory.clients.only(self.replies)
        columns = (clients.ids, clients.losses, clients.predicted(self.memory.basis), clients.visits)
        fell, expected, ages = 0.0, 0.0, []
        for client, before, foretold, visit in zip(*(column.tolist() for column in columns), strict=True):
            reply = self.replies[client]
            if reply.loss is not None and math.isfinite(foretold):
                fell += reply.update.num_examples * (before - reply.loss)
                expected += reply.update.num_examples * (before - foretold)
                ages.append(self.round.k - visit)
        return fell / expected if expected > 0 else math.nan, sum(ages) / max(1, len(ages))

    def _widen(self) -> None:
        """Make place for what is new in the round's directions, and add it."""
        directions: list[Tensor] = []
        for reply in self.replies.values():
            parts = [part.vector(self.theta) for part in reply.coded]
            directions += parts if len(parts) > 1 else [_flat(reply.update), *reply.directions]
        if not directions:
            return
        if self.rule.weight_decay:
            directions.append(self.theta)
        memory, rule = self.memory, self.rule
        most = min(len(directions), rule.columns, rule.directions or rule.columns)
        new = most
        if len(memory.basis) + most > rule.columns:  # what they really add may fit
            new = new_columns(memory.basis.columns, directions, most).shape[1]
        memory = memory.with_room(new, rule.columns, memory.clients.weights(self.round.k, rule.memory.discount))
        most = min(most, rule.columns - len(memory.basis))  # after a turn more may stick out than before
        self.memory = memory.widened(self._with(memory.basis, directions, most))

    def _with(self, basis: Basis, directions: Sequence[Tensor], most: int, share: float = 1.0) -> Basis:
        """A basis that these directions have widened."""
        return basis.widened(directions, self._generator(directions), most, share, self.rule.column_bits)

    def _curvatures(self) -> Conversation[None]:
        """The second trip; who does not answer it is remembered with the curvature that it told before."""
        memory, k, plan = self.memory, self.round.k, self.round.stage.plan
        assert plan is not None
        deltas = {client: _flat(reply.update) for client, reply in self.replies.items()} if self.trains else {}
        question = Curve(self.theta, memory.basis, plan, memory.holds, deltas, self.bits)
        answers = yield from self.round.ask(list(self.replies), question)
        holds = {**memory.holds, **dict.fromkeys((*answers.values, *answers.pooled), memory.basis.version)}
        basis, news = memory.basis.columns.to(self.theta), []
        told: dict[int, News | None] = {client: self._told(client, answers.values, basis) for client in self.replies}
        traces = [float(one.matrix.trace()) for one in told.values() if one is not None and one.matrix is not None]
        most = min(STEEPEST * statistics.median(traces), HIGHEST) if traces else HIGHEST
        for client, one in told.items():
            if one is not None and one.matrix is not None and float(one.matrix.trace()) > most:
                self.round.say(client, f"refused: its curvature is more than {STEEPEST} times as steep as that of most")
            elif one is not None:
                news.append(one)
        clients = memory.clients.told(*(one for late in self.late for one in self._late(late)), *news)
        settings = self.rule.memory
        if settings.forget is not None:
            clients = clients.since(k - settings.forget)
        clients = clients.within(settings.limit, memory.basis, k, settings.discount, self.trains)
        self.memory = replace(memory, clients=clients, holds=holds)

    def _told(self, client: int, answers: Mapping[int, Tensor], basis: Tensor) -> News | None:
        """What a client told on both trips, or None if it is of no use."""
        reply = self.replies[client]
        one = News(client, reply.update.num_examples, self.round.k, self._shortened(client), reply.loss)
        if client not in answers:  # without curvature nobody knows what training is worth
            return None if self.trains else one
        try:
            summary = BasisCurvature.unpacked(answers[client], basis, self._layout, self.bits, self.trains)
        except SketchError as error:
            self.round.say(client, f"refused: its curvature {error}")
            return None
        return replace(one, matrix=aligned(summary.matrix), moment=summary.moment if self.trains else None)

    def _shortened(self, client: int) -> Tensor:
        """A client's update, and no more than a limit of its gradient: what one can do to all others has an end."""
        update = _flat(self.replies[client].update)
        length = float(update.norm())
        if self.trains or not self._usual_length or length <= LONGEST * self._usual_length:
            return update
        self.round.say(client, f"its gradient is {length / self._usual_length:.3g} times as long as usual: shortened")
        return update * (LONGEST * self._usual_length / length)

    @cached_property
    def _usual_length(self) -> float:
        """The median length of all clients' last gradients; updates of a warm-up, of another length, are none."""
        known = self.memory.clients
        rows = zip(known.ids.tolist(), known.rounds.tolist(), known.updates, strict=True)
        told = {client: row for client, k, row in rows if k != UNTOLD and client not in self.replies}
        told |= {client: _flat(reply.update) for client, reply in self.replies.items()}
        return statistics.median(float(update.norm()) for update in told.values())

    def _late(self, one: Late) -> list[News]:
        """A gradient of an earlier model, which has moved since; nothing if nobody knows any more by how much.

        A round without a step leaves no trace: its model is that of the next round that has one, or the present one.
        """
        client, trail = one.update.client_id, self.memory.trail
        assert isinstance(client, int)
        if self.trains or (trail and one.sent < min(trail)):
            self.round.say(client, "its late answer is too old, or of training: not used")
            return []
        moved = next((trail[k] for k in sorted(trail) if k >= one.sent), None)
        return [News(client, one.update.num_examples, one.sent, _flat(one.update), moves=moved)]

    def _pooled(self) -> ClientUpdate:
        """All clients as one, at the present model."""
        memory, rule = self.memory, self.rule
        weights = memory.clients.weights(self.round.k, rule.memory.discount)
        update, moment = memory.clients.pull(memory.basis, weights, self.trains)
        matrix = memory.clients.curvature(weights)
        basis = memory.basis.columns.to(self.theta)
        if rule.weight_decay and not self.trains:
            update = update - rule.weight_decay * self.theta
            matrix += rule.weight_decay * torch.eye(len(matrix), dtype=matrix.dtype)
        sketch = BasisCurvature(matrix.to(self.theta), moment, basis, self._layout)
        return ClientUpdate(update, int(memory.clients.examples.sum()), sketch)

    def _controlled(
        self, pooled: ClientUpdate, radius: float | None, ratio: float, age: float
    ) -> Conversation[Outcome]:
        """The step, judged by the clients where all of them are here, or nobody knows who comes back."""
        control, rule = self.round.stage.control, self.rule
        apply = aggregator(self.theta, [pooled])
        if control is None:
            return Outcome(apply(rule, {}), None, 1, rule.damping, radius=rule.radius)
        told = POOL not in self.replies and any(reply.loss is not None for reply in self.replies.values())
        some = told and len(self.replies) < self.round.population
        if isinstance(control, TrustRegion) and some:
            damping = usual_curvature(pooled.sketch) if rule.damping is None else rule.damping
            if radius is None and not bool(self.theta.any()):  # zeros have no length: the damping alone limits the step
                radius = apply(replace(rule, radius=None, damping=damping), {}).diagnostics.step_length
            radius = radius or control.start(self.theta)
            radius = control.adapted(radius, ratio, self.memory.full_length, age)
            taken = apply(replace(rule, radius=radius, damping=damping), {})
            return Outcome(taken, radius, 1, damping, radius=radius)
        judges = yield from Judges(self.round, None, (), self.replies, rule.weight_decay).called()
        if isinstance(control, StepControl):
            value = control.start(rule) if radius is None else radius
            trial = yield from controlled(
                control, rule, value, judges.loss, lambda tried: apply(tried, {}), judges.probe, judges.follow,
                judges.settle,
            )  # fmt: skip
            after = trial.loss if trial.result is not None else judges.loss
            return Outcome(
                trial.result, trial.value, trial.trials, trial.used, radius=rule.radius, loss=judges.loss,
                loss_after=after,
            )  # fmt: skip
        return (yield from self._judged(control, apply, judges, pooled, radius or control.start(self.theta)))

    def _judged(
        self, control: TrustRegion, apply: Callable[..., Any], judges: Judges, pooled: ClientUpdate, radius: float
    ) -> Conversation[Outcome]:
        """Shorter steps until the clients' loss falls; then longer or shorter ones as long as it falls further."""
        best, taken, used, trials, wanted, way = judges.loss, None, radius, 0, radius, 0.0
        while trials < control.trials:
            trials += 1
            ratio, full = -math.inf, False
            try:
                result = apply(replace(self.rule, radius=wanted), {})
                reached = yield from judges.probe(result.theta)
                step = result.theta - self.theta
                ratio, full = (judges.loss - reached) / self._expected(pooled, step), float(step.norm()) > 0.99 * wanted
            except Diverged:
                reached = math.inf
            if reached >= best and taken is not None:
                break
            if reached < best:
                best, taken, used = reached, result, wanted
            turn = control.adapted(wanted, ratio, full) - wanted
            if turn == 0 or turn * way < 0:
                break  # as it should be, or back to where it came from
            wanted, way = wanted + turn, turn
        kept = used if taken is not None and trials > 1 else wanted  # one that no trial was left for is worth one
        after = best - judges.penalty(self.theta if taken is None else taken.theta)
        before = judges.loss - judges.penalty(self.theta)
        return Outcome(taken, kept, trials, self.rule.damping, radius=used, loss=before, loss_after=after)

    def _expected(self, pooled: ClientUpdate, step: Tensor) -> float:
        """The fall of the loss that the quadratics predict."""
        sketch = pooled.sketch
        assert isinstance(sketch, BasisCurvature)
        within = inside(sketch.basis, step)
        return max(float(_flat(pooled) @ step - within @ sketch.matrix @ within / 2), torch.finfo(torch.float64).tiny)

    def _generator(self, directions: Sequence[Tensor]) -> torch.Generator:
        """Random numbers of the rotation that hides single directions: the seed is a digest that no client has."""
        digest = hashlib.blake2b(f"{self.round.seed}/{self.round.k}".encode(), digest_size=8)
        for direction in directions:
            digest.update(direction.contiguous().numpy().tobytes())
        return torch.Generator().manual_seed(int.from_bytes(digest.digest(), "big") >> 1)


def _flat(update: ClientUpdate) -> Tensor:
    assert isinstance(update.delta, Tensor)
    return update.delta
