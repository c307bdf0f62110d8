"""The server's side of a masked sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fipa.flower.secure import masks, shamir
from fipa.flower.secure.client import SEALED_SIZE
from fipa.flower.secure.fixed_point import FRACTION_BITS, MOST_FRACTION_BITS, decode
from fipa.flower.secure.messages import (
    PHASES,
    Message,
    Phase,
    SecureAggregationError,
    check_header,
    header,
    read_bytes,
    read_bytes_list,
    read_ids,
    some,
)


class SecureServer:
    """The sum of one round, over whichever clients stay.

    Ask with `requests()` and pass the answers to `receive`, once for each of the four phases; then `total()` is the
    sum. A client that did not answer, or whose answer was refused, counts as dropped when the next phase begins.

    Parameters
    ----------
    clients
        Ids of the clients to ask.
    run, round_number
        Mark all messages, so that those of another run or round are refused.
    length
        Length of the clients' vectors, see `vector_length`.
    threshold
        How many clients must stay to the end, and how many it takes to unmask a single one. More than half of the
        clients; by default just that.
    fraction_bits
        Of the fixed point: more are finer, fewer allow larger sums.

    Examples
    --------
    >>> from fipa.flower.secure import SecureClient
    >>> server = SecureServer([3, 7], "run", 1, length=2)
    >>> clients = {i: SecureClient(i, "run", 1) for i in (3, 7)}
    >>> for phase in ("keys", "shares", "masked", "unmask"):
    ...     for i, request in server.requests().items():
    ...         values = np.array([1.0, i]) if phase == "masked" else None
    ...         server.receive(i, clients[i].reply(request, values))
    >>> server.total()
    array([ 2., 10.])
    """

    def __init__(
        self,
        clients: Iterable[int],
        run: str,
        round_number: int,
        length: int,
        threshold: int | None = None,
        fraction_bits: int = FRACTION_BITS,
    ) -> None:
        self._waiting = set(clients)  # asked in this phase, no answer yet
        self._answered: set[int] = set()
        count = len(self._waiting)
        self.threshold = count // 2 + 1 if threshold is None else threshold
        if not (count < 2 * self.threshold <= 2 * count and self.threshold >= 2):
            raise SecureAggregationError(
                f"threshold {self.threshold} of {count} clients: it must be at least 2, more than half of the clients "
                "and not more than all"
            )
        self.run = run
        self.round_number = round_number
        self.length = length
        self.fraction_bits = fraction_bits
        if not 0 <= fraction_bits <= MOST_FRACTION_BITS:
            raise SecureAggregationError(f"fraction_bits {fraction_bits} must be between 0 and {MOST_FRACTION_BITS}")
        self.phase: Phase | None = None
        self._keys: dict[int, tuple[bytes, bytes]] = {}  # channel and mask key
        self._context = b""
        self._points: dict[int, int] = {}  # which share each client has of every secret
        self._sealed: dict[int, dict[int, bytes]] = {}  # by sender, then receiver
        self._commitments: dict[int, bytes] = {}
        self._sum = np.zeros(length, dtype=np.uint64)
        self._order: list[int] = []  # whose shares are revealed: survivors, then dropped
        self._revealed: dict[int, dict[int, bytes]] = {}  # by who reveals, then whose secret
        self.survivors: list[int] = []  # whose vectors are in the sum

    def requests(self) -> dict[int, Message]:
        """Begin the next phase: what to send to which client."""
        if self.phase == "unmask":
            raise SecureAggregationError("all four phases have begun: take the total()")
        if self.phase is None:
            self.phase = "keys"
        else:
            self._check_enough(self._answered)
            self.phase = PHASES[PHASES.index(self.phase) + 1]
            self._waiting, self._answered = self._answered, set()
        contents = {
            "keys": self._ask_keys,
            "shares": self._ask_shares,
            "masked": self._ask_masked,
            "unmask": self._ask_unmask,
        }[self.phase]()
        start = header(self.phase, self.run, self.round_number)
        return {client: {**start, **content} for client, content in contents.items()}

    def receive(self, client: int, reply: Mapping[str, Any]) -> None:
        """Take a client's answer; an error about it leaves everything as it was."""
        sender = f"client {client}"
        if self.phase is None or client not in self._waiting:
            raise SecureAggregationError(f"{sender} was not asked, or has answered already: ignore this message")
        check_header(reply, header(self.phase, self.run, self.round_number), sender)
        take = {
            "keys": self._take_keys,
            "shares": self._take_shares,
            "masked": self._take_masked,
            "unmask": self._take_unmask,
        }[self.phase]
        take(client, reply, sender)
        self._waiting.remove(client)
        self._answered.add(client)

    def total(self) -> NDArray[np.float64]:
        """Remove the masks from the sum, and decode it."""
        if self.phase != "unmask":
            raise SecureAggregationError(f"no total in phase {self.phase!r}: go through all four phases first")
        self._check_enough(self._answered)
        total = self._sum.copy()
        for client in self._order:
            secret = self._rebuild(client)
            if client in self.survivors:
                masks.add_mask(total, masks.self_mask_key(secret, self._context), -1)
                continue
            for other in self.survivors:  # masks shared with one who is not in the sum have not cancelled
                key = masks.pair_mask_key(secret, self._keys[other][1], self._context, client, other)
                masks.add_mask(total, key, -masks.pair_sign(other, client))
        return decode(total, self.fraction_bits)

    def _check_enough(self, clients: set[int]) -> None:
        if len(clients) < self.threshold:
            raise SecureAggregationError(
                f"{len(clients)} clients ({some(clients) or 'none'}) answered in phase {self.phase!r}, "
                f"{self.threshold} needed: repeat the round with other clients, or with a smaller threshold"
            )

    def _ask_keys(self) -> dict[int, Message]:
        return {client: {} for client in sorted(self._waiting)}

    def _ask_shares(self) -> dict[int, Message]:
        numbers = {"threshold": self.threshold, "fraction_bits": self.fraction_bits, "length": self.length}
        self._context = masks.context(self.run, self.round_number, **numbers, keys=self._keys)
        ids = sorted(self._keys)
        self._points = {client: i + 1 for i, client in enumerate(ids)}
        channel, mask = ([self._keys[client][k] for client in ids] for k in range(2))
        return {client: {"ids": ids, "channel_keys": channel, "mask_keys": mask, **numbers} for client in ids}

    def _ask_masked(self) -> dict[int, Message]:
        messages = {}
        for client in sorted(self._sealed):
            senders = [other for other in sorted(self._sealed) if other != client]
            messages[client] = {"ids": senders, "sealed": [self._sealed[other][client] for other in senders]}
        return messages

    def _ask_unmask(self) -> dict[int, Message]:
        self.survivors = sorted(self._waiting)
        dropped = sorted(set(self._sealed) - self._waiting)
        self._order = self.survivors + dropped
        return {client: {"survivors": self.survivors, "dropped": dropped} for client in self.survivors}

    def _take_keys(self, client: int, reply: Mapping[str, Any], sender: str) -> None:
        self._keys[client] = (
            read_bytes(reply, "channel_key", masks.KEY_SIZE, sender),
            read_bytes(reply, "mask_key", masks.KEY_SIZE, sender),
        )

    def _take_shares(self, client: int, reply: Mapping[str, Any], sender: str) -> None:
        ids = read_ids(reply, "ids", sender)
        if set(ids) != set(self._keys) - {client}:
            raise SecureAggregationError(f"{sender} sent shares for other clients than those it was given keys of")
        sealed = read_bytes_list(reply, "sealed", len(ids), SEALED_SIZE, sender)
        self._commitments[client] = read_bytes(reply, "commitment", masks.KEY_SIZE, sender)
        self._sealed[client] = dict(zip(ids, sealed, strict=True))

    def _take_masked(self, client: int, reply: Mapping[str, Any], sender: str) -> None:
        masked = reply.get("masked")
        if not isinstance(masked, np.ndarray) or masked.dtype != np.uint64 or masked.shape != (self.length,):
            found = f"{masked.dtype}{list(masked.shape)}" if isinstance(masked, np.ndarray) else type(masked).__name__
            raise SecureAggregationError(f"{sender} sent masked {found}, expected an array uint64[{self.length}]")
        self._sum += masked  # at once, so that memory does not grow with the number of clients

    def _take_unmask(self, client: int, reply: Mapping[str, Any], sender: str) -> None:
        if read_ids(reply, "ids", sender) != self._order:
            raise SecureAggregationError(f"{sender} revealed shares of other clients than it was asked for")
        shares = read_bytes_list(reply, "shares", len(self._order), shamir.SHARE_SIZE, sender)
        self._revealed[client] = dict(zip(self._order, shares, strict=True))

    def _rebuild(self, client: int) -> bytes:
        """The seed of a survivor, or the private mask key of a dropped client."""
        helpers = sorted(self._revealed)[: self.threshold]
        secret = shamir.join({self._points[helper]: self._revealed[helper][client] for helper in helpers})
        if secret is None or not self._is_right(client, secret):
            raise SecureAggregationError(
                f"the shares of client {client}'s secret do not fit: it made wrong ones, or one of the clients "
                f"{some(set(helpers))} revealed a wrong one. Repeat the round"
            )
        return secret

    def _is_right(self, client: int, secret: bytes) -> bool:
        if client in self.survivors:
            return masks.commitment(secret, self._context) == self._commitments[client]
        return masks.public_key(secret) == self._keys[client][1]
