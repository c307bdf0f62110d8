r"""From a loss and its data to the one form that every route computes with.

All curvatures here are generalised Gauss-Newton matrices (paper Eq. `eq:hmk`). Written with a factor of the
loss Hessian, $S_i = B_i B_i^\top$, each is a sum over examples

$$H = \sum_i J_i^\top B_i B_i^\top J_i = A^\top A ,$$

where $J_i$ (C x p) is the Jacobian of the outputs of example i, and every column of $B_i$ (C x k) gives one row
of $A$. A `Term` holds the outputs as a function of the parameters and the factor as a function of the outputs.

| loss | $B_i$ | rows per example |
|---|---|---|
| `"mse"`: 1/2 mean of squared error | $I / \sqrt N$ | C |
| `"cross_entropy"` | $(\mathrm{diag}(\sqrt p) - p \sqrt p^\top) Q / \sqrt N$ | C - 1 |
| the same, sampled labels $y \sim p$ | $(e_y - p) / \sqrt{N s}$ | s |
| `Residual` terms: 1/2 sum of weighted means of squares | $\mathrm{diag}(\sqrt{w_i}) / \sqrt{n}$ | as returned |

$Q$ is the reflection that takes $\sqrt p$ to the first axis: there $B_i$ vanishes, since S has rank C - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fipa.curvature.data import Inputs, cast, length, thinned
from fipa.curvature.functional import Params, model_caller
from fipa.errors import SketchError, instead_of

LossName = Literal["mse", "cross_entropy", "least_squares"]


@dataclass(frozen=True)
class Term:
    """A sum over examples: `outputs(params, inputs)` is (n, C), `factor(outputs, extra)` is (n, C, k)."""

    outputs: Callable[[Params, Inputs], Tensor]
    factor: Callable[[Tensor, Inputs], Tensor]
    inputs: Inputs
    extra: Inputs
    examples: int
    params: Params

    @cached_property
    def rows_per_example(self) -> int:
        """k, found by evaluating the first example, and only when a route asks for it."""
        inputs, extra = self.part(0, 1)
        with torch.no_grad():
            return self.factor(self.outputs(self.params, inputs), extra).shape[2]

    def part(self, start: int, stop: int) -> tuple[Inputs, Inputs]:
        """Inputs and extra data of a range of examples."""
        return (
            pytree.tree_map(lambda t: t[start:stop], self.inputs),
            pytree.tree_map(lambda t: t[start:stop], self.extra),
        )


@dataclass(frozen=True)
class Residual:
    r"""One term of a least-squares loss, $\frac12 \mathrm{mean}_i\, w_i\, r_i(\theta)^2$.

    Parameters
    ----------
    function
        `function(model, *inputs)` returns one residual (n,) or several (n, k) for each of the n examples.
        `model` behaves like the module that is sketched. The residuals of an example may depend on that example
        only, so that their Jacobians can be taken side by side.
    inputs
        Tensors whose first axis runs over the examples.
    weight
        A number, or one weight per example (n,) or per residual (n, k); not negative.

    A PDE client sums an interior and a boundary term (paper Eqs. `eq:pde_loss` to `eq:pde_fisher`):

    Examples
    --------
    >>> x = torch.linspace(0, 1, 5)[:, None]
    >>> interior = Residual(lambda u, x: (u(x) - x.square()).squeeze(1), x)
    >>> edge = Residual(lambda u, x: u(x).squeeze(1), x[:1], weight=10.0)
    >>> float(interior.loss(torch.nn.Identity()) + edge.loss(torch.nn.Identity())) > 0
    True
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    weight: float | Tensor

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor, weight: float | Tensor = 1.0) -> None:
        if not inputs:
            raise SketchError("a Residual needs at least one input tensor, with the examples along its first axis")
        lengths = {len(t) if t.dim() else 0 for t in inputs}
        if len(lengths) != 1 or 0 in lengths:
            raise SketchError(f"the inputs of a Residual must share a first axis of at least 1, got {sorted(lengths)}")
        if bool((torch.as_tensor(weight) < 0).any()):
            raise SketchError("a Residual's weight must not be negative")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "weight", weight)

    def __call__(self, model: Callable[..., Tensor]) -> Tensor:
        """The residuals (n, k) at the model's present parameters."""
        return self.rows(model, self.inputs)

    def loss(self, model: Callable[..., Tensor]) -> Tensor:
        """The loss whose Gauss-Newton matrix `sketch` takes; train on this and the two agree."""
        rows = self(model)
        return 0.5 * (self.weights(rows) * rows.square()).sum() / len(rows)

    def rows(self, model: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """The residuals (n, k) on other inputs, say a batch of them."""
        rows = self.function(model, *inputs)
        n = len(inputs[0])
        if not isinstance(rows, Tensor) or rows.dim() not in (1, 2) or len(rows) != n:
            name = getattr(self.function, "__name__", "residual")
            got = tuple(rows.shape) if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise SketchError(f"{name} must return a tensor ({n},) or ({n}, k) for {n} examples, got {got}")
        return rows.reshape(n, -1)

    def weights(self, rows: Tensor) -> Tensor:
        """The weight of each of these residuals, in their shape."""
        weight = torch.as_tensor(self.weight, dtype=rows.dtype, device=rows.device)
        if weight.dim() == 1:
            weight = weight[:, None]
        try:
            return weight.expand_as(rows)
        except RuntimeError as error:
            raise SketchError(
                f"weights of shape {tuple(weight.shape)} fit no residuals of {tuple(rows.shape)}"
            ) from error

    def term(self, call: Callable[..., Tensor], params: Params) -> Term:
        """This residual as a `Term`; `call(params, *inputs)` evaluates the model."""
        like = next(iter(params.values()))
        inputs = tuple(cast(t, like) for t in self.inputs)

        def outputs(params: Params, inputs: Inputs) -> Tensor:
            return self.rows(lambda *args: call(params, *args), inputs)

        with torch.no_grad():
            rows = outputs(params, inputs)
        scale = (self.weights(rows) / len(rows)).sqrt()
        return Term(outputs, lambda z, scale: torch.diag_embed(scale), inputs, scale, len(rows), params)


def terms_of(
    model: nn.Module,
    data: Any,
    loss: LossName,
    params: Params,
    *,
    max_examples: int | None,
    sampled_labels: int | None,
    generator: torch.Generator,
) -> list[Term]:
    """Write a loss on some data as a list of terms.

    Parameters
    ----------
    model, params
        The module, and the values of the parameters that vary; their dtype and device are the computation's.
    data
        A tensor x; a pair (x, y); or an iterable of such batches (a `DataLoader`, a list). x is a tensor, or a dict
        of tensors that the model takes as keywords. Labels are not used: the curvatures of these losses depend on
        the outputs alone. For `loss="least_squares"`: one `Residual` or several.
    max_examples
        Use this many examples, drawn without replacement.
    sampled_labels
        Sample this many labels per example from the model's own predictions, instead of summing over the classes.
    """
    call = model_caller(model, params)
    if loss == "least_squares":
        if max_examples is not None or sampled_labels is not None:
            raise SketchError("max_examples and sampled_labels do not apply to residuals: choose their inputs instead")
        residuals = list(data) if isinstance(data, Iterable) else [data]
        if not residuals or not all(isinstance(r, Residual) for r in residuals):
            raise SketchError('loss="least_squares" takes one fipa.Residual or a list of them as data')
        return [residual.term(call, params) for residual in residuals]
    if loss not in ("mse", "cross_entropy"):
        raise SketchError(f"there is no loss {loss!r}: {instead_of(loss, get_args(LossName))}")
    if sampled_labels is not None and (loss != "cross_entropy" or sampled_labels < 1):
        raise SketchError('sampled_labels must be at least 1, and only applies to loss="cross_entropy"')

    like = next(iter(params.values()))
    batches = [pytree.tree_map(lambda t: cast(t, like), x) for x in thinned(data, max_examples, generator)]
    total = sum(length(x) for x in batches)

    def outputs(params: Params, inputs: Inputs) -> Tensor:
        z = call(params, **inputs) if isinstance(inputs, dict) else call(params, inputs)
        z = z if isinstance(z, Tensor) else getattr(z, "logits", z)  # as Hugging Face's models have them
        if not isinstance(z, Tensor):
            raise SketchError(f"the model returned a {type(z).__name__}: wrap it to return a tensor of outputs")
        if z.dim() == 1:
            z = z[:, None]
        if z.dim() != 2 or len(z) != length(inputs):
            raise SketchError(
                f"the model returned {tuple(z.shape)} for {length(inputs)} examples: expected (examples, outputs)"
            )
        return z

    terms = []
    for x in batches:
        n = length(x)
        if loss == "mse":
            terms.append(Term(outputs, _mse_factor(total), x, (), n, params))
        elif sampled_labels is None:
            terms.append(Term(outputs, _softmax_factor(total), x, (), n, params))
        else:
            uniform = torch.rand(n, sampled_labels, generator=generator, dtype=torch.float64).to(like)
            terms.append(Term(outputs, _sampled_factor(total), x, uniform, n, params))
    return terms


def _mse_factor(total: int) -> Callable[[Tensor, Inputs], Tensor]:
    def factor(z: Tensor, _: Inputs) -> Tensor:
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return (eye / math.sqrt(total)).expand(len(z), -1, -1)

    return factor


def _softmax_factor(total: int) -> Callable[[Tensor, Inputs], Tensor]:
    def factor(z: Tensor, _: Inputs) -> Tensor:
        p = _probabilities(z)
        root = p.sqrt()
        b = torch.diag_embed(root) - p[:, :, None] * root[:, None, :]
        v = root + torch.eye(1, z.shape[1], dtype=z.dtype, device=z.device)  # reflect root to the first axis
        b = b - (b @ v[:, :, None]) * (2 * v / v.square().sum(1, keepdim=True))[:, None, :]
        return b[:, :, 1:] / math.sqrt(total)

    return factor


def _sampled_factor(total: int) -> Callable[[Tensor, Inputs], Tensor]:
    def factor(z: Tensor, uniform: Inputs) -> Tensor:
        p = _probabilities(z)
        # the first class whose cumulative probability passes the uniform draw, without searchsorted: vmap lacks it
        passed = (p.cumsum(dim=1)[:, None, :-1] <= uniform[:, :, None]).sum(dim=2)
        hot = torch.nn.functional.one_hot(passed, z.shape[1]).to(z.dtype)
        return (hot - p[:, None, :]).transpose(1, 2) / math.sqrt(total * uniform.shape[1])

    return factor


def _probabilities(z: Tensor) -> Tensor:
    if z.shape[1] < 2:
        raise SketchError("cross entropy needs at least two outputs per example")
    return z.softmax(dim=1)
