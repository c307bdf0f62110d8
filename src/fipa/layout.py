"""Which parameters a vector stands for: names and shapes, in order."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from fipa.errors import LayoutError, meant

ParamSelection = str | Iterable[str] | None


@dataclass(frozen=True)
class Layout:
    """An ordered list of named parameters and the flat vector that they make together.

    Examples
    --------
    >>> layout = Layout(("weight", "bias"), ((2, 3), (2,)))
    >>> layout.numel
    8
    >>> layout.unflatten(torch.arange(8.0))["bias"]
    tensor([6., 7.])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of a mapping from names to tensors, in the mapping's order."""
        return cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()))

    @cached_property
    def numel(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter stands in the flat vector."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        return {name: slice(*bounds) for name, bounds in zip(self.names, pairwise(ends), strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Lay the named tensors out as one vector; names and shapes must be exactly this layout's."""
        self.check(tensors)
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of the pieces of a vector (or of the rows of a matrix, along its last axis)."""
        if vector.dim() == 0 or vector.shape[-1] != self.numel:
            length = vector.shape[-1] if vector.dim() else "0-d"
            raise LayoutError(f"a vector of length {length} cannot fill {self.numel} parameters")
        pieces = torch.split(vector, list(self.sizes), dim=-1)
        return {
            name: piece.reshape((*vector.shape[:-1], *shape))
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise a `LayoutError` that says how `tensors` differs from this layout."""
        missing = [name for name in self.names if name not in tensors]
        extra = [name for name in tensors if name not in self.names]
        if missing or extra:
            parts = [f"missing {_some(missing)}"] if missing else []
            parts += [f"unexpected {_some(extra)}"] if extra else []
            raise LayoutError(f"parameter names differ: {', '.join(parts)}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise LayoutError(f"parameter {name!r} has shape {tuple(tensors[name].shape)}, expected {shape}")

    def to_json(self) -> str:
        """Encode as JSON, for file metadata."""
        return json.dumps([self.names, self.shapes])

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Decode what `to_json` wrote."""
        names, shapes = json.loads(text)
        return cls(tuple(names), tuple(tuple(shape) for shape in shapes))


def parameters_of(model: nn.Module, params: ParamSelection = None) -> dict[str, Tensor]:
    """Copies of the selected parameters of a model, by name: what a client trains, sketches and sends.

    Parameters
    ----------
    model
        Any module. A weight that is tied to several names counts once, under its first name.
    params
        None takes every parameter that requires a gradient. Otherwise names or glob patterns
        (`"head.*"`), one or several; they may also name frozen parameters.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    >>> list(parameters_of(model, "1.*"))
    ['1.weight', '1.bias']
    """
    named = dict(model.named_parameters())
    if not named:
        raise LayoutError(f"{type(model).__name__} has no parameters")
    if params is None:
        chosen = [name for name, tensor in named.items() if tensor.requires_grad]
        if not chosen:
            raise LayoutError("no parameter requires a gradient: name the ones to use with params=...")
    else:
        chosen = selected(list(named), params)
    return {name: named[name].detach().clone() for name in chosen}


def selected(names: Sequence[str], params: str | Iterable[str]) -> list[str]:
    """Those of the names that `params` names, or has a pattern for; each of its parts must be of use.

    Examples
    --------
    >>> selected(["body.weight", "head.weight", "head.bias"], "head.*")
    ['head.weight', 'head.bias']
    """
    patterns = [params] if isinstance(params, str) else list(params)
    if not patterns:
        raise LayoutError("params is empty: give names or patterns, or None for all that require a gradient")
    idle = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if idle:
        hint = f": {asked}" if (asked := meant(idle[0], names)) else ""
        raise LayoutError(f"params={_some(idle)} matches no parameter; there are {_some(list(names))}{hint}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _some(names: list[str], most: int = 6) -> str:
    """A short readable list of names."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
