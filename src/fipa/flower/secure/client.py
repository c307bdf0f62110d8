"""The client's side of a masked sum."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fipa.flower.secure import masks, shamir
from fipa.flower.secure.fixed_point import MOST_FRACTION_BITS, encode
from fipa.flower.secure.messages import (
    PHASES,
    Message,
    Phase,
    SecureAggregationError,
    check_header,
    header,
    read_bytes_list,
    read_ids,
    read_int,
    some,
)

PAIR_SIZE = 2 * shamir.SHARE_SIZE  # a share of the seed, then one of the mask key
SEALED_SIZE = PAIR_SIZE + masks.SEALED_EXTRA


class SecureClient:
    """One client in one round.

    Made anew for every round, it replies once to each phase, in order. Where every message runs in a process of its
    own, keep `export()` after each reply and continue from `restore(...)`; the state holds secrets, so it must not
    leave the client, and must be kept before the reply is sent, because a reply given twice can give away the vector.

    Parameters
    ----------
    client
        Own id, a whole number from 0.
    run, round_number
        What this client believes to take part in. Messages of another run or round are refused.
    at_least
        Take part only if no sum of fewer clients can be unmasked.
    """

    def __init__(self, client: int, run: str, round_number: int, at_least: int = 2) -> None:
        if at_least < 2:
            raise SecureAggregationError(f"at_least must be 2 or more, got {at_least}: one vector alone is its own sum")
        self.client = client
        self.run = run
        self.round_number = round_number
        self.at_least = at_least
        self.phase: Phase = "keys"
        self._numbers: dict[str, int] = {}  # threshold, fraction_bits, length
        self._secrets: dict[str, bytes] = {}  # channel, mask (private keys), seed, context
        self._keys: dict[int, bytes] = {}  # public keys of all, channel and mask key in one piece
        self._shares: dict[int, bytes] = {}  # pairs of shares, by whose secrets they are shares of

    @property
    def threshold(self) -> int:
        """Number of clients from which a sum can be unmasked; 0 as long as the server has not said so."""
        return self._numbers.get("threshold", 0)

    def reply(self, message: Mapping[str, Any], values: NDArray[np.float64] | None = None) -> Message:
        """Answer the server.

        Parameters
        ----------
        message
            What the server sent; its `phase` must be the one after that of the last reply.
        values
            The vector to add, in the phase `masked` only.
        """
        if self.phase == "done":
            raise SecureAggregationError("this round is over: make a new SecureClient for the next one")
        expected = header(self.phase, self.run, self.round_number)
        check_header(message, expected, "the server")
        if self.phase == "masked" and values is not None:
            content = self._mask(message, values)
        elif self.phase == "masked" or values is not None:
            raise SecureAggregationError(f"phase {self.phase!r}: give values in the phase 'masked' and in no other")
        elif self.phase == "keys":
            content = self._make_keys()
        elif self.phase == "shares":
            content = self._make_shares(message)
        else:
            content = self._reveal(message)
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        return {**expected, **content}

    def _make_keys(self) -> Message:
        self._secrets = {name: masks.new_private_key() for name in ("channel", "mask")}
        return {f"{name}_key": masks.public_key(private) for name, private in self._secrets.items()}

    def _make_shares(self, message: Mapping[str, Any]) -> Message:
        ids = read_ids(message, "ids", "the server")
        channel, mask = (
            read_bytes_list(message, field, len(ids), masks.KEY_SIZE, "the server")
            for field in ("channel_keys", "mask_keys")
        )
        keys = dict(zip(ids, zip(channel, mask, strict=True), strict=True))
        if keys.get(self.client) != tuple(masks.public_key(self._secrets[name]) for name in ("channel", "mask")):
            raise SecureAggregationError(f"the server's list of keys has not those of client {self.client}")
        numbers = {name: read_int(message, name, "the server") for name in ("threshold", "fraction_bits", "length")}
        threshold = numbers["threshold"]
        if not (len(ids) < 2 * threshold <= 2 * len(ids) and threshold >= self.at_least):
            raise SecureAggregationError(
                f"the server asks for threshold {threshold} among {len(ids)} clients: it must be more than half of "
                f"them, not more than all, and at least {self.at_least}"
            )
        if numbers["fraction_bits"] > MOST_FRACTION_BITS:
            raise SecureAggregationError(
                f"the server asks for {numbers['fraction_bits']} fraction bits: use at most {MOST_FRACTION_BITS}"
            )
        bound = masks.context(self.run, self.round_number, **numbers, keys=keys)
        seed = secrets.token_bytes(shamir.SECRET_SIZE)
        pairs = {
            other: first + second
            for other, first, second in zip(
                sorted(ids),
                shamir.split(seed, threshold, len(ids)),
                shamir.split(self._secrets["mask"], threshold, len(ids)),
                strict=True,
            )
        }
        self._shares = {self.client: pairs.pop(self.client)}
        self._keys = {other: first + second for other, (first, second) in keys.items()}
        self._secrets |= {"seed": seed, "context": bound}
        self._numbers = numbers
        return {
            "ids": list(pairs),
            "sealed": [masks.seal(self._channel(self.client, to), pair, bound) for to, pair in pairs.items()],
            "commitment": masks.commitment(seed, bound),
        }

    def _mask(self, message: Mapping[str, Any], values: NDArray[np.float64]) -> Message:
        ids = read_ids(message, "ids", "the server")
        sealed = read_bytes_list(message, "sealed", len(ids), SEALED_SIZE, "the server")
        strangers = set(ids) - set(self._keys) | {self.client} & set(ids)
        if strangers:
            raise SecureAggregationError(f"the server sent shares of {some(strangers)}, who cannot have made any")
        if len(ids) + 1 < self._numbers["threshold"]:
            raise SecureAggregationError(
                f"shares of {len(ids) + 1} clients, {self._numbers['threshold']} needed: too many have left"
            )
        if values.shape != (self._numbers["length"],):
            raise SecureAggregationError(
                f"client {self.client} has a vector of shape {values.shape}, the round wants {self._numbers['length']} "
                "entries: use the same params=... and width everywhere"
            )
        shares = {sender: self._open(sender, text) for sender, text in zip(ids, sealed, strict=True)}
        bound = self._secrets["context"]
        masked = encode(values, self._numbers["fraction_bits"], len(ids) + 1)
        masks.add_mask(masked, masks.self_mask_key(self._secrets["seed"], bound), 1)
        for other in ids:
            public = self._keys[other][masks.KEY_SIZE :]
            key = masks.pair_mask_key(self._secrets["mask"], public, bound, self.client, other)
            masks.add_mask(masked, key, masks.pair_sign(self.client, other))
        self._shares |= shares
        self._secrets, self._keys = {}, {}  # what is no longer needed cannot leak
        return {"masked": masked}

    def _reveal(self, message: Mapping[str, Any]) -> Message:
        survivors = read_ids(message, "survivors", "the server")
        dropped = read_ids(message, "dropped", "the server")
        both = set(survivors) & set(dropped)
        if both:
            raise SecureAggregationError(
                f"the server asks for both shares of {some(both)}, which would unmask a single client: refused"
            )
        if {*survivors, *dropped} != set(self._shares) or self.client not in survivors:
            raise SecureAggregationError(
                f"the server's survivors and dropped clients are not those that sent shares to client {self.client}"
            )
        if len(survivors) < self._numbers["threshold"]:
            raise SecureAggregationError(
                f"only {len(survivors)} clients are left, {self._numbers['threshold']} needed: nothing is unmasked"
            )
        shares = [self._shares[other][: shamir.SHARE_SIZE] for other in survivors]
        shares += [self._shares[other][shamir.SHARE_SIZE :] for other in dropped]
        self._shares = {}
        return {"ids": survivors + dropped, "shares": shares}

    def _open(self, sender: int, sealed: bytes) -> bytes:
        pair = masks.unseal(self._channel(sender, self.client), sealed, self._secrets["context"])
        if pair is None or len(pair) != PAIR_SIZE:
            raise SecureAggregationError(
                f"the shares of client {sender} for client {self.client} were changed on the way, or are not of this "
                "round: leave that client out"
            )
        return pair

    def _channel(self, sender: int, receiver: int) -> bytes:
        """The key for what `sender` sends to `receiver`, one of which is this client."""
        other = receiver if sender == self.client else sender
        public = self._keys[other][: masks.KEY_SIZE]
        return masks.agree(self._secrets["channel"], public, self._secrets["context"], "channel", sender, receiver)

    def export(self) -> bytes:
        """The whole state, with its secrets."""
        content = {
            "client": self.client,
            "run": self.run,
            "round_number": self.round_number,
            "at_least": self.at_least,
            "phase": self.phase,
            "numbers": self._numbers,
            "secrets": self._secrets,
            "keys": self._keys,
            "shares": self._shares,
        }
        return json.dumps(content, default=bytes.hex).encode()

    @classmethod
    def restore(cls, state: bytes) -> SecureClient:
        """The client as it was at `export`."""
        content = json.loads(state)
        one = cls(content["client"], content["run"], content["round_number"], content["at_least"])
        one.phase = content["phase"]
        one._numbers = content["numbers"]
        one._secrets = {name: bytes.fromhex(value) for name, value in content["secrets"].items()}
        one._keys = {int(other): bytes.fromhex(value) for other, value in content["keys"].items()}
        one._shares = {int(other): bytes.fromhex(value) for other, value in content["shares"].items()}
        return one
