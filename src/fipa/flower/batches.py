"""Batches as apps have them: dicts, tuples, or anything that a function of the user's own turns into outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fipa.errors import FipaError

LABELS = ("label", "labels", "target", "targets", "y", "fine_label", "coarse_label")
Forward = Callable[[nn.Module, Any], Any]  # (model, batch) -> outputs


def adapted(model: nn.Module, data: Any, forward: Forward | None) -> tuple[nn.Module, Any]:
    """A model and data as `fipa.sketch` takes them, with the model's own names of parameters."""
    batches = _batches(data)
    if forward is not None:
        return _Forwarded(model, forward, batches), [_named(batch) for batch in batches]
    if not any(isinstance(batch, Mapping) or _is_long(batch) for batch in batches):
        return model, data if not _is_loader(data) else batches
    return model, [_inputs(batch) for batch in batches]


def _is_loader(data: Any) -> bool:
    return not isinstance(data, Tensor | Mapping | list | tuple)


def _is_long(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) > 2


def _batches(data: Any) -> list[Any]:
    """The data as a list of batches; whole tensors, (x, y) and a dict of tensors are one."""
    if isinstance(data, Tensor | Mapping) or (isinstance(data, tuple) and data and not isinstance(data[0], tuple)):
        return [data]
    if not isinstance(data, Iterable):
        raise FipaError(
            f"reply(..., data): a {type(data).__name__} has no batches: give a DataLoader, tensors (x, y), or a list "
            "of batches"
        )
    batches = list(data)
    if not batches:
        raise FipaError("reply(..., data): there is no batch in it: does this node hold any examples?")
    return batches


def _inputs(batch: Any) -> Any:
    """What the model takes of a batch: all tensors of a dict but its labels, or the first of (x, y)."""
    if _is_long(batch):
        raise FipaError(
            f"a batch of {len(batch)} parts: say what the model makes of it, reply(..., forward=lambda model, batch: "
            "model(batch[0], batch[1]))"
        )
    if not isinstance(batch, Mapping):
        return batch
    inputs = {name: t for name, t in batch.items() if isinstance(t, Tensor) and name not in LABELS}
    if not inputs:
        raise FipaError(
            f"a batch with {', '.join(map(repr, batch))} has no tensor that could go into the model: give "
            "reply(..., forward=lambda model, batch: ...)"
        )
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs


def _named(batch: Any) -> dict[str, Tensor]:
    """All tensors of a batch by name, or by place."""
    if isinstance(batch, Tensor):
        return {"0": batch}
    parts = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {str(name): part for name, part in parts if isinstance(part, Tensor)}


class _Forwarded(nn.Module):
    """A model that takes the tensors of a batch as keywords. It shares the model's tables, and so its names."""

    def __init__(self, model: nn.Module, forward: Forward, batches: list[Any]) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        object.__setattr__(self, "_of", (model.eval(), forward, batches[0]))  # not as a module of its own

    def forward(self, **parts: Tensor) -> Any:
        model, forward, like = self._of  # type: ignore[misc]
        if isinstance(like, Tensor):
            return forward(model, parts["0"])
        if isinstance(like, Mapping):
            return forward(model, parts)
        return forward(model, type(like)(parts[str(i)] for i in range(len(like)) if str(i) in parts))
