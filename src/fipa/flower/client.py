"""A Flower ClientApp as a client of `fipa.flower.FIPA`, in three lines.

With training of its own: make it with `app = fipa.flower.client(ClientApp())`, and end its train function, after the
training, with `return fipa.flower.reply(message, context, model, trainloader, {"train_loss": loss})`.
Without: `app = fipa.flower.client(ClientApp(), objective=lambda context: (model, data, loss))`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.summary import CurvatureSummary, Occasion, SampledPlan
from fipa.curvature.terms import LossName
from fipa.errors import FipaError, SketchError, instead_of
from fipa.federation.messages import Reply
from fipa.federation.safety import CURVATURE, TRAINING
from fipa.flower.answer import encode
from fipa.flower.batches import Forward, adapted
from fipa.flower.masked import MASKED, SECURE, masked
from fipa.flower.masked import answered as answered_masked
from fipa.flower.names import HALF, Names, change
from fipa.flower.node import Objective, SiteOf, answered, evaluated, expected, site_by, told
from fipa.flower.request import FIPA_ACTION, JUDGE, KEY, OBJECTIVE, WHO, Request
from fipa.flower.watch import Training, current, replaceable, watched
from fipa.layout import Layout
from fipa.randomness import seed_for

ARRAYS = "arrays"
EXAMPLES = "num-examples"


def client(app: ClientApp, objective: Objective | None = None, *, site_of: SiteOf | None = None) -> ClientApp:
    """Let an app take part in FIPA.

    It tells the server which partition it holds, since clients are drawn and added up in that order, and takes part in
    masked sums. With an objective it needs no train function: it answers all that any rule, its step control and its
    acceleration want to know. It also evaluates, on the objective's data, unless the app has an evaluate function.

    Parameters
    ----------
    objective
        `objective(context)` returns this node's `(model, data)` or `(model, data, loss)`, data and loss as for
        `fipa.sketch`. `FIPA(local=...)` on the server says how to train on them.
    site_of
        Instead of it, what makes a whole `Site` (see `fipa.flower.node`).

    Examples
    --------
    >>> model, x, y = nn.Linear(4, 3), torch.randn(20, 4), torch.randint(3, (20,))
    >>> app = client(ClientApp(), objective=lambda context: (model, (x, y), "cross_entropy"))
    """
    if not isinstance(app, ClientApp):
        raise FipaError(
            f"client(...) takes a flwr.clientapp.ClientApp, got a {type(app).__name__}: client(ClientApp())"
        )
    if objective is not None:
        if not callable(objective):
            raise FipaError("objective is a function of the node's context that returns (model, data)")
        site_of = site_by(objective)

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        partition = context.node_config.get("partition-id")
        if not isinstance(partition, int):
            raise FipaError("this node has no partition id: start it with --node-config 'partition-id=0 ...'")
        trains, judges = app.train.own(), app.evaluate.own()  # type: ignore[attr-defined]
        told: dict[str, Any] = {"partition": partition, OBJECTIVE: site_of is not None and not trains, JUDGE: judges}
        return Message(RecordDict({KEY: ConfigRecord(told)}), reply_to=message)

    @app.query(MASKED)
    def exchange(message: Message, context: Context) -> Message:
        return Message(answered_masked(message.content, context), reply_to=message)

    @app.query(FIPA_ACTION)
    def query(message: Message, context: Context) -> Message:
        return _by_site(message, context, site_of)

    @app.train(FIPA_ACTION)
    def train(message: Message, context: Context) -> Message:
        return _by_site(message, context, site_of)

    def untrained(message: Message, context: Context) -> Message:
        raise FipaError(
            "the server leaves training to the app, and this one has no @app.train() function: give it one that ends "
            "in fipa.flower.reply(...), or an objective, client(ClientApp(), objective=...), and let the server say "
            "how to train on it, FIPA(local=...)"
        )

    def judged(message: Message, context: Context) -> Message:
        if objective is None:
            raise FipaError(
                "the server wants this node's loss, and its app has no @app.evaluate() function: give it one, or let "
                "the server judge, FIPA(fraction_evaluate=0.0, validate=...)"
            )
        return Message(evaluated(message.content, objective(context)), reply_to=message)

    app.train = replaceable(app.train, untrained, (watched,))  # type: ignore[method-assign]
    app.evaluate = replaceable(app.evaluate, judged)  # type: ignore[method-assign]
    return app


def _by_site(message: Message, context: Context, site_of: SiteOf | None) -> Message:
    if site_of is None:
        raise FipaError(
            "the server wants to train and judge by this node's objective, and the app has none: make it with "
            "fipa.flower.client(ClientApp(), objective=...), or leave local rule and step control out of FIPA(...)"
        )
    return answered(message, context, site_of)


@dataclass(frozen=True, eq=False)
class Data:
    """What curvature is taken of."""

    tensors: Any
    loss: LossName
    num_examples: int


def reply(
    message: Message,
    context: Context,
    model: nn.Module,
    data: Any,
    metrics: MetricRecord | Mapping[str, Any] | None = None,
    *,
    loss: LossName = "cross_entropy",
    forward: Forward | None = None,
    residual: Forward | None = None,
    num_examples: int | None = None,
) -> Message:
    """Answer a train message: the update, and what the server wants to know of the curvature.

    Parameters
    ----------
    message, context
        As Flower gave them: the message has the parameters that training began with.
    model
        After training; it stays as it is. In float16 or bfloat16 its curvature is computed in float32.
    data
        What it was trained on: tensors (x, y), a `DataLoader`, or any iterable of batches. Batches are x, (x, y), or
        dicts, of which the model takes all tensors but the labels: one as its argument, several as keywords.
    metrics
        Numbers for the server's log.
    loss
        That the model was trained with: `"cross_entropy"` of its outputs or their `.logits`, or `"mse"`.
    forward
        `forward(model, batch)` returns the model's outputs (examples x outputs) for batches of any other form.
    residual
        `residual(model, batch)` returns what the loss is the mean square of (examples, or examples x numbers).
    num_examples
        The client's weight; by default `metrics["num-examples"]`, or else the length of the data.
    """
    request = Request.of(message.content)
    training, metrics = current.get(), dict(metrics or {})
    count = _count(num_examples, metrics, data)
    seconds = None if training is None else training.seconds
    if loss not in get_args(LossName):
        raise FipaError(f"reply(loss={loss!r}): {instead_of(loss, get_args(LossName))}, or give residual=")
    before = message.content.array_records[ARRAYS].to_torch_state_dict()
    notes = _rate(request, training)
    names = Names.of(model, before)
    if not names.trained:
        raise FipaError("no parameter of this model requires a gradient: nothing of it is trained")
    if not expected(request, names):
        return Message(told(request, names), reply_to=message)
    layout, delta = change(model, before, request.params)
    if not bool(delta.isfinite().all()):
        raise FipaError("training has left the finite numbers: lower the learning rate")
    begun = time.perf_counter()
    twin, batches = _at(model, before), data
    if request.plan is not None and loss != "least_squares":
        twin, batches = adapted(twin, data, forward or residual)
    summary = curvature(request, twin, layout, Data(batches, "mse" if residual else loss, count), delta)
    if seconds is not None and summary is not None:
        metrics |= {TRAINING: seconds, CURVATURE: time.perf_counter() - begun}
    after = model.state_dict()
    buffers = {name: _wide(after[name].detach()) for name in request.buffers if name in after}
    if SECURE in message.content:
        return Message(masked(message.content, context, summary, buffers), reply_to=message)
    update = ClientUpdate(delta, count, summary, request.client)
    numbers = {name: value for name, value in metrics.items() if name != EXAMPLES}
    answer = Reply(update, notes=notes, buffers=buffers, metrics=numbers)
    return Message(encode(request, answer), reply_to=message)


def curvature(request: Request, model: nn.Module, layout: Layout, data: Data, delta: Tensor) -> CurvatureSummary | None:
    """What a request wants to know, at the model's present parameters."""
    k, plan = request.round_number, request.plan
    own, shared = seed_for(request.seed, "sketch", k, request.client), seed_for(request.seed, "test matrix", k)
    if plan is None:
        return None
    settings: Any = plan.for_loss(data.loss) if isinstance(plan, SampledPlan) else plan
    occasion = Occasion(own, shared, delta)
    try:
        found: CurvatureSummary = settings.compute(model, layout, data, occasion)
    except SketchError:
        if getattr(plan, "route", None) != "auto":
            raise
        found = replace(settings, route="matrix_free").compute(model, layout, data, occasion)  # takes more models
    return found


def _rate(request: Request, training: Training | None) -> tuple[str, ...]:
    """A factor for the learning rate that nobody read is an error if the user gave it, and a note if the server did."""
    name = None if training is None or request.lr_scale == 1.0 else training.unread()
    if name is None:
        return ()
    text = (
        f"the learning rate is to be scaled by {request.lr_scale:g}, and the train function did not read it: take it "
        f'from message.content["config"]["{name}"]'
    )
    if request.strict:
        raise FipaError(f"{text}, or leave lr_scale out of FIPA(...)")
    return (text,)


def _count(given: int | None, metrics: Mapping[str, Any], data: Any) -> int:
    count = next((n for n in (given, metrics.get(EXAMPLES)) if n is not None), None)
    count = _length(data) if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise FipaError(f"reply: num-examples = {count!r}, expected a whole number of at least 1")
    return count


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _at(model: nn.Module, before: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model with the parameters that the server sent, in float32 at least."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.load_state_dict(dict(before), strict=False)
    if any(parameter.dtype in HALF for parameter in twin.parameters()):
        twin = twin.float()
    return twin


def _length(data: Any) -> int:
    """Number of examples."""
    data = getattr(data, "dataset", data)
    if isinstance(data, list):
        return sum(_length(batch) for batch in data)
    if isinstance(data, Mapping):
        data = next((part for part in data.values() if isinstance(part, Tensor)), data)
    data = data[0] if isinstance(data, tuple) else data
    if not isinstance(data, Sized):
        raise FipaError("how many examples are these? give reply(..., num_examples=...)")
    return len(data)
