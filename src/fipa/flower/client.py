"""An existing Flower ClientApp as a client of `fipa.flower.FIPA`, in three lines.

Make it with `app = fipa.flower.client(ClientApp())`, and end its train function, after the training, with
`return fipa.flower.reply(message, context, model, trainloader, {"train_loss": loss})`.
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
from fipa.flower.answer import Answer, encode
from fipa.flower.masked import MASKED, SECURE, answered, masked
from fipa.flower.request import KEY, Request
from fipa.layout import Layout

WHO = "fipa"  # action of the query that asks who a node is
ARRAYS = "arrays"
EXAMPLES = "num-examples"


def client(app: ClientApp) -> ClientApp:
    """Let an app tell the server which partition it holds, and take part in masked sums.

    Clients are drawn and added up in the order of their partitions.
    """

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        partition = context.node_config.get("partition-id")
        if not isinstance(partition, int):
            raise FipaError("this node has no partition id: start it with --node-config 'partition-id=0 ...'")
        return Message(RecordDict({KEY: ConfigRecord({"partition": partition})}), reply_to=message)

    @app.query(MASKED)
    def exchange(message: Message, context: Context) -> Message:
        return Message(answered(message.content, context), reply_to=message)

    return app


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
    return Message(encode(request, Answer(update, buffers, numbers)), reply_to=message)


def curvature(request: Request, model: nn.Module, layout: Layout, data: Data, delta: Tensor) -> CurvatureSummary | None:
    """What a request wants to know, at the model's present parameters."""
    if request.plan is None:
        return None
    return request.plan.compute(model, layout, data, Occasion(request.seed, request.test_seed, delta))


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
