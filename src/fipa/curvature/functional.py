"""A model as a function of some of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fipa.compiler import postpone
from fipa.curvature.data import cast

Params = Mapping[str, Tensor]
postpone()  # derivatives of such functions would import it


@contextmanager
def inputs_of(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What goes into the modules at `paths` while the model runs, by path; of several calls, into the last."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path: seen.update({path: args[0]} if args else {})
        )
        for path in paths
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def model_caller(model: nn.Module, params: Params) -> Callable[..., Any]:
    """The model as a function of the varying parameters; all else is fixed, at their dtype and device."""
    like = next(iter(params.values()))
    fixed = {
        name: cast(tensor.detach(), like)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name not in params
    }

    # Every place that holds a tensor, once, with the tensor's first name. functional_call can find tied places by
    # itself, but leaves a module that has two names with the wrong tensors behind (pytorch issue 164759).
    first = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    places = {
        f"{path}.{name}" if path else name: first[id(t)]
        for path, module in model.named_modules()
        for name, t in [*module._parameters.items(), *module._buffers.items()]
        if t is not None
    }

    def call(params: Params, *args: Any, **kwargs: Any) -> Any:
        values = {**fixed, **params}
        return functional_call(
            model, {place: values[name] for place, name in places.items()}, args, kwargs, tie_weights=False
        )

    return call
