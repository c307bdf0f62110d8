"""The transport of masked sums: an order is answered with one pooled update, and nothing else is answered at all."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from flwr.app import Message, MessageType

from fipa.aggregation.update import ClientUpdate
from fipa.errors import FipaError
from fipa.federation.messages import Answers, Ask, Loss, Order, Reply, Who
from fipa.flower.inbox import names_in, reading
from fipa.flower.masked import MASKED, SECURE, unwrap, wrap
from fipa.flower.names import Names, agreed
from fipa.flower.request import Request
from fipa.flower.roster import collect
from fipa.flower.secure import SecureAggregationError, SecureServer, unflatten, vector_length
from fipa.flower.transport import UNLIKE, FlowerTransport, OtherNames
from fipa.randomness import seed_for

POOL = -1  # in the place of a client: all of them together


class MaskedTransport(FlowerTransport):
    """Takes four messages per client: keys, shares of keys, the masked vector after training, and shares again.

    Parameters
    ----------
    threshold, fraction_bits
        See `fipa.flower.SecureFIPA`.
    """

    def __init__(self, *args: Any, threshold: int | None, fraction_bits: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._threshold, self._bits = threshold, fraction_bits
        self._run = secrets.token_hex(16)

    def ask(self, ask: Ask) -> Callable[[], Answers]:
        """Refuses all that would look at one client."""
        question = ask.question
        if isinstance(question, Who) or (isinstance(question, Loss) and self._validate is not None):
            return super().ask(ask)
        if not isinstance(question, Order):
            raise FipaError(f"masked sums hide what one client would say of {question.method}: only orders go out")
        order = question
        return lambda: _Sum(self, ask, order).answers()

    def server(self, ask: Ask, order: Order) -> SecureServer:
        """The server's side of the protocol in one round."""
        plan: Any = order.plan
        length = vector_length(self.cargo.layout.numel, plan.width)
        return SecureServer(ask.clients, self._run, ask.round_number, length, self._threshold, self._bits)


class _Sum:
    """One round of the protocol."""

    def __init__(self, transport: MaskedTransport, ask: Ask, order: Order) -> None:
        self._transport, self._ask, self._order = transport, ask, order
        self._refused: dict[int | str, str] = {}
        self._names: dict[int, Names] = {}  # what clients say their model is, where the server takes it for another
        self._traffic: dict[str, Any] = {"uplink": 0, "downlink": 0, "messages": 0}

    def answers(self) -> Answers:
        plan: Any = self._order.plan
        layout, theta = self._transport.cargo.layout, self._order.theta
        try:
            server = self._transport.server(self._ask, self._order)
            while server.phase != "unmask":
                self._phase(server)
            k, run = self._ask.round_number, self._transport.seed
            total = unflatten(server.total(), layout, plan.width, seed_for(run, "test matrix", k), theta.dtype)
        except SecureAggregationError as error:
            return Answers({}, refused={**self._refused, "masked sum": f"is not there: {error}"}, **self._traffic)
        numbers = {"pooled-clients": len(server.survivors), "examples": total.num_examples}
        reply = Reply(ClientUpdate(total.delta, total.num_examples, total), metrics=numbers)
        self._traffic["uplink"] += 8 * server.length * len(server.survivors)
        return Answers({POOL: reply}, refused=self._refused, **self._traffic)

    def _phase(self, server: SecureServer) -> None:
        """Send what the protocol wants to say now, in one of its phases with the order, and hand in the replies."""
        transport, kind = self._transport, f"{MessageType.QUERY}.{MASKED}"
        requests, messages = server.requests(), dict[int, tuple[Request, Message]]()
        trains = server.phase == "masked"
        for client, content in requests.items():
            if trains:
                messages[client] = transport.message(self._ask, client)
                messages[client][1].content[SECURE] = wrap(content)[SECURE]
            else:
                header = Request(MASKED, self._ask.round_number, client)
                message = Message(wrap(content), dst_node_id=transport.node(client), message_type=kind)
                messages[client] = header, message
        ids = transport.send(messages)
        self._traffic["downlink"] += sum(transport.size(message) for _, message in messages.values())
        self._traffic["messages"] += len(messages)
        replies = collect(transport.grid, ids, _Threshold(transport.patience, server.threshold))
        received = 0
        for request, answer in transport.inbox.matched(replies, self._refused):
            self._traffic["messages"] += 1
            with reading(request.client, self._refused):
                told = names_in(answer) if trains else None
                if told is not None:
                    self._names[request.client] = Names.decode(told, transport.arrays(self._order.theta))
                    continue
                received += 1
                server.receive(request.client, unwrap(answer, server.length if trains else None))
        if len(self._names) > received:
            raise OtherNames(agreed(self._names))
        self._refused |= dict.fromkeys(self._names, UNLIKE)
        transport.inbox.forget(self._ask.round_number + 10**9)  # nobody waits for what is masked


class _Threshold:
    """As patient as the transport, with the protocol's threshold for a quorum."""

    def __init__(self, patience: Any, threshold: int) -> None:
        self.deadline, self.grace, self.timeout = patience.deadline, patience.grace, patience.timeout
        self._threshold = threshold

    def enough(self, answered: int, asked: int) -> bool:
        return answered >= self._threshold
