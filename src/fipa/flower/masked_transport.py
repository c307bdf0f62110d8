"""The transport of masked sums: clients are answered for by their pool, and nothing about one of them is told."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Message, MessageType
from numpy.typing import NDArray

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.basis import BasisCurvature
from fipa.errors import FipaError, SketchError
from fipa.federation.messages import POOL, Answers, Ask, Curve, Loss, Order, Reply, Who
from fipa.flower.inbox import lacks, names_in, reading
from fipa.flower.masked import MASKED, SECURE, unwrap, wrap
from fipa.flower.names import Names, agreed
from fipa.flower.request import Request
from fipa.flower.roster import collect
from fipa.flower.secure import SecureAggregationError, SecureServer, unflatten, vector_length
from fipa.flower.secure.shared import gradients_length, matrix_length, to_gradients, to_matrix
from fipa.flower.transport import UNLIKE, FlowerTransport, OtherNames
from fipa.randomness import seed_for


@dataclass(frozen=True, eq=False)
class _Pool:
    """The clients whose gradients are in a round's sum; they are asked again in the same round."""

    clients: tuple[int, ...]
    threshold: int
    loss: float
    num_examples: int


class MaskedTransport(FlowerTransport):
    """Takes four messages per client and sum: keys, shares of keys, the masked vector, and shares again.

    An order is answered with one pooled update. In a shared basis, `POOL` can then be asked for its curvature and for
    its loss at other models, which are sums over those who are left.

    Parameters
    ----------
    threshold, fraction_bits, signs
        See `fipa.flower.SecureFIPA`.
    """

    def __init__(self, *args: Any, threshold: int | None, fraction_bits: int, signs: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._threshold, self._bits, self._signs = threshold, fraction_bits, signs
        self._run, self._sums = secrets.token_hex(16), 0
        self._pool: _Pool | None = None

    def ask(self, ask: Ask) -> Callable[[], Answers]:
        """Refuses all that would look at one client."""
        question, pool = ask.question, self._pool
        if isinstance(question, Who) or (isinstance(question, Loss) and self._validate is not None):
            return super().ask(ask)
        if isinstance(question, Order):
            self._pool = None
            order, ask = question, replace(ask, keep=False)
            return lambda: self._gradients(ask, order) if order.plan is None else self._statistics(ask, order)
        if pool is None or ask.clients != (POOL,) or not isinstance(question, Curve | Loss):
            raise FipaError(f"masked sums hide what one client would say of {question.method}: only orders go out")
        other = question
        every = replace(ask, clients=pool.clients, keep=False, held=frozenset())
        return lambda: self._matrix(every, other, pool) if isinstance(other, Curve) else self._change(every, pool)

    def _statistics(self, ask: Ask, order: Order) -> Answers:
        """Additive statistics, pooled."""
        plan: Any = order.plan
        layout, seed = self.cargo.layout, seed_for(self.seed, "test matrix", ask.round_number)
        one = _Sum(self, ask, vector_length(layout.numel, plan.width), self._threshold)

        def told(total: NDArray[np.float64]) -> Reply:
            found = unflatten(total, layout, plan.width, seed, order.theta.dtype)
            return Reply(ClientUpdate(found.delta, found.num_examples, found), metrics=one.numbers(found.num_examples))

        return one.answers(told)

    def _gradients(self, ask: Ask, order: Order) -> Answers:
        """Gradients, as they are and with signs. Fewer sums than the fewest clients that there may be in the end."""
        theta, least = order.theta, self._threshold or len(ask.clients) // 2 + 1
        signs = max(0, min(self._signs, least - 2))
        ask = replace(ask, question=replace(order, signs=signs))
        one = _Sum(self, ask, gradients_length(len(theta), signs), least)

        def told(total: NDArray[np.float64]) -> Reply:
            found = to_gradients(total, len(theta), theta.dtype)
            self._pool = _Pool(tuple(one.server.survivors), one.server.threshold, found.loss, found.num_examples)
            loss = found.loss if self._validate is None else None  # losses of other examples say nothing of these
            update, numbers = ClientUpdate(found.update, found.num_examples), one.numbers(found.num_examples)
            return Reply(update, loss, metrics=numbers, directions=found.directions)

        return one.answers(told)

    def _matrix(self, ask: Ask, question: Curve, pool: _Pool) -> Answers:
        """The curvature in the shared basis, as one client would send it."""
        columns, dtype, layout = len(question.basis), question.theta.dtype, self.cargo.layout
        one = _Sum(self, ask, matrix_length(columns), pool.threshold)

        def told(total: NDArray[np.float64]) -> Any:
            wide = question.basis.columns.to(dtype)
            matrix = to_matrix(total, columns, dtype)
            return BasisCurvature(matrix, matrix.new_zeros(0), wide, layout).packed(question.bits)

        return one.answers(told)

    def _change(self, ask: Ask, pool: _Pool) -> Answers:
        """The loss at another model, as far as those tell who are left: that of others counts as it was."""
        return _Sum(self, ask, 1, pool.threshold).answers(lambda total: pool.loss + float(total[0]) / pool.num_examples)

    def server(self, ask: Ask, length: int, threshold: int | None) -> SecureServer:
        """The server's side of the protocol for one more sum."""
        self._sums += 1
        return SecureServer(ask.clients, self._run, self._sums, length, threshold, self._bits)


class _Sum:
    """One sum by the protocol."""

    def __init__(self, transport: MaskedTransport, ask: Ask, length: int, threshold: int | None) -> None:
        self._transport, self._ask, self._length, self._threshold = transport, ask, length, threshold
        self._refused: dict[int | str, str] = {}
        self._names: dict[int, Names] = {}  # what clients say their model is, where the server takes it for another
        self._traffic: dict[str, Any] = {"uplink": 0, "downlink": 0, "messages": 0}

    def answers(self, told: Callable[[NDArray[np.float64]], Any]) -> Answers:
        """What is told by the sum, as the answer of the pool."""
        try:
            self.server = self._transport.server(self._ask, self._length, self._threshold)
            while self.server.phase != "unmask":
                self._phase(self.server)
            value = told(self.server.total())
        except (SecureAggregationError, SketchError) as error:
            return Answers({}, refused={**self._refused, "masked sum": f"is not there: {error}"}, **self._traffic)
        clients = tuple(self.server.survivors)
        self._traffic["uplink"] += 8 * self._length * len(clients)
        return Answers({POOL: value}, refused=self._refused, pooled=clients, kept=False, **self._traffic)

    def numbers(self, examples: int) -> dict[str, float]:
        """For the log."""
        return {"pooled-clients": len(self.server.survivors), "examples": examples}

    def _phase(self, server: SecureServer) -> None:
        """Send what the protocol wants to say now, in one of its phases with the question, and hand in the replies."""
        contents, lacking = server.requests(), list[int]()
        received = self._exchange(server, contents, lacking)
        if lacking:
            again = {client: contents[client] for client in lacking}
            received += self._exchange(server, again, None, received)
        if len(self._names) > received:
            raise OtherNames(agreed(self._names))
        self._refused |= dict.fromkeys(self._names, UNLIKE)
        self._transport.inbox.forget(self._ask.round_number + 10**9)  # nobody waits for what is masked

    def _exchange(
        self, server: SecureServer, contents: Mapping[int, Any], lacking: list[int] | None, before: int = 0
    ) -> int:
        """Ask clients and take their answers: how many there are. Those who lack something are noted, once."""
        transport, kind = self._transport, f"{MessageType.QUERY}.{MASKED}"
        messages = dict[int, tuple[Request, Message]]()
        asks = server.phase == "masked"
        for client, content in contents.items():
            if asks:
                messages[client] = transport.message(self._ask, client, framed=lacking is None)
                messages[client][1].content[SECURE] = wrap(content)[SECURE]
            else:
                header = Request(MASKED, self._ask.round_number, client)
                message = Message(wrap(content), dst_node_id=transport.node(client), message_type=kind)
                messages[client] = header, message
        ids = transport.send(messages)
        self._traffic["downlink"] += sum(transport.size(message) for _, message in messages.values())
        self._traffic["messages"] += len(messages)
        replies = collect(transport.grid, ids, _Threshold(transport.patience, server.threshold - before))
        received = 0
        for request, answer in transport.inbox.matched(replies, self._refused):
            self._traffic["messages"] += 1
            with reading(request.client, self._refused):
                if asks and lacking is not None and lacks(answer):
                    lacking.append(request.client)
                    continue
                told = names_in(answer) if asks else None
                if told is not None:
                    theta: Any = self._ask.question
                    self._names[request.client] = Names.decode(told, transport.arrays(theta.theta))
                    continue
                received += 1
                server.receive(request.client, unwrap(answer, server.length if asks else None))
        return received


class _Threshold:
    """As patient as the transport, with the protocol's threshold for a quorum."""

    def __init__(self, patience: Any, threshold: int) -> None:
        self.deadline, self.grace, self.timeout = patience.deadline, patience.grace, patience.timeout
        self._threshold = threshold

    def enough(self, answered: int, asked: int) -> bool:
        return answered >= self._threshold
