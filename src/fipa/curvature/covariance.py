r"""Layer-wise input covariances, the FOOF curvature that FedPM mixes with.

For a linear layer $z = W x$ the Gauss-Newton matrix is approximated by $\mathbb{E}[x x^\top] \otimes I$: it depends on
the layer's inputs alone. A bias is an input that is always 1; a convolution's inputs are its patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.utils._pytree import tree_map
from typing_extensions import Self

from fipa.curvature.data import cast, length, thinned
from fipa.curvature.functional import model_caller
from fipa.curvature.modes import evaluation_mode
from fipa.curvature.operator import check_finite
from fipa.curvature.summary import Arrived, CurvaturePlan, CurvatureSummary, Occasion, Shape, Source, wrong_shape
from fipa.errors import SketchError
from fipa.layout import Layout, ParamSelection, parameters_of

_BATCH = 128


@dataclass(frozen=True, eq=False)
class InputCovariance(CurvatureSummary):
    """Input covariances by layer, with the layout of all parameters; those of other layers have none.

    `layers` maps the name of a weight to (name of its bias or None, covariance).
    """

    layers: dict[str, tuple[str | None, Tensor]]
    layout: Layout
    num_examples: int = 0

    kind = "covariance"
    made_by = "fipa.input_covariance"
    roughest = "bfloat16"  # int8 scales columns, and the matrices would not stay symmetric
    unlike = "covariances of other layers"

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return {f"covariance of {weight}": matrix for weight, (_, matrix) in self.layers.items()}

    def about(self) -> dict[str, Any]:  # noqa: D102
        return {"biases": {weight: bias for weight, (bias, _) in self.layers.items()}}

    def sent(self) -> dict[str, Tensor]:  # noqa: D102
        return {weight: matrix for weight, (_, matrix) in self.layers.items()}

    @classmethod
    def expected(  # noqa: D102
        cls, plan: Any, layout: Layout, about: Mapping[str, Any], found: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        shapes, biases = dict(zip(layout.names, layout.shapes, strict=True)), about.get("biases")
        if not isinstance(biases, dict) or not all(
            w in shapes and (b is None or b in shapes) for w, b in biases.items()
        ):
            raise SketchError("has covariances of parameters that nobody asked for")
        if not all(b is None or shapes[b] == shapes[w][:1] for w, b in biases.items()):
            raise SketchError("has the bias of one layer with the covariance of another")
        sides = {weight: math.prod(shapes[weight][1:]) + (bias is not None) for weight, bias in biases.items()}
        return {weight: (side, side) for weight, side in sides.items()}

    @classmethod
    def restore(cls, arrived: Arrived) -> Self:  # noqa: D102
        layers = {weight: (bias, arrived.tensors[weight]) for weight, bias in arrived.about["biases"].items()}
        return cls(layers, arrived.layout, arrived.num_examples)

    def sizes(self) -> dict[str, Tensor]:  # noqa: D102
        return {name: matrix.norm() for name, matrix in self.tensors().items()}

    def form(self) -> object:  # noqa: D102
        return tuple((weight, bias) for weight, (bias, _) in self.layers.items())

    def map(self, change: Callable[[Tensor], Tensor]) -> InputCovariance:  # noqa: D102
        return replace(self, layers={weight: (bias, change(matrix)) for weight, (bias, matrix) in self.layers.items()})

    def flaw(self, parameters: int) -> str | None:  # noqa: D102
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        for weight, (bias, matrix) in self.layers.items():
            for name in (weight, bias):
                if name is not None and name not in shapes:
                    return f"sent a covariance of {name!r}, which is none of its parameters: use fipa.input_covariance"
            side = math.prod(shapes[weight][1:]) + (bias is not None)
            wrong = wrong_shape(f"the covariance of {weight}", matrix, (side, side))
            if wrong:
                return wrong
            if bool((matrix.diagonal() < 0).any()):
                return f"sent a negative covariance of {weight}: a curvature has no negative diagonal"
        return None


def input_covariance(
    model: nn.Module,
    data: Any,
    *,
    params: ParamSelection = None,
    max_examples: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> InputCovariance:
    """Mean outer products of the inputs of every selected `nn.Linear` and (ungrouped) `nn.Conv2d`.

    Arguments as for `sketch`. Layers that the forward pass does not call as modules (attention does that with its
    projections) get none, and are averaged.

    Examples
    --------
    >>> list(input_covariance(nn.Linear(4, 3), torch.randn(50, 4)).layers)
    ['weight']
    """
    values = {name: t.to(dtype=dtype, device=device) for name, t in parameters_of(model, params).items()}
    like = next(iter(values.values()))
    call = model_caller(model, values)
    batches = thinned(data, max_examples, torch.Generator().manual_seed(seed))
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
            for batch in batches:
                for i in range(0, length(batch), _BATCH):
                    x = tree_map(lambda t, i=i: cast(t[i : i + _BATCH], like), batch)
                    call(values, **x) if isinstance(x, dict) else call(values, x)
    finally:
        for handle in handles:
            handle.remove()
    for total in sums.values():
        check_finite(total)
    covariances = {name: (layers[name], total / counts[name]) for name, total in sums.items()}
    return InputCovariance(covariances, Layout.of(values), sum(map(length, batches)))


@dataclass(frozen=True)
class CovariancePlan(CurvaturePlan):
    """Layer-wise input covariances, as for `fipa.input_covariance`."""

    makes = InputCovariance

    def compute(self, model: nn.Module, layout: Layout, client: Source, occasion: Occasion) -> InputCovariance:
        """The client's covariances."""
        data = client.tensors
        inputs = torch.cat([r.inputs[0] for r in data]) if client.loss == "least_squares" else data
        return input_covariance(model, inputs, params=layout.names, seed=occasion.seed)


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
