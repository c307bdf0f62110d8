r"""Route 3, linear head: the backbone once, then closed-form products.

When only the last linear layer varies, the outputs are $z_i = W \phi_i + b$ with features $\phi_i$ that do not change,
so $J_i v = V_W \phi_i + v_b$ and $H = \sum_i \phi_i \phi_i^\top \otimes S_i$: no automatic differentiation at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn

from fipa.curvature.data import Inputs
from fipa.curvature.functional import Params
from fipa.curvature.operator import CurvatureOperator, Eigenpairs
from fipa.curvature.terms import Term
from fipa.errors import SketchError

_FORWARD_BATCH = 128


def find_head(model: nn.Module, names: list[str]) -> nn.Linear | None:
    """The linear layer whose parameters are exactly `names`, if there is one and it shares them with no other.

    Layers that derive from `nn.Linear`, or carry hooks, parametrisations or a forward of their own, may compute
    something else.
    """
    everything = list(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        if _is_plain(module):
            prefix = f"{path}." if path else ""
            own = {f"{prefix}{name}": tensor for name, tensor in module.named_parameters()}
            uses = [name for name, tensor in everything if any(tensor is mine for mine in own.values())]
            if set(own) == set(names) == set(uses):
                return module
    return None


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is nn.Linear and not hooked


class LinearHead(CurvatureOperator):
    """Features of every example, cached; products cost two small matrix products per example block."""

    def __init__(self, model: nn.Module, terms: list[Term], params: Params, memory_limit: int) -> None:
        head = find_head(model, list(params))
        if head is None:
            raise SketchError(
                'route "linear_head" needs params to select exactly the weight (and bias) of one nn.Linear that '
                f"shares them with no other layer; got {list(params)[:4]}"
            )
        self.like = next(iter(params.values()))
        self.bias = head.bias is not None
        self.classes, self.width = head.weight.shape
        self.parameters = sum(t.numel() for t in params.values())
        self._memory_limit = memory_limit
        self._terms = terms
        self._features_and_outputs = [_run_backbone(head, term, params) for term in terms]
        first = [
            term.factor(z[:1], term.part(0, 1)[1])
            for term, (_, z) in zip(terms, self._features_and_outputs, strict=True)
        ]
        self._rows_per_example = [factor.shape[2] for factor in first]
        self.rows = sum(term.examples * k for term, k in zip(terms, self._rows_per_example, strict=True))

    def forward(self, V: Tensor) -> Tensor:  # noqa: D102
        weight = V[: self.classes * self.width].reshape(self.classes, self.width, -1).movedim(1, 0).flatten(1)
        out, row = self.like.new_empty(self.rows, V.shape[1]), 0
        for features, factor in self._blocks(V.shape[1]):
            dz = (features @ weight).unflatten(1, (self.classes, -1))  # (n, C, L)
            if self.bias:
                dz += V[self.classes * self.width :]
            block = (factor.transpose(1, 2) @ dz).flatten(0, 1)
            out[row : row + len(block)] = block
            row += len(block)
        return out

    def adjoint(self, Z: Tensor) -> Tensor:  # noqa: D102
        columns, row = Z.shape[1], 0
        weight = self.like.new_zeros(self.width, self.classes * columns)
        bias = self.like.new_zeros(self.classes, columns)
        for features, factor in self._blocks(columns):
            n, _, k = factor.shape
            dz = factor @ Z[row : row + n * k].reshape(n, k, columns)
            weight.addmm_(features.T, dz.flatten(1))
            bias += dz.sum(0)
            row += n * k
        flat = weight.unflatten(1, (self.classes, columns)).movedim(0, 1).flatten(0, 1)
        return torch.cat([flat, bias]) if self.bias else flat

    def trace(self, generator: torch.Generator, kept: Eigenpairs | None = None) -> float:  # noqa: D102
        total = 0.0
        for features, factor in self._blocks(columns=1):
            norms = features.square().sum(1) + float(self.bias)
            total += float(norms @ factor.square().sum((1, 2)))
        return total

    @property
    def features(self) -> Tensor:
        """The layer's inputs for all examples (n, d)."""
        return torch.cat([features for features, _ in self._features_and_outputs])

    def _blocks(self, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (n, d) and factors (n, C, k) of as many examples at a time as memory allows."""
        parts = zip(self._terms, self._rows_per_example, self._features_and_outputs, strict=True)
        for term, rows, (features, outputs) in parts:
            per_example = self.classes * (2 * columns + 3 * rows) * self.like.element_size()
            step = max(1, self._memory_limit // (4 * per_example))
            for i in range(0, term.examples, step):
                stop = min(i + step, term.examples)
                yield features[i:stop], term.factor(outputs[i:stop], term.part(i, stop)[1])


def _run_backbone(head: nn.Linear, term: Term, params: Params) -> tuple[Tensor, Tensor]:
    """The head's inputs and the outputs of all examples."""
    caught = []
    for i in range(0, term.examples, _FORWARD_BATCH):
        inputs, _ = term.part(i, min(i + _FORWARD_BATCH, term.examples))
        caught.append(_catch(head, term, params, inputs))
    features, outputs = zip(*caught, strict=True)
    return torch.cat(features), torch.cat(outputs)


def _catch(head: nn.Linear, term: Term, params: Params, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Evaluate the outputs and take what passed through the head on the way.

    That nothing follows the head is shown by identity: its output, unmodified, must be what comes out. That it is
    $W x + b$ is shown by value.
    """
    passed: list[tuple[Tensor, Tensor, int]] = []
    handle = head.register_forward_hook(lambda _, args, out: passed.append((args[0], out, out._version)))
    try:
        with torch.enable_grad():  # nothing but the head varies: features that need a gradient depend on it
            z = term.outputs({name: t.detach().requires_grad_() for name, t in params.items()}, inputs)
    finally:
        handle.remove()
    features, out, version = passed[0] if len(passed) == 1 else (z, z.new_empty(0), 0)
    linear = _same_memory(z, out) and out._version == version and features.dim() == 2
    expected = nn.functional.linear(features, *params.values()) if linear else out
    if not linear or not torch.allclose(out, expected, rtol=0, atol=0, equal_nan=True):
        raise SketchError(
            "the selected linear layer is not the model's last step (its output is not the model's output): "
            'use route="rows" or "matrix_free"'
        )
    if features.requires_grad:
        raise SketchError(
            "the inputs of the selected linear layer depend on its own parameters (tied in the forward pass): "
            'use route="rows" or "matrix_free"'
        )
    return features, out.detach()


def _same_memory(z: Tensor, out: Tensor) -> bool:
    try:
        return z.data_ptr() == out.data_ptr() and z.numel() == out.numel() and z.is_contiguous()
    except RuntimeError:  # inside a transform of torch.func: a residual that differentiates the head
        return False
