"""Statistics that clients tell once: the server adds them up, and remembers who has told them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.errors import LayoutError, UpdateError

CLIENT = "client."  # names in the state: this, and the client's id as Python writes it


def untold(rule: Any, state: Mapping[str, Tensor], clients: Sequence[int]) -> list[int]:
    """Those who are to be asked in a round: all, but for a rule that says `once = True` only those not yet heard."""
    told = told_by(state) if getattr(rule, "once", False) else set()
    return [client for client in clients if client not in told]


def told_by(state: Mapping[str, Tensor]) -> set[int | str]:
    """The ids of those who are in the sums."""
    return {ast.literal_eval(name.removeprefix(CLIENT)) for name in state if name.startswith(CLIENT)}


def added(
    cohort: Cohort, state: Mapping[str, Tensor], rule: str, statistics: Iterable[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The state with the statistics of the round's clients in it, in double precision; each client counts once."""
    if not cohort.identified:
        raise UpdateError(
            f"{cohort.clients[0]} has no id, but {rule} counts each client once: pass "
            "ClientUpdate(..., client_id=...), the same in every round"
        )
    told, after = told_by(state), dict(state)
    for client, examples, sums in zip(cohort.ids, cohort.num_examples, statistics, strict=True):
        plain = str(client) if isinstance(client, str) else int(client)  # numpy's numbers are written in other ways
        if plain in told:
            continue
        for name, own in sums.items():
            before = after.get(name)
            if before is not None and before.shape != own.shape:
                raise LayoutError(
                    f"the server state {name!r} has the shape {tuple(before.shape)}, the statistics "
                    f"{tuple(own.shape)}: start with state=None when the head changes"
                )
            after[name] = own.double().clone() if before is None else before + own.double()
        after[f"{CLIENT}{plain!r}"] = torch.tensor(examples)
    return after
