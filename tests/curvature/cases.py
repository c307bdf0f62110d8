"""The models, losses and routes that every curvature is checked on, and dense oracles that share no code with fipa.

An oracle differentiates with plain `torch.autograd.grad` through the module's own parameters, one output at a time,
and writes the loss Hessian S out: no `torch.func`, no factor of S, no blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fipa import Residual
from fipa.curvature.operator import CurvatureOperator
from fipa.curvature.routes import curvature_of

CLASSES = 3
EXAMPLES = 5
Blocks = list[tuple[Tensor, Tensor]]  # outputs (n, k) and loss Hessians (n, k, k), scaled as in the loss


class Residue(nn.Module):
    """A tiny residual network: convolutions, GroupNorm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head((x + torch.relu(self.norm(self.conv(x)))).mean(dim=(2, 3)))


class Scaled(nn.Module):
    """A parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.gain * self.first(x)))


class Tied(nn.Module):
    """One module used twice, and one weight in two modules with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.shared = nn.Linear(4, 4)
        self.borrower = nn.Linear(4, 4)
        self.borrower.weight = self.shared.weight
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.borrower(torch.tanh(self.shared(x)))))


class Aliased(nn.Module):
    """One module under two names: torch.func.functional_call alone would break such a model (pytorch#164759)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.encoder = nn.Linear(4, 4)
        self.decoder = self.encoder
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.decoder(torch.tanh(self.encoder(torch.tanh(self.first(x)))))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, CLASSES, bias=False)
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def normed() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, CLASSES))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": Residue,
    "scaled": Scaled,
    "tied": Tied,
    "aliased": Aliased,
    "frozen": frozen,
    "normed": normed,
}
IMAGES = ("cnn", "resnet")
HEADS = {
    "mlp": "4.*",
    "cnn": "4.*",
    "resnet": "head.*",
    "scaled": "last.*",
    "tied": "last.*",
    "aliased": "last.*",
    "frozen": "4.*",
    "normed": "4.*",
}


def make(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model in float64 and eval mode, from a seed, without touching the global random state."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a traceback for every kind of device
        return build().double().eval()


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model_and_inputs(name: str, examples: int = EXAMPLES) -> tuple[nn.Module, Tensor]:
    shape = (examples, 1, 6, 6) if name in IMAGES else (examples, 3)
    return make(MODELS[name]), randn(*shape)


# --- oracles -----------------------------------------------------------------------------------------------------


def selected(model: nn.Module, params: str | list[str] | None) -> dict[str, Tensor]:
    patterns = [params] if isinstance(params, str) else params
    return {
        name: tensor
        for name, tensor in model.named_parameters()
        if (tensor.requires_grad if patterns is None else any(fnmatchcase(name, pattern) for pattern in patterns))
    }


def jacobian(outputs: Tensor, tensors: list[Tensor]) -> Tensor:
    """d outputs / d tensors as (n, k, p): one backward pass for every single output."""
    rows = []
    for value in outputs.flatten():
        parts = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(t).flatten() if g is None else g.flatten()
                    for t, g in zip(tensors, parts, strict=True)
                ]
            )
        )
    return torch.stack(rows).unflatten(0, outputs.shape)


def gauss_newton(model: nn.Module, blocks: Callable[[], Blocks], params: str | list[str] | None = None) -> Tensor:
    """H = sum_i J_i^T S_i J_i, dense."""
    tensors = list(selected(model, params).values())
    flags = [t.requires_grad for t in tensors]
    for t in tensors:
        t.requires_grad_(True)
    try:
        pairs = [(jacobian(outputs, tensors), S) for outputs, S in blocks()]
    finally:
        for t, flag in zip(tensors, flags, strict=True):
            t.requires_grad_(flag)
    return sum(torch.einsum("ncp,ncd,ndq->pq", J, S, J) for J, S in pairs)


def loss_hessian(outputs: Tensor, loss: str, total: int) -> Tensor:
    """S_i / N of every example."""
    if loss == "mse":
        return torch.eye(outputs.shape[1], dtype=outputs.dtype).repeat(len(outputs), 1, 1) / total
    p = outputs.detach().softmax(1)
    return torch.stack([torch.diag(q) - torch.outer(q, q) for q in p]) / total


def oracle(model: nn.Module, batches: Any, loss: str, params: str | list[str] | None = None) -> Tensor:
    """H of mse or cross entropy on one batch of inputs, or on a list of them."""
    batches = batches if isinstance(batches, list) else [batches]
    total = sum(len(x) for x in batches)

    def blocks() -> Blocks:
        outputs = [model(x) for x in batches]
        return [(z, loss_hessian(z, loss, total)) for z in outputs]

    return gauss_newton(model, blocks, params)


# --- cases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: nn.Module
    data: Any
    loss: str
    params: str | list[str] | None
    hessian: Tensor
    rows: int

    @property
    def parameters(self) -> int:
        return len(self.hessian)


def _weighted(name: str, model: nn.Module, x: Tensor, params: str | list[str] | None) -> Case:
    """Two residual terms: one weight per example, and one per residual."""
    y, per_row = randn(len(x), CLASSES, seed=2), torch.linspace(0, 2, len(x), dtype=torch.float64)
    x2, per_residual = x[:3] + 0.5, randn(3, 2, seed=3).square()

    def few(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return u(x)[:, :2] * u(x)[:, 2:]

    def blocks() -> Blocks:
        first, second = model(x) - y, few(model, x2)
        return [
            (first, torch.diag_embed(per_row[:, None].expand(-1, CLASSES)) / len(x)),
            (second, torch.diag_embed(per_residual) / 3),
        ]

    data = [Residual(lambda u, x, y: u(x) - y, x, y, weight=per_row), Residual(few, x2, weight=per_residual)]
    rows = len(x) * CLASSES + 3 * 2
    return Case(model, data, "least_squares", params, gauss_newton(model, blocks, params), rows)


def _pde(name: str, model: nn.Module, x: Tensor, params: str | list[str] | None) -> Case:
    """u u_x + u_xx in the interior (x: the first input), u on the edge with a scalar weight."""
    edge = x[:2] * 2

    def interior(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        along = torch.zeros_like(x)
        along[:, 0] = 1.0

        def slope(x: Tensor) -> Tensor:
            return jvp(u, (x,), (along,))[1]

        u_x, u_xx = jvp(slope, (x,), (along,))
        return (u(x) * u_x + u_xx)[:, 0]

    def by_autograd() -> Tensor:
        moved = x.clone().requires_grad_()
        u = model(moved)[:, 0]
        (u_x,) = torch.autograd.grad(u.sum(), moved, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x[:, 0].sum(), moved, create_graph=True)
        return (u * u_x[:, 0] + u_xx[:, 0])[:, None]

    def blocks() -> Blocks:
        ones = torch.ones(1, 1, dtype=torch.float64)
        return [
            (by_autograd(), ones.expand(len(x), 1, 1) / len(x)),
            (model(edge)[:, :1], 10.0 * ones.expand(2, 1, 1) / 2),
        ]

    data = [Residual(interior, x), Residual(lambda u, x: u(x)[:, 0], edge, weight=10.0)]
    return Case(model, data, "least_squares", params, gauss_newton(model, blocks, params), len(x) + 2)


def case(name: str) -> Case:
    """A case of `CASES` with a model of its own; the oracle, which takes longest, is computed once."""
    return replace(_known(name), model=make(MODELS[name.split("/")[0]]))


@cache
def _known(name: str) -> Case:
    """`model/loss`, or `model/loss/head` where only the last layer varies, or `model/loss/some` for a mixed subset."""
    model_name, loss, *subset = name.split("/")
    model, x = model_and_inputs(model_name)
    params: str | list[str] | None = None
    if subset:
        params = HEADS[model_name] if subset == ["head"] else ["*bias", "0.weight"]
    if loss == "residual":
        return _weighted(model_name, model, x, params)
    if loss == "pde":
        return _pde(model_name, model, x, params)
    rows = len(x) * (CLASSES if loss == "mse" else CLASSES - 1)
    return Case(model, x, loss, params, oracle(model, x, loss, params), rows)


SMOOTH = ("mlp", "tied", "aliased", "frozen", "normed")
HEAD_CASES = [
    f"{model}/{loss}/head" for model in ("mlp", "cnn", "resnet", "normed") for loss in ("mse", "cross_entropy")
]
CASES = [
    *(f"{model}/{loss}" for model in MODELS for loss in ("mse", "cross_entropy", "residual")),
    *(f"{model}/pde" for model in SMOOTH),
    "frozen/cross_entropy/some",  # names a frozen layer, which then varies
    "mlp/residual/head",
    "mlp/pde/head",
    *HEAD_CASES,
]

ROUTES: dict[str, dict[str, Any]] = {
    "rows": {"route": "rows"},
    "streamed": {"route": "rows", "memory_limit": 0},
    "matrix_free": {"route": "matrix_free"},
    "tight": {"route": "matrix_free", "memory_limit": 2**14},  # a few examples, a few vectors at a time
    "linear_head": {"route": "linear_head"},
}


def operator_of(model: nn.Module, data: Any, loss: str, *, seed: int = 0, **options: Any) -> CurvatureOperator:
    """The operator of `curvature_of`; the model must be in eval mode, as it is used outside of the context."""
    defaults = {"route": "rows", "generator": torch.Generator().manual_seed(seed)}
    with curvature_of(model, data, loss, **(defaults | options)) as (operator, _, _):
        return operator


def build(one: Case, route: str, **options: Any) -> CurvatureOperator:
    return operator_of(one.model, one.data, one.loss, params=one.params, **(ROUTES[route] | options))


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def dense(operator: CurvatureOperator) -> Tensor:
    return operator.product(eye(operator.parameters))


def assert_is(operator: CurvatureOperator, one: Case) -> None:
    """H, A and A^T of an operator agree with the oracle and with each other."""
    assert (operator.rows, operator.parameters) == (one.rows, one.parameters)
    A = operator.forward(eye(one.parameters))
    torch.testing.assert_close(A.T @ A, one.hessian, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator.adjoint(eye(one.rows)), A.T, rtol=1e-10, atol=1e-12)
    V = randn(one.parameters, 4, seed=7)  # fewer columns than rows: other blocks than above
    torch.testing.assert_close(operator.product(V), one.hessian @ V, rtol=1e-10, atol=1e-12)


# --- instruments -------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the largest storage, in bytes, that any operation returns, also inside of `torch.func` transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.nbytes = max([self.nbytes, *sizes])
        return out


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that looking at it must not change."""
    return {
        "state": {name: t.clone() for name, t in model.state_dict().items()},
        "identity": {name: id(t) for name, t in model.named_parameters(remove_duplicate=False)},
        "requires_grad": {name: t.requires_grad for name, t in model.named_parameters()},
        "grad": {name: t.grad for name, t in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: len(module._forward_hooks) for name, module in model.named_modules()},
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    states = before.pop("state"), after.pop("state")
    assert before == after
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
