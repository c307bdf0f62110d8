"""The forms of data that users have: tensors, pairs, batches, dicts of keywords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fipa.errors import SketchError

Inputs = Any  # a tensor, or a tuple, list or dict of tensors, that share their first axis


def thinned(data: Any, max_examples: int | None, generator: torch.Generator) -> list[Inputs]:
    """The inputs, in one batch if their shapes allow, thinned to `max_examples` drawn without replacement."""
    batches = [_inputs(batch) for batch in _batches(data)]
    if not batches:
        raise SketchError("the data are empty")
    shapes = {tuple((name, t.shape[1:], t.dtype) for name, t in _named(x)) for x in batches}
    if len(batches) > 1 and len(shapes) == 1:
        batches = [pytree.tree_map(lambda *parts: torch.cat(parts), *batches)]
    total = sum(length(x) for x in batches)
    if total == 0:
        raise SketchError("the data have no examples")
    if max_examples is None or max_examples >= total:
        return [x for x in batches if length(x)]
    if max_examples < 1:
        raise SketchError(f"max_examples must be at least 1, got {max_examples}")
    chosen = torch.randperm(total, generator=generator)[:max_examples].sort().values
    kept, start = [], 0
    for x in batches:
        index = chosen[(chosen >= start) & (chosen < start + length(x))] - start
        start += length(x)
        if len(index):
            kept.append(pytree.tree_map(lambda t, index=index: t[index.to(t.device)], x))
    return kept


def _batches(data: Any) -> Iterable[Any]:
    """Whole-data tensors count as one batch."""
    if isinstance(data, Tensor | Mapping) or _is_pair(data):
        return [data]
    if not isinstance(data, Iterable):
        raise SketchError(
            f"data must be tensors or an iterable of (x, y) batches, not {type(data).__name__}: wrap a Dataset in a "
            "torch.utils.data.DataLoader"
        )
    if _may_be_a_pair(data):
        raise SketchError(
            "two entries, the second a tensor: pass inputs and labels as the tuple (x, y) with x a tensor or a dict, "
            "or batches as [(x1, y1), (x2, y2)]"
        )
    return data


def _may_be_a_pair(data: Any) -> bool:
    """A list [x, y], or nested inputs ((a, b), y): taken as two batches, its labels would pass for inputs."""
    if not isinstance(data, list | tuple) or len(data) != 2 or not isinstance(data[1], Tensor):
        return False
    return not isinstance(data[0], Tensor) or data[0].shape[:1] == data[1].shape[:1]


def _inputs(batch: Any) -> Inputs:
    x = batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) and batch else batch
    if not isinstance(x, Tensor | Mapping) or not all(isinstance(t, Tensor) for _, t in _named(x)):
        raise SketchError(f"a batch must be x or (x, y) with tensors in x, got {type(x).__name__}")
    if any(t.dim() == 0 for _, t in _named(x)):
        raise SketchError("the tensors of a batch must have the examples along their first axis, got a 0-d tensor")
    lengths = {len(t) for _, t in _named(x)}
    if len(lengths) != 1:
        raise SketchError(f"the tensors of a batch must share their first axis, got lengths {sorted(lengths)}")
    return x if isinstance(x, Tensor) else dict(x)


def _is_pair(data: Any) -> bool:
    """(x, y) as whole tensors, as opposed to a list of two batches."""
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | Mapping)


def _named(x: Inputs) -> list[tuple[str, Tensor]]:
    return sorted(x.items()) if isinstance(x, Mapping) else [("x", x)]


def length(x: Inputs) -> int:
    """Number of examples."""
    return len(_named(x)[0][1])


def cast(tensor: Tensor, like: Tensor) -> Tensor:
    """Move to the computation's device, and to its dtype unless it holds integers (token ids)."""
    return tensor.to(device=like.device, dtype=like.dtype if tensor.is_floating_point() else None)
