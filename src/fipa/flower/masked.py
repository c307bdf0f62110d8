"""A client's part in a masked sum (`fipa.flower.secure`) within Flower's messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import Tensor

from fipa.curvature.additive import AdditiveStatistics
from fipa.curvature.summary import CurvatureSummary
from fipa.errors import FipaError
from fipa.federation.messages import Reply
from fipa.flower.codec import PayloadError
from fipa.flower.request import Request
from fipa.flower.secure import SecureAggregationError, SecureClient, flatten
from fipa.flower.secure.shared import from_gradient, from_loss, from_matrix, signs_for

MASKED = "fipa_masked"  # action of the queries before and after training
SECURE, VECTOR = "secure", "masked"
STATE, LOSS = "fipa-secure", "fipa-secure-loss"  # in the client's own context: every message may run in a new process


def wrap(message: Mapping[str, Any]) -> RecordDict:
    """A message of the protocol as it travels."""
    plain = {name: value for name, value in message.items() if name != VECTOR}
    records: dict[str, Any] = {SECURE: ConfigRecord(plain)}
    if VECTOR in message:
        words: np.ndarray[Any, np.dtype[np.uint64]] = message[VECTOR]
        data = words.astype("<u8", copy=False).tobytes()
        records[VECTOR] = ArrayRecord({VECTOR: Array("uint64", words.shape, "fipa.rows", data)})
    return RecordDict(records)


def unwrap(content: RecordDict, length: int | None = None) -> dict[str, Any]:
    """A message of the protocol; with the length of the vector where there must be one."""
    record = content.get(SECURE)
    if not isinstance(record, ConfigRecord):
        raise PayloadError(f"has no ConfigRecord {SECURE!r}")
    message: dict[str, Any] = dict(record)
    if length is not None:
        arrays = content.get(VECTOR)
        array = arrays.get(VECTOR) if isinstance(arrays, ArrayRecord) else None
        if array is None or array.shape != (length,) or len(array.data) != 8 * length:
            raise PayloadError(f"has no masked vector of {length} entries")
        message[VECTOR] = np.frombuffer(array.data, "<u8").astype(np.uint64, copy=False)
    return message


def answered(content: RecordDict, context: Context) -> RecordDict:
    """The reply to a phase that needs no training."""
    message = unwrap(content)
    client = _fresh(message, context) if message.get("phase") == "keys" else _kept(context)
    reply = client.reply(message)
    _keep(client, context)
    return wrap(reply)


def masked(content: RecordDict, context: Context, statistics: CurvatureSummary | None, buffers: object) -> RecordDict:
    """The reply to the phase with the client's own numbers: nothing of them is readable."""
    if not isinstance(statistics, AdditiveStatistics):
        raise FipaError("a masked sum needs additive statistics: use fipa.flower.SecureFIPA on the server")
    if buffers:
        raise FipaError("statistics of BatchNorm cannot be summed under masks: use GroupNorm, as the paper's models do")
    return _added(content, context, lambda: flatten(statistics))


def masked_gradient(content: RecordDict, context: Context, request: Request, reply: Reply, signs: int) -> RecordDict:
    """The reply with a gradient and a loss; the loss is kept, to tell by how much it changes."""
    update, loss = reply.update.delta, reply.loss
    assert isinstance(update, Tensor)
    assert loss is not None
    k = request.round_number
    drawn = signs_for(request.seed, k, request.client, signs)
    context.state[LOSS] = ConfigRecord({"round": k, "loss": float(loss)})
    return _added(
        content, context, lambda: from_gradient(update, loss, reply.update.num_examples, drawn), sums=signs + 1
    )


def masked_matrix(content: RecordDict, context: Context, matrix: Tensor, examples: int) -> RecordDict:
    """The reply with a curvature in the shared basis."""
    return _added(content, context, lambda: from_matrix(matrix, examples))


def masked_loss(content: RecordDict, context: Context, request: Request, loss: float, examples: int) -> RecordDict:
    """The reply that tells by how much the loss changes from the model that was broadcast.

    Not the loss at both: of a client that leaves between two sums, the difference would tell its own.
    """
    kept = context.state.get(LOSS)
    if not isinstance(kept, ConfigRecord) or kept["round"] != request.round_number:
        raise SecureAggregationError("this client has not told its loss at the start of the round")
    before = float(str(kept["loss"]))
    return _added(content, context, lambda: from_loss(before, loss, examples))


def _added(
    content: RecordDict, context: Context, vector: Callable[[], NDArray[np.float64]], sums: int = 1
) -> RecordDict:
    """The reply with a vector under masks; as many sums as there are clients would give each of them away."""
    client = _kept(context)
    if client.threshold <= sums:
        raise SecureAggregationError(
            f"the server asks for {sums} sums of as few as {client.threshold} clients, which tell what each of them "
            "sent: raise the threshold, or lower SecureFIPA(signs=...)"
        )
    try:
        reply = client.reply(unwrap(content), vector())
    except FipaError as error:
        log(ERROR, "no masked vector: %s", error)  # for the client's eyes: the reason names its largest number
        raise SecureAggregationError("this client leaves the round, see its own log") from None
    _keep(client, context)
    return wrap(reply)


def _fresh(message: Mapping[str, Any], context: Context) -> SecureClient:
    """A client for a new sum, but never for one that was there before: one summed up twice gives vectors away."""
    run, k, partition = str(message.get("run")), message.get("round"), context.node_config.get("partition-id")
    if not isinstance(k, int) or not isinstance(partition, int):
        raise PayloadError("has no round number, or this node no partition id")
    before = context.state.get(STATE)
    if isinstance(before, ConfigRecord) and before["run"] == run and int(str(before["round"])) >= k:
        raise SecureAggregationError(f"round {k} of this run has been here before: refused")
    return SecureClient(partition, run, k)


def _kept(context: Context) -> SecureClient:
    record = context.state.get(STATE)
    if not isinstance(record, ConfigRecord):
        raise SecureAggregationError("this client has not seen the start of the round")
    return SecureClient.restore(bytes(record["state"]))  # type: ignore[arg-type]


def _keep(client: SecureClient, context: Context) -> None:
    context.state[STATE] = ConfigRecord({"run": client.run, "round": client.round_number, "state": client.export()})
