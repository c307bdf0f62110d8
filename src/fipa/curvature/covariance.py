r"""Layer-wise input covariances, the FOOF curvature that FedPM mixes with.

For a linear layer $z = W x$ the Gauss-Newton matrix is approximated by $\mathbb{E}[x x^\top] \otimes I$: it depends on
the layer's inputs alone. A bias is an input that is always 1; a convolution's inputs are its patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fipa.curvature.modes import evaluation_mode
from fipa.curvature.operator import check_finite
from fipa.curvature.terms import terms_of
from fipa.errors import SketchError
from fipa.layout import Layout, ParamSelection, parameters_of

_BATCH = 128


@dataclass(frozen=True, eq=False)
class InputCovariance:
    """Input covariances by layer, with the layout of all parameters; those of other layers have none.

    `layers` maps the name of a weight to (name of its bias or None, covariance).
    """

    layers: dict[str, tuple[str | None, Tensor]]
    layout: Layout
    num_examples: int = 0


def input_covariance(
    model: nn.Module,
    data: Any,
    *,
    params: ParamSelection = None,
    max_examples: int | None = None,
    seed: int = 0,
) -> InputCovariance:
    """Mean outer products of the inputs of every selected `nn.Linear` and (ungrouped) `nn.Conv2d`.

    >>> list(input_covariance(nn.Linear(4, 3), torch.randn(50, 4)).layers)
    ['weight']
    """
    values = parameters_of(model, params)
    terms = terms_of(
        model,
        data,
        "mse",  # any loss on the outputs will do: only the forward pass is used
        values,
        max_examples=max_examples,
        sampled_labels=None,
        generator=torch.Generator().manual_seed(seed),
    )
    layers = dict(_covered(model, values))
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(layers, 0)

    def collect(name: str, module: nn.Module, inputs: Tensor) -> None:
        x = _patches(module, inputs)
        if layers[name] is not None:
            x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        product = x.T @ x
        sums[name] = sums[name] + product if name in sums else product
        counts[name] += len(x)

    handles = []
    modules = dict(model.named_modules())
    for name in layers:
        module = modules[name.rpartition(".")[0]]

        def hook(module: nn.Module, args: tuple[Tensor, ...], _: Any, name: str = name) -> None:
            collect(name, module, args[0])

        handles.append(module.register_forward_hook(hook))
    try:
        with evaluation_mode(model), torch.no_grad():
            for term in terms:
                for i in range(0, term.examples, _BATCH):
                    term.outputs(values, term.part(i, min(i + _BATCH, term.examples))[0])
    finally:
        for handle in handles:
            handle.remove()
    unused = [name for name in layers if not counts[name]]
    if unused:
        raise SketchError(f"the layers of {unused} took no part in the forward pass: leave them out with params=...")
    for total in sums.values():
        check_finite(total)
    covariances = {name: (layers[name], sums[name] / counts[name]) for name in layers}
    return InputCovariance(covariances, Layout.of(values), sum(term.examples for term in terms))


def _covered(model: nn.Module, values: dict[str, Tensor]) -> list[tuple[str, str | None]]:
    """(weight, bias or None) of the layers whose inputs we can take; tied weights are left to plain averaging."""
    names = [(name, id(tensor)) for name, tensor in model.named_parameters(remove_duplicate=False)]
    ids = [i for _, i in names]
    tied = {name for name, i in names if ids.count(i) > 1}
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) and not (isinstance(module, nn.Conv2d) and module.groups == 1):
            continue
        prefix = f"{path}." if path else ""
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        if weight in values and weight not in tied:
            found.append((weight, bias if bias in values and bias not in tied else None))
    return found


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """The inputs that the weight's rows multiply, one per row."""
    if isinstance(module, nn.Linear):
        return x.flatten(0, -2)
    assert isinstance(module, nn.Conv2d)
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise SketchError(f"{module}: input covariances need zero padding given in numbers")
    columns = unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    return columns.transpose(1, 2).flatten(0, 1)
