"""Which arrays of a model are trained, averaged, tied or left alone: the server guesses, clients know."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fipa.errors import FipaError, LayoutError
from fipa.flower.codec import PayloadError
from fipa.layout import Layout, ParamSelection, selected

NAMES = "names"  # in the header of a reply: what a client's model really is
STATISTICS = ("running_mean", "running_var")  # of BatchNorm: a first guess at what is averaged
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Names:
    """What a model's arrays are.

    Attributes
    ----------
    trained
        Parameters, in their order; a tied weight under its first name.
    averaged
        Floating-point buffers that training changes, such as BatchNorm's statistics.
    tied
        Other names of trained parameters.
    """

    trained: tuple[str, ...]
    averaged: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def guessed(cls, arrays: Mapping[str, Tensor]) -> Names:
        """From nothing but the arrays: all of floating-point numbers are trained but the statistics of BatchNorm."""
        floating = [name for name, tensor in arrays.items() if tensor.is_floating_point()]
        averaged = tuple(name for name in floating if name.endswith(STATISTICS))
        return cls(tuple(name for name in floating if name not in averaged), averaged)

    @classmethod
    def of(cls, model: nn.Module, before: Mapping[str, Tensor]) -> Names:
        """Names of a model after training, which began with the arrays `before`."""
        params = dict(model.named_parameters())
        first = {id(p): name for name, p in params.items()}
        aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        trained = tuple(name for name, p in params.items() if p.requires_grad and name in before)
        changed = tuple(
            name for name, t in model.named_buffers()
            if name in before and t.is_floating_point() and not torch.equal(t.detach().cpu(), before[name])
        )  # fmt: skip
        tied = {name: own for name, own in aliases.items() if name != own and name in before and own in trained}
        return cls(trained, changed, tied)

    def encode(self) -> str:
        """As it travels."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: Any, arrays: Mapping[str, Tensor]) -> Names:
        """What a client says, if it can be true of these arrays."""
        try:
            content = json.loads(str(text))
            names = cls(tuple(content["trained"]), tuple(content["averaged"]), dict(content["tied"]))
            known = {name for name, tensor in arrays.items() if tensor.is_floating_point()}
            fits = {*names.trained, *names.averaged, *names.tied, *names.tied.values()} <= known
            apart = not set(names.trained) & {*names.averaged, *names.tied} and bool(names.trained)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PayloadError("has no readable names of parameters") from error
        if not fits or not apart or any(arrays[a].shape != arrays[b].shape for a, b in names.tied.items()):
            raise PayloadError("has names of parameters that the server's model has not")
        return names

    def chosen(self, params: ParamSelection) -> Names:
        """The same with only those trained that `params` names; each of its parts must be of use."""
        if params is None:
            return self
        trained = tuple(pick((*self.trained, *self.tied), params))
        kept = tuple(name for name in self.trained if name in trained or self._other(name, trained))
        return Names(kept, self.averaged, {name: own for name, own in self.tied.items() if own in kept})

    def _other(self, name: str, chosen: tuple[str, ...]) -> bool:
        return any(own == name and alias in chosen for alias, own in self.tied.items())


def agreed(told: Mapping[int, Names]) -> Names:
    """What most clients say is trained and tied, and averaged if any of these says so."""
    keys = {client: (names.trained, tuple(sorted(names.tied.items()))) for client, names in told.items()}
    usual = Counter(keys.values()).most_common(1)[0][0]
    same = [told[client] for client in sorted(told) if keys[client] == usual]
    averaged = dict.fromkeys(name for names in same for name in names.averaged)
    return Names(usual[0], tuple(averaged), dict(usual[1]))


def pick(names: tuple[str, ...], params: ParamSelection) -> list[str]:
    """As `selected`, with an error that says where the pattern was given."""
    assert params is not None
    try:
        return selected(names, params)
    except LayoutError as error:
        raise FipaError(f"FIPA(params=...): {error}") from error


def change(model: nn.Module, before: Mapping[str, Tensor], names: tuple[str, ...]) -> tuple[Layout, Tensor]:
    """How training changed these parameters, flat and in float32 at least, and their layout."""
    params = dict(model.named_parameters())
    other = [name for name in names if tuple(params[name].shape) != tuple(before[name].shape)]
    if other:
        name = other[0]
        raise FipaError(
            f"{name!r} has shape {tuple(params[name].shape)} here and {tuple(before[name].shape)} on the server: build "
            "the same model everywhere"
        )
    moved = {}
    for name in names:
        after = params[name].detach().cpu()
        began = before[name].to(after.dtype)  # what a model in half precision makes of it
        wide = torch.float32 if after.dtype in HALF else after.dtype
        moved[name] = after.to(wide) - began.to(wide)
    layout = Layout.of(moved)
    return layout, layout.flatten(moved)
