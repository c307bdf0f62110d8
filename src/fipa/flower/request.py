"""A question to one client as it travels: a header of plain settings beside the tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fipa.clients.registry import decode_rule, encode_rule
from fipa.clients.rule import LocalRule
from fipa.curvature.registry import kind_of, plan_of
from fipa.curvature.registry import settings_of as settings_of_plan
from fipa.curvature.summary import CurvaturePlan
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.basis import Basis, Move
from fipa.federation.messages import Bend, Curve, Gradient, Loss, Order, Remainder, VariedLoss
from fipa.flower.codec import PayloadError, Precision, pack, tensors_in, unpack
from fipa.layout import Layout

VERSION = 5
KEY = "fipa"  # of the header, in messages and replies
TENSORS, SHARED, FRAME, MOVES = "tensors", "shared", "frame", "moves"
WHO = "fipa_who"  # action of the query that asks who a node is
OBJECTIVE = "objective"  # in its answer: whether the node has one
FIPA_ACTION = "fipa"  # of questions to an objective: an app's own train function has the default action
JUDGE = "evaluate"  # the question for the loss at a model, to an app's own evaluate function
QUESTIONS = {kind.method: kind for kind in (Order, Gradient, Loss, VariedLoss, Bend, Remainder, Curve)}
Asked = Order | Gradient | Loss | Bend | Curve


@dataclass(frozen=True)
class Request:
    """What the server wants of a client, next to the tensors.

    Parameters
    ----------
    method
        The question, by the method of `Site` that answers it.
    round_number, client
        Which round this is, and who is asked, by partition id.
    seed
        The seed of the run: all random numbers come from it, the round, the client and their purpose.
    params
        Names of the parameters that are trained, sketched and sent.
    precision
        The precision of matrices on their way to the server.
    buffers
        Names of the arrays that are averaged instead of trained.
    frame
        Checksum of all other arrays, which a client that lacks them is sent once.
    memory
        The round whose memory of this client holds; None if it has none.
    order
        Settings of an `Order`.
    curve
        Settings of a `Curve`, among them the marks of the shared basis before and after its moves.
    model
        Checksum of the model, if the client is to keep it; one that has it already is not sent it again.
    settled
        Whether clients have told already which arrays of their model are trained and averaged.
    strict
        Whether a learning rate that the client does not scale is an error.
    """

    method: str
    round_number: int
    client: int
    seed: int = 0
    params: tuple[str, ...] = ()
    precision: Precision = "float32"
    buffers: tuple[str, ...] = ()
    frame: str = ""
    memory: int | None = None
    order: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    settled: bool = False
    strict: bool = False

    @property
    def plan(self) -> CurvaturePlan | None:
        """What to tell about the curvature; None for nothing."""
        kind, settings = (self.order or self.curve).get("plan", ("none", {}))
        return plan_of(kind, settings)

    @property
    def local(self) -> LocalRule | None:
        """How to train; None leaves that to the client."""
        rule = self.order.get("local")
        return None if rule is None else decode_rule(rule)

    @property
    def lr_scale(self) -> float:
        """Factor for the client's learning rate."""
        return float(self.order.get("lr_scale", 1.0))

    def record(self) -> ConfigRecord:
        """The request as it travels."""
        return ConfigRecord({"version": VERSION, "request": json.dumps(vars(self))})

    @classmethod
    def of(cls, content: RecordDict) -> Request:
        """What a message asks for."""
        if KEY not in content:
            raise PayloadError("the message does not come from fipa.flower.FIPA: use that strategy in the ServerApp")
        record: Any = content[KEY]
        check_version(record)
        settings = json.loads(record["request"])
        settings["client"] = int(settings["client"])  # it becomes part of a file's name
        return cls(**settings | {name: tuple(settings[name]) for name in ("params", "buffers")})


def settings_of(order: Order) -> dict[str, Any]:
    """All of an order but its tensors, as JSON has it."""
    plain: dict[str, Any] = {
        "lr_scale": order.lr_scale, "floor": order.floor, "gradient_norm": order.gradient_norm,
        "local": None if order.local is None else encode_rule(order.local),
        "plan": (kind_of(order.plan), settings_of_plan(order.plan)), "parts": order.parts,
        "signs": order.signs,
    }  # fmt: skip
    for name in ("adaptive_rank", "adaptive_steps"):
        value = getattr(order, name)
        plain[name] = None if value is None else asdict(value)
    return plain


def curve_of(question: Curve, client: int, whole: bool) -> dict[str, Any]:
    """A question about the curvature in the shared basis without its tensors; `whole` sends all columns."""
    moves = question.basis.news(None) if whole else question.news(client)
    return {
        "plan": (kind_of(question.plan), settings_of_plan(question.plan)), "length": question.length,
        "from": moves[0].mark if moves else question.basis.mark, "to": question.basis.mark,
        "moves": len(moves), "bits": question.bits,
    }  # fmt: skip


def tensors_of(question: Asked, client: int, whole: bool = True, held: bool = False) -> dict[str, ArrayRecord]:
    """The tensors of a question as they travel, by record.

    `whole` with the model and all columns of a shared basis; without, a client that has `held` the model lacks it not.
    """
    tensors = {"theta": question.theta} if whole or not held else {}
    if isinstance(question, Bend):
        tensors["direction"] = question.direction
    if isinstance(question, Curve) and question.deltas:
        tensors["delta"] = question.deltas[client]
    records = {TENSORS: pack(tensors)}
    if isinstance(question, Curve):
        moves = question.basis.news(None) if whole else question.news(client)
        tensors = {f"move.{i}": move.tensor for i, move in enumerate(moves)}
        tensors |= {f"root.{i}": move.root for i, move in enumerate(moves) if move.root is not None}
        records[MOVES] = pack(tensors)
    if isinstance(question, Order) and question.shared:
        records[SHARED] = pack(dict(question.shared))
    return records


def moves_of(request: Request, content: RecordDict) -> list[Move]:
    """What a message says has become of the shared basis."""
    tensors = tensors_in(content.array_records.get(MOVES, ArrayRecord()))
    return [Move(tensors[f"move.{i}"], tensors.get(f"root.{i}")) for i in range(request.curve["moves"])]


def question_of(
    request: Request,
    content: RecordDict,
    layout: Layout,
    like: Tensor,
    memory: Any,
    basis: Tensor | None = None,
    kept: Tensor | None = None,
) -> Asked:
    """The question that a message holds.

    `memory` is what this client keeps of its last round, `basis` its copy of the shared basis, up to date, and `kept`
    the model, if that is not in the message.
    """
    shape, kind = (layout.numel,), QUESTIONS.get(request.method)
    if kind is None:
        raise PayloadError(f"asks {request.method!r}, which this version does not know: update fipa here")
    arrays: Any = content.get(TENSORS)
    if not isinstance(arrays, ArrayRecord):
        raise PayloadError("has no tensors: the strategy leaves training to the app, FIPA(local=...) would not")
    wanted = ("direction",) if kind in (Bend, Remainder) else ("delta",) if kind is Curve and "delta" in arrays else ()
    found = unpack(arrays, dict.fromkeys(("theta", *wanted) if kept is None else wanted, shape), like.dtype)
    theta = found["theta"] if kept is None else kept
    if kind in (Bend, Remainder):
        return Bend(theta, found["direction"]) if kind is Bend else Remainder(theta, found["direction"])
    if kind is Curve:
        assert basis is not None
        assert request.plan is not None
        deltas = {request.client: found["delta"]} if "delta" in found else {}
        return Curve(theta, Basis(basis), request.plan, {}, deltas, request.curve["bits"])
    if kind is Gradient:
        return Gradient(theta)
    if kind in (Loss, VariedLoss):
        return Loss(theta) if kind is Loss else VariedLoss(theta)
    order, shared = request.order, content.array_records.get(SHARED)
    rank, steps = order["adaptive_rank"], order["adaptive_steps"]
    return Order(
        request.round_number,
        theta,
        request.local,
        request.lr_scale,
        request.plan,
        float(order["floor"]),
        None if rank is None else AdaptiveRank(**rank),
        None if steps is None else AdaptiveSteps(**steps),
        order["gradient_norm"],
        {} if shared is None else unpack(shared, dict.fromkeys(shared, shape), like.dtype),
        {} if memory is None else {request.client: memory},
        parts=int(order["parts"]),
        signs=int(order["signs"]),
    )


def check_version(record: Any) -> None:
    """Refuse other versions of the format."""
    version = record.get("version") if isinstance(record, ConfigRecord) else None
    if type(version) is not int or version != VERSION:
        raise PayloadError(f"is in version {version!r} of the format, not {VERSION}: use the same fipa everywhere")
