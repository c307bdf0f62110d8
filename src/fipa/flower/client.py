"""A Flower ClientApp as a client of `fipa.flower.FIPA`, in three lines.

With training of its own: make it with `app = fipa.flower.client(ClientApp())`, and end its train function, after the
training, with `return fipa.flower.reply(message, context, model, trainloader, {"train_loss": loss})`.
Without: `app = fipa.flower.client(ClientApp(), objective=lambda context: (model, data, loss))`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.summary import CurvatureSummary, Occasion
from fipa.curvature.terms import LossName
from fipa.errors import FipaError
from fipa.federation.messages import Reply
from fipa.flower.answer import encode
from fipa.flower.masked import MASKED, SECURE, masked
from fipa.flower.masked import answered as answered_masked
from fipa.flower.node import Objective, SiteOf, answered, site_by
from fipa.flower.request import FIPA_ACTION, KEY, WHO, Request
from fipa.layout import Layout
from fipa.randomness import seed_for

ARRAYS = "arrays"
EXAMPLES = "num-examples"


def client(app: ClientApp, objective: Objective | None = None, *, site_of: SiteOf | None = None) -> ClientApp:
    """Let an app take part in FIPA.

    It tells the server which partition it holds, since clients are drawn and added up in that order, and takes part in
    masked sums. With an objective it needs no train function: it answers all that any rule, its step control and its
    acceleration want to know.

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
    if objective is not None:
        site_of = site_by(objective)

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        partition = context.node_config.get("partition-id")
        if not isinstance(partition, int):
            raise FipaError("this node has no partition id: start it with --node-config 'partition-id=0 ...'")
        return Message(RecordDict({KEY: ConfigRecord({"partition": partition})}), reply_to=message)

    @app.query(MASKED)
    def exchange(message: Message, context: Context) -> Message:
        return Message(answered_masked(message.content, context), reply_to=message)

    @app.query(FIPA_ACTION)
    def query(message: Message, context: Context) -> Message:
        return _by_site(message, context, site_of)

    @app.train(FIPA_ACTION)
    def train(message: Message, context: Context) -> Message:
        return _by_site(message, context, site_of)

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
    num_examples: int | None = None,
) -> Message:
    """Answer a train message: the update, and what the server wants to know of the curvature.

    Parameters
    ----------
    message, context
        As Flower gave them: the message has the parameters that training began with.
    model
        After training; it stays as it is.
    data
        What it was trained on, as for `fipa.sketch`: tensors (x, y) or an iterable of such batches.
    metrics
        Numbers for the server's log.
    loss
        That the model was trained with.
    num_examples
        The client's weight; by default `metrics["num-examples"]`, or else the length of the data.
    """
    request = Request.of(message.content)
    metrics = dict(metrics or {})
    count = num_examples or metrics.get(EXAMPLES) or _length(data)
    before = message.content.array_records[ARRAYS].to_torch_state_dict()
    layout, delta = _delta(model, before, request.params)
    source = Data(data, loss, int(count))
    summary = curvature(request, _at(model, before), layout, source, delta)
    after = model.state_dict()
    buffers = {name: after[name].detach() for name in request.buffers if name in after}
    if SECURE in message.content:
        return Message(masked(message.content, context, summary, buffers), reply_to=message)
    update = ClientUpdate(delta, int(count), summary, request.client)
    numbers = {name: value for name, value in metrics.items() if name != EXAMPLES}
    return Message(encode(request, Reply(update, buffers=buffers, metrics=numbers)), reply_to=message)


def curvature(request: Request, model: nn.Module, layout: Layout, data: Data, delta: Tensor) -> CurvatureSummary | None:
    """What a request wants to know, at the model's present parameters."""
    k, plan = request.round_number, request.plan
    own, shared = seed_for(request.seed, "sketch", k, request.client), seed_for(request.seed, "test matrix", k)
    return None if plan is None else plan.compute(model, layout, data, Occasion(own, shared, delta))


def _delta(model: nn.Module, before: Mapping[str, Tensor], names: tuple[str, ...]) -> tuple[Layout, Tensor]:
    """The change of the parameters that the server wants, flat, and their layout."""
    params = dict(model.named_parameters())
    missing = [name for name in names if name not in params or name not in before]
    if missing:
        raise FipaError(
            f"the server trains {missing[0]!r}, which is no parameter here: give FIPA(params=...) its names"
        )
    frozen = [name for name in names if not params[name].requires_grad]
    if frozen:
        raise FipaError(
            f"the server trains {frozen[0]!r}, which is frozen here: give FIPA(params=...) the others' names"
        )
    change = {name: params[name].detach().cpu() - before[name] for name in names}
    layout = Layout.of(change)
    return layout, layout.flatten(change)


def _at(model: nn.Module, before: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model with the parameters that the server sent."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.load_state_dict(dict(before), strict=False)
    return twin


def _length(data: Any) -> int:
    """Number of examples."""
    data = getattr(data, "dataset", data)
    if isinstance(data, list):
        return sum(_length(batch) for batch in data)
    data = data[0] if isinstance(data, tuple) else data
    if not isinstance(data, Sized):
        raise FipaError("how many examples are these? give reply(..., num_examples=...)")
    return len(data)
