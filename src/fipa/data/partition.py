r"""How the training examples are split between clients."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fipa.errors import FipaError


@dataclass(frozen=True)
class BalancedDirichlet:
    r"""Equal shares with unequal classes, as in the reference.

    Client after client draws class proportions $p \sim \mathrm{Dir}(\alpha)$, then its share of the examples that are
    left, each with a chance in proportion to p of its class.

    Parameters
    ----------
    alpha
        $\alpha$: the smaller, the fewer classes a client has.
    """

    name: Literal["balanced-dirichlet"] = field(default="balanced-dirichlet", kw_only=True)
    alpha: float = 0.3

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        _check_enough(labels, clients)
        share, more = divmod(len(labels), clients)
        classes = int(labels.max()) + 1
        left = torch.ones(len(labels), dtype=torch.bool)
        parts = []
        for client in range(clients):
            chances = dirichlet(self.alpha, classes, generator)[labels] * left
            part = _draw(chances, left, share + (client < more), generator)
            left[part] = False
            parts.append(part.sort().values)
        return parts


@dataclass(frozen=True)
class Dirichlet:
    r"""Unequal shares with unequal classes: each class is cut in proportions $p \sim \mathrm{Dir}(\alpha)$.

    A client with fewer than `smallest` examples gets what it lacks, one by one, from whoever has most.

    Parameters
    ----------
    alpha
        $\alpha$: the smaller, the more the clients differ.
    smallest
        Least number of examples of a client.
    """

    name: Literal["dirichlet"] = field(default="dirichlet", kw_only=True)
    alpha: float = 0.3
    smallest: int = 1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        _check_least("smallest", self.smallest)

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        _check_enough(labels, clients, self.smallest)
        owned: list[list[Tensor]] = [[] for _ in range(clients)]
        for label in labels.unique():
            members = _shuffled((labels == label).nonzero()[:, 0], generator)
            for own, piece in zip(owned, _cut(members, dirichlet(self.alpha, clients, generator)), strict=True):
                own.append(piece)
        return _ascending(_fill([torch.cat(own) for own in owned], self.smallest, generator))


@dataclass(frozen=True)
class Shards:
    """Few classes each: the examples, in order of their class, are cut into equal shards; each client gets some.

    As in McMahan et al. (2017), with two shards per client. Sizes of shards differ by one where they do not come out
    even.

    Parameters
    ----------
    per_client
        Shards of each client.
    """

    name: Literal["shards"] = field(default="shards", kw_only=True)
    per_client: int = 2

    def __post_init__(self) -> None:
        _check_least("per_client", self.per_client)

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        _check_enough(labels, clients, self.per_client)
        order = torch.randperm(len(labels), generator=generator)
        order = order[labels[order].argsort(stable=True)]
        shards = order.tensor_split(clients * self.per_client)
        dealt = torch.randperm(len(shards), generator=generator).reshape(clients, self.per_client).tolist()
        return _ascending([torch.cat([shards[shard] for shard in hand]) for hand in dealt])


@dataclass(frozen=True)
class QuantitySkew:
    r"""Unequal shares with equal classes: sizes in proportions $p \sim \mathrm{Dir}(\alpha)$, examples at random.

    A client with fewer than `smallest` examples gets what it lacks, one by one, from whoever has most.

    Parameters
    ----------
    alpha
        $\alpha$: the smaller, the more unequal the shares.
    smallest
        Least number of examples of a client.
    """

    name: Literal["quantity"] = field(default="quantity", kw_only=True)
    alpha: float = 0.3
    smallest: int = 1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        _check_least("smallest", self.smallest)

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        _check_enough(labels, clients, self.smallest)
        order = torch.randperm(len(labels), generator=generator)
        parts = _cut(order, dirichlet(self.alpha, clients, generator))
        return _ascending(_fill(parts, self.smallest, generator))


@dataclass(frozen=True)
class IID:
    """Equal shares, at random."""

    name: Literal["iid"] = field(default="iid", kw_only=True)

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        _check_enough(labels, clients)
        return _ascending(torch.randperm(len(labels), generator=generator).tensor_split(clients))


@dataclass(frozen=True)
class Indices:
    """Shares as given, a list of indices for each client.

    Parameters
    ----------
    file, parts
        A JSON file with a list of lists, or the lists themselves; one of the two.
    complete
        Refuse shares that leave examples out.
    """

    name: Literal["indices"] = field(default="indices", kw_only=True)
    file: str = ""
    parts: tuple[tuple[int, ...], ...] = ()
    complete: bool = False

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.parts):
            raise FipaError("partition: give file or parts, one of the two")

    def split(self, labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
        """Indices of each client, ascending."""
        source = self.file or "parts"
        given = _read(Path(self.file)) if self.file else self.parts
        if len(given) != clients:
            raise FipaError(f"partition: {source} has {len(given)} lists, but there are {clients} clients")
        owner: dict[int, int] = {}
        for client, part in enumerate(given):
            if not part:
                raise FipaError(f"partition: client {client} has no examples in {source}")
            for index in part:
                if not 0 <= index < len(labels):
                    raise FipaError(
                        f"partition: index {index} of client {client} in {source} is out of range: "
                        f"there are {len(labels)} examples, counted from 0"
                    )
                if index in owner:
                    raise FipaError(
                        f"partition: index {index} is twice in {source}, for clients {owner[index]} and {client}"
                    )
                owner[index] = client
        if self.complete and len(owner) < len(labels):
            raise FipaError(
                f"partition: {source} leaves out {len(labels) - len(owner)} of {len(labels)} examples; "
                "add them, or set complete = false"
            )
        return _ascending([torch.tensor(part) for part in given])


Partition = BalancedDirichlet | Dirichlet | Shards | QuantitySkew | IID | Indices


def histogram(labels: Tensor, parts: Sequence[Tensor], classes: int) -> Tensor:
    """How many examples of each class each client has (clients x classes)."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise FipaError(f"histogram: a label is none of the {classes} classes")
    return torch.stack([labels[part].bincount(minlength=classes) for part in parts])


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise FipaError(f"partition: alpha must be positive, got {alpha}")


def _check_least(name: str, value: int) -> None:
    if value < 1:
        raise FipaError(f"partition: {name} must be at least 1, got {value}")


def _check_enough(labels: Tensor, clients: int, each: int = 1) -> None:
    if clients < 1:
        raise FipaError(f"partition: there must be at least 1 client, got {clients}")
    if len(labels) < clients * each:
        least = f" with at least {each} each" if each > 1 else ""
        raise FipaError(f"partition: {len(labels)} examples are too few for {clients} clients{least}")


def _read(file: Path) -> list[list[int]]:
    """Lists of indices from a JSON file."""
    try:
        lists = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FipaError(f"partition: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise FipaError(f"partition: {file} is not JSON: {error}") from error
    if not isinstance(lists, list) or not all(
        isinstance(part, list) and all(type(index) is int for index in part) for part in lists
    ):
        raise FipaError(f"partition: {file} must hold a list of lists of integers, one for each client")
    return lists


def _ascending(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.sort().values for part in parts]


def _shuffled(indices: Tensor, generator: torch.Generator) -> Tensor:
    return indices[torch.randperm(len(indices), generator=generator)]


def _cut(indices: Tensor, proportions: Tensor) -> list[Tensor]:
    """Consecutive pieces, in proportions that sum to 1."""
    bounds = (proportions.cumsum(0) * len(indices)).round().long()
    return list(indices.tensor_split(bounds[:-1].tolist()))


def _fill(parts: Sequence[Tensor], smallest: int, generator: torch.Generator) -> list[Tensor]:
    """Move examples, drawn at random, from the largest parts to those below `smallest`; there must be enough."""
    if min(map(len, parts)) >= smallest:
        return list(parts)
    piles = [_shuffled(part, generator).tolist() for part in parts]
    largest = [(-len(pile), place) for place, pile in enumerate(piles)]
    heapq.heapify(largest)
    for pile in piles:
        while len(pile) < smallest:  # so another one has more than that
            size, giver = largest[0]
            pile.append(piles[giver].pop())
            heapq.heapreplace(largest, (size + 1, giver))
    return [torch.tensor(pile) for pile in piles]


def _draw(chances: Tensor, left: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw without replacement; where the wanted classes have run out, from all that is left."""
    wanted = chances.nonzero()[:, 0]
    if len(wanted) <= count:
        rest = (left & (chances == 0)).nonzero()[:, 0]
        order = torch.randperm(len(rest), generator=generator)
        return torch.cat([wanted, rest[order[: count - len(wanted)]]])
    # the `count` largest of log(chance) + Gumbel noise are a draw without replacement
    uniform = torch.rand(len(wanted), generator=generator, dtype=torch.float64).clamp_min(1e-300)
    keys = chances[wanted].log() - (-uniform.log()).log()
    return wanted[keys.topk(count).indices]


def dirichlet(alpha: float, classes: int, generator: torch.Generator) -> Tensor:
    """Proportions (classes), by way of logarithms of gamma variates, which do not vanish however small alpha is."""
    shape = torch.full((classes,), alpha + 1.0, dtype=torch.float64)
    gammas = torch._standard_gamma(shape, generator=generator)
    uniform = torch.rand(classes, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return torch.softmax(gammas.log() + uniform.log() / alpha, dim=0)
