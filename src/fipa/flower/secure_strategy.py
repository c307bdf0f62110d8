"""`SecureFIPA`: additive FIPA where the server sees nothing but sums over its clients."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fipa.aggregation.additive import AdditiveFIPA
from fipa.aggregation.update import ClientUpdate
from fipa.curvature.additive import AdditivePlan
from fipa.errors import FipaError
from fipa.flower.masked import MASKED, SECURE, unwrap, wrap
from fipa.flower.roster import WAIT, exchange
from fipa.flower.secure import SecureAggregationError, SecureServer, unflatten, vector_length
from fipa.flower.strategy import FIPA


class SecureFIPA(FIPA):
    """Additive FIPA under pairwise masks, see `fipa.flower.secure` for what they hide and from whom.

    A round takes four messages per client instead of one: keys, shares of keys, the masked vector after training, and
    shares again to take off the masks of those who left. Clients need nothing but `fipa.flower.client` and `reply`.

    Parameters
    ----------
    rule
        `fipa.AdditiveFIPA(damping=0.5, step=0.25)` by default.
    threshold
        How many clients of a round must stay to its end, and how many would have to collude with the server to unmask
        one; more than half of them, by default just that.
    fraction_bits
        Of the fixed-point numbers in the sum.
    **settings
        As for `FIPA`, but for a warm-up, late answers and compression, which need single clients' numbers. There is no
        evaluation by clients: with `fraction_evaluate` they would send their own numbers, unmasked.
    """

    def __init__(
        self,
        rule: AdditiveFIPA | None = None,
        *,
        threshold: int | None = None,
        fraction_bits: int = 28,
        **settings: Any,
    ) -> None:
        rule = AdditiveFIPA(damping=0.5, step=0.25) if rule is None else rule
        barred = [name for name in ("warmup_rounds", "late", "precision", "quorum") if settings.get(name)]
        if barred or not isinstance(rule, AdditiveFIPA):
            what = barred[0] if barred else f"rule={rule!r}"
            raise FipaError(f"SecureFIPA takes no {what}: only sums are there (threshold is the quorum)")
        super().__init__(rule, **{"fraction_evaluate": 0.0} | settings)
        if not isinstance(self.plan, AdditivePlan):
            raise FipaError(f"SecureFIPA needs an AdditivePlan, got {self.plan!r}")
        self.threshold = threshold
        self.fraction_bits = fraction_bits
        self._run = secrets.token_hex(16)
        self._server: SecureServer | None = None
        self._nodes: dict[int, int] = {}
        self._grid: Grid | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Exchange keys and shares, then ask those who are still there to train."""
        messages = {m.metadata.dst_node_id: m for m in super().configure_train(server_round, arrays, config, grid)}
        self._grid, self._nodes = grid, {request.client: node for node, request in self._asked.items()}
        layout, _ = self._trained()
        assert isinstance(self.plan, AdditivePlan)
        length = vector_length(layout.numel, self.plan.width)
        try:
            self._server = SecureServer(
                self._nodes, self._run, server_round, length, self.threshold, self.fraction_bits
            )
            self._query(server_round)
            self._query(server_round)
            requests = self._server.requests()
        except SecureAggregationError as error:
            self.inbox.event(server_round, None, f"no masked sum: {error}", WARNING)
            self._server = None
            return []
        for client, request in requests.items():
            messages[self._nodes[client]].content[SECURE] = wrap(request)[SECURE]
        return [messages[self._nodes[client]] for client in requests]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up what is masked, take off the masks of the sum, and take the server's step."""
        self.inbox.forget(server_round)
        server, updates = self._server, list[ClientUpdate]()
        metrics: dict[str, Any] = {"clients": 0}
        if server is not None:
            try:
                self._receive(server_round, list(replies), server.length)
                self._query(server_round)
                layout, theta = self._trained()
                plan: Any = self.plan
                test_seed = next(iter(self._asked.values())).test_seed
                total = unflatten(server.total(), layout, plan.width, test_seed, theta.dtype)
            except SecureAggregationError as error:
                self.inbox.event(server_round, None, f"no masked sum, the model stays as it is: {error}", WARNING)
            else:
                count = len(server.survivors)
                metrics = {"clients": count, "examples": total.num_examples, "uplink-bytes": 8 * server.length * count}
                updates = [ClientUpdate(total.delta, total.num_examples, total)]
        return self._step(server_round, updates, {}, metrics)

    def _query(self, k: int) -> None:
        """One phase without training."""
        assert self._server is not None
        assert self._grid is not None
        kind = f"{MessageType.QUERY}.{MASKED}"
        messages = [
            Message(wrap(request), dst_node_id=self._nodes[client], message_type=kind)
            for client, request in self._server.requests().items()
        ]
        replies, ids = exchange(self._grid, messages, self._enough(len(messages)), self.deadline, WAIT)
        self._remember(ids, messages)
        self._receive(k, replies)

    def _receive(self, k: int, replies: Sequence[Message], length: int | None = None) -> None:
        assert self._server is not None
        for request, content in self.inbox.matched(k, replies):
            with self.inbox.reading(k, request.client):
                self._server.receive(request.client, unwrap(content, length))

    def _enough(self, asked: int) -> Any:
        least = self._server.threshold if self._server is not None else 1
        return lambda replies: sum(not reply.has_error() for reply in replies) >= least

    def _settings(self) -> dict[str, str]:
        return super()._settings() | {"fraction_bits": repr(self.fraction_bits)}
