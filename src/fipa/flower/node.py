"""A node that has an objective: model, data and loss of its own. It answers every question that a coordinator asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fipa.clients.client import Client
from fipa.clients.gradient import FullGradient
from fipa.curvature.basis import BasisCurvature
from fipa.curvature.summary import CurvaturePlan, CurvatureSummary, SampledPlan
from fipa.errors import FipaError
from fipa.federation.basis import follow
from fipa.federation.exact import mark_of
from fipa.federation.focus import focus
from fipa.federation.messages import MODELS, Curve, Order, Reply
from fipa.federation.problem import Problem
from fipa.federation.safety import CURVATURE, TRAINING
from fipa.federation.site import Site
from fipa.flower.answer import encode, encode_value
from fipa.flower.codec import pack, tensors_in
from fipa.flower.copies import Copies
from fipa.flower.inbox import NEEDS
from fipa.flower.masked import SECURE, masked, masked_gradient, masked_loss, masked_matrix
from fipa.flower.names import HALF, NAMES, Names
from fipa.flower.request import FRAME, KEY, TENSORS, VERSION, Request, moves_of, question_of
from fipa.flower.transport import checksum
from fipa.threads import threads

STORED, MEMORY = "fipa-frame", "fipa-memory-"  # in the client's context: what never changes, and memories by round
SITES = 16  # that a process keeps: in a deployment it needs one
Objective = Callable[[Context], Any]
SiteOf = Callable[[Context, Request, Mapping[str, Tensor], Mapping[str, Any]], Site]  # with frame and config


class Other(Exception):  # noqa: N818
    """This node's model is not what the server takes it for."""


class Lacking(Exception):  # noqa: N818
    """This node lacks the arrays that never change, or a copy of the basis or of the model that the server means."""


def answered(message: Message, context: Context, site_of: SiteOf) -> Message:
    """The reply to a question, from this node's own data; computed with as many threads as its config says."""
    config: Mapping[str, Any] = message.content.config_records.get("config", {})
    with threads(int(config.get("threads", torch.get_num_threads()))):
        return _answered(message, context, site_of, config)


def _answered(message: Message, context: Context, site_of: SiteOf, config: Mapping[str, Any]) -> Message:
    request, content, begun = Request.of(message.content), message.content, time.perf_counter()
    try:
        site = site_of(context, request, _frame(request, content, context), config)
        layout, like = site.problem.layout, site.initial
        models = Copies(f"{context.run_id}-{request.client}", "models", MODELS)
        kept = _model(request, content, models, like)
        basis = _basis(request, content, context, layout.numel) if request.method == Curve.method else None
    except Lacking as lacking:
        return Message(RecordDict({KEY: ConfigRecord({NEEDS: str(lacking)})}), reply_to=message)
    except Other as other:
        return Message(told(request, other.args[0]), reply_to=message)
    question = question_of(request, content, layout, like, _memory(request, context), basis, kept)
    if request.model and kept is None:
        models.save(question.theta, mark_of(question.theta))  # no name of a file that the server has chosen
    clients = (request.client,)
    if isinstance(question, Order):
        before = getattr(site, "seconds", 0.0)
        (reply,) = site.work(clients, question)
        if isinstance(site, Clocked) and reply.update.sketch is not None:
            curvature = site.seconds - before
            spent = {TRAINING: time.perf_counter() - begun - curvature, CURVATURE: curvature}
            reply = replace(reply, metrics={**reply.metrics, **spent})
        if SECURE in content:
            return Message(_masked(content, context, request, question, reply), reply_to=message)
        _keep(reply, request, context)
        return Message(encode(request, _noted(reply, question, request)), reply_to=message)
    (value,) = getattr(site, request.method)(clients, *question.about(), request.round_number)
    if SECURE in content:
        examples = site.clients[request.client].num_examples
        if isinstance(question, Curve):
            wide = question.basis.columns.to(question.theta)
            matrix = BasisCurvature.unpacked(value, wide, layout, question.bits).matrix
            return Message(masked_matrix(content, context, matrix, examples), reply_to=message)
        return Message(masked_loss(content, context, request, value, examples), reply_to=message)
    return Message(encode_value(request, value), reply_to=message)


def _masked(content: RecordDict, context: Context, request: Request, order: Order, reply: Reply) -> RecordDict:
    """The reply to an order under masks: a gradient alone for a shared basis, or statistics that add up."""
    if order.plan is None and isinstance(order.local, FullGradient):
        return masked_gradient(content, context, request, reply, order.signs)
    return masked(content, context, reply.update.sketch, reply.buffers)


class Clocked(Site):
    """A site that tells how many seconds of curvature it has computed so far."""

    seconds = 0.0

    def _compute(self, plan: CurvaturePlan, client: int, *args: Any) -> CurvatureSummary:
        begun = time.perf_counter()
        if isinstance(plan, SampledPlan):
            plan = plan.for_loss(self.clients[client].loss)  # which the server does not know
        try:
            return super()._compute(plan, client, *args)
        finally:
            self.seconds += time.perf_counter() - begun


def expected(request: Request, names: Names) -> bool:
    """Whether a client's model is what the server takes it for; an error if that has been settled otherwise."""
    other = [name for name in request.params if name not in names.trained]
    if other and request.settled:
        raise FipaError(
            f"the server trains {other[0]!r}, which is frozen here, or no parameter: build the same model everywhere, "
            "or give FIPA(params=...) the names of those that all clients train"
        )
    tied = set(names.tied.values()) & set(request.params)
    return request.settled or not (other or tied or set(names.averaged) - set(request.buffers))


def told(request: Request, names: Names) -> RecordDict:
    """The reply that says what the model is: the server asks again."""
    head: dict[str, Any] = {"version": VERSION, "round": request.round_number, "client": request.client}
    return RecordDict({KEY: ConfigRecord({**head, NAMES: names.encode()})})


def site_by(objective: Objective) -> SiteOf:
    """Sites of one client each, from what `objective(context)` returns; the last ones are kept, for one run each."""
    kept: dict[Any, Site] = {}

    def site_of(context: Context, request: Request, frame: Mapping[str, Tensor], _: Mapping[str, Any]) -> Site:
        key = (context.run_id, context.node_id, request.client, request.seed, request.params, request.frame)
        if key not in kept:
            model, client = unpacked(objective(context))
            names = Names.of(model, {name: tensor.cpu() for name, tensor in model.state_dict().items()})
            if not expected(request, names):
                raise Other(names)
            problem = framed(Problem(model, [client], _no_metric), request, frame, names.tied)
            kept[key] = Clocked(problem, request.seed, ids=(request.client,))
            while len(kept) > SITES:
                del kept[next(iter(kept))]
        return kept[key]

    return site_of


def evaluated(content: RecordDict, returned: Any) -> RecordDict:
    """The loss of a whole model on an objective's data, and for classes its accuracy."""
    model, client = unpacked(returned)
    (arrays,) = content.array_records.values()
    model.load_state_dict(arrays.to_torch_state_dict())
    problem = Problem(model, [client], _no_metric)
    (loss,) = Site(problem, 0).losses((0,), problem.initial)
    numbers: dict[str, Any] = {"loss": loss, "num-examples": client.num_examples}
    if client.loss == "cross_entropy":
        x, y = client.tensors
        with torch.no_grad():
            numbers["accuracy"] = float((model(x).argmax(1) == y).float().mean())
    return RecordDict({"metrics": MetricRecord(numbers)})


def unpacked(returned: Any) -> tuple[nn.Module, Client]:
    """A model and a client from (model, data), (model, data, loss) or (model, Client)."""
    if not (isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)):
        raise FipaError("objective(context) must return (model, data) or (model, data, loss), data as for fipa.sketch")
    model, data = returned[:2]
    if any(parameter.dtype in HALF for parameter in model.parameters()):
        model = model.float()  # trained and sketched in single precision: the server adds up in that
    if isinstance(data, Client):
        return model, data
    return model, Client.of(data, returned[2] if len(returned) == 3 else "cross_entropy")


def framed(
    problem: Problem, request: Request, frame: Mapping[str, Tensor], tied: Mapping[str, str] = MappingProxyType({})
) -> Problem:
    """The problem of training `request.params`, with all other arrays as the server has them.

    `tied` has other names of trained parameters.
    """
    model, own = problem.model, problem.model.state_dict()
    unknown = [name for name in request.params if name not in own]
    if unknown:
        raise FipaError(f"the server trains {unknown[0]!r}, which is no parameter of this objective's model")
    rest = {name: tensor for name, tensor in own.items() if name not in (*request.params, *request.buffers, *tied)}
    if frame:
        model.load_state_dict(dict(frame), strict=False)
    elif checksum(rest) != request.frame:
        raise Lacking("frame")
    problem = focus(problem, request.params) if rest else problem
    if problem.layout.shapes != tuple(tuple(own[name].shape) for name in request.params):
        raise FipaError("this objective's model has other parameters than the server's: build the same one everywhere")
    return problem


def _no_metric(_: nn.Module) -> float:
    raise FipaError("a client does not evaluate by a metric")


def _frame(request: Request, content: RecordDict, context: Context) -> dict[str, Tensor]:
    """Arrays that never change: as just sent, or as kept; none if the objective's own may do."""
    if not request.frame:
        return {}
    if FRAME in content:
        context.state[STORED] = content.array_records[FRAME]
    kept = context.state.get(STORED)
    tensors = tensors_in(kept) if isinstance(kept, ArrayRecord) else {}
    return tensors if checksum(tensors) == request.frame else {}


def _basis(request: Request, content: RecordDict, context: Context, parameters: int) -> Tensor:
    """This node's copy of the shared basis, brought up to date; one that differs from the server's is given up."""
    copies = Copies(f"{context.run_id}-{request.client}")
    columns = copies.load(request.curve["from"], parameters)
    if columns is None:
        raise Lacking("basis")
    columns = follow(columns, moves_of(request, content))
    if mark_of(columns) != request.curve["to"]:
        copies.clear()
        raise Lacking("basis")
    copies.save(columns, request.curve["to"])
    return columns


def _model(request: Request, content: RecordDict, models: Copies, like: Tensor) -> Tensor | None:
    """The model, as kept, if it is not in the message."""
    if not request.model or "theta" in content.array_records.get(TENSORS, ()):
        return None
    kept = models.load(request.model, len(like))
    if kept is None or kept.dtype != like.dtype:
        raise Lacking("model")
    return kept


def _memory(request: Request, context: Context) -> dict[str, Tensor] | None:
    record = context.state.get(f"{MEMORY}{request.memory}")
    return tensors_in(record) if isinstance(record, ArrayRecord) else None


def _keep(reply: Reply, request: Request, context: Context) -> None:
    """Keep the memory of this round beside the one that held before: a server that restarts may ask again."""
    if reply.memory is None:
        return
    held = f"{MEMORY}{request.memory}"
    for name in [name for name in context.state if name.startswith(MEMORY) and name != held]:
        del context.state[name]
    context.state[f"{MEMORY}{request.round_number}"] = pack(dict(reply.memory))


def _noted(reply: Reply, order: Order, request: Request) -> Reply:
    """Say so if the server believes in a memory that this node has lost."""
    if request.memory is None or request.client in order.memories:
        return reply
    return replace(reply, notes=(*reply.notes, f"has lost its memory of round {request.memory}: begins without"))
