r"""A client's loss as a function of flat parameters and data, alone or for a stack of clients at once.

Clients whose data have the same form are trained side by side: parameters (M x p), data with a leading axis over the
clients. Their gradient is `vmap(grad(loss))`, traced once into plain tensor operations (`make_fx`), which leaves out
the cost of running the transformations anew in every step. Networks for fitting and equations are so small that
calling these operations from Python takes long: torch's interpreter of traces calls them faster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from fipa.clients.client import Client
from fipa.clients.traces import Terms, traced
from fipa.curvature.data import cast
from fipa.curvature.functional import inputs_of, model_caller
from fipa.data.augment import Augment
from fipa.errors import FipaError, SketchError
from fipa.kernels.small_cnn import SmallCNN, View
from fipa.kernels.tanh_network import TanhNetwork
from fipa.layout import Layout

Fast = SmallCNN | TanhNetwork
Transform = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Traces = dict[object, Callable[..., Tensor] | None]  # None for a client alone whose model cannot be traced
OFTEN = 50  # gradients in a round from which on it pays to trace that of a client that is alone
LATEST = 256  # clients whose objectives are kept


class Objective:
    """The loss of one client, `loss(flat, terms)`, and its data as `terms`.

    Two clients with the same `form` differ in nothing but the numbers in their terms. Clients of one model share
    `fast`, a faster way to its gradient, and the memory that it works in.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        client: Client,
        fast: Fast | None = None,
        call: Callable[..., Tensor] | None = None,
    ) -> None:
        self._call = _caller(model, layout) if call is None else call
        self._layout = layout
        self._model = model
        self._client = client
        self._like = model.get_parameter(layout.names[0])
        self._terms = None if client.transform else self._prepare(client.data)
        functions = tuple(r.function for r in client.data) if client.loss == "least_squares" else (client.loss,)
        stored = self._terms or (client.data,)
        leaves, structure = pytree.tree_flatten(stored)
        shapes = tuple((tuple(t.shape), t.dtype) for t in leaves)
        self.form = (functions, str(structure), shapes, client.transform, client.augment)
        self.lengths = tuple(len(pytree.tree_leaves(term)[0]) for term in stored)
        self.augment = client.augment
        self.small = fast if isinstance(fast, SmallCNN) and client.loss == "cross_entropy" else None
        self.network = fast if isinstance(fast, TanhNetwork) and client.loss != "cross_entropy" else None
        self.traceable = client.loss != "cross_entropy" and not any(True for _ in model.buffers())

    @property
    def terms(self) -> Terms:
        """The data as the loss takes them; made anew at every call where the client transforms them."""
        return self._prepare(self._client.tensors) if self._terms is None else self._terms

    def _prepare(self, data: tuple[Any, ...]) -> Terms:
        terms: Terms = (data,)
        if self._client.loss == "least_squares":
            terms = tuple((r.inputs, _weights(r, self._like)) for r in data)
        return pytree.tree_map(lambda t: cast(t, self._like), terms)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode now."""
        return self._model.training

    def rows(self, flat: Tensor, terms: Terms) -> Tensor:
        """The weighted residuals of a sum of squares, one flat vector: half of its square is the loss."""
        model = self._model_at(flat)
        if self._client.loss == "mse":
            ((x, y),) = terms
            return ((model(x) - y) / len(y) ** 0.5).reshape(-1)
        if self._client.loss != "least_squares":
            raise FipaError(f"{self._client.loss} has no residuals to bend or correct: leave that out of step_control")
        pairs = self._residuals(model, terms)
        return torch.cat([((weight / len(rows)).sqrt() * rows).reshape(-1) for rows, weight in pairs])

    def _model_at(self, flat: Tensor) -> Callable[..., Tensor]:
        params = self._layout.unflatten(flat)
        return lambda *args: self._call(params, *args)

    def _residuals(self, model: Callable[..., Tensor], terms: Terms) -> Iterator[tuple[Tensor, Tensor]]:
        """Residuals of each term, with their weights."""
        for residual, (inputs, weight) in zip(self._client.data, terms, strict=True):
            rows = residual.rows(model, inputs)
            if weight.shape[1] not in (1, rows.shape[1]):
                raise SketchError(f"weights of shape {tuple(weight.shape)} fit no residuals of {tuple(rows.shape)}")
            yield rows, weight

    def bend(self, flat: Tensor, direction: Tensor) -> Tensor:
        r"""$J^\top r''$ (p), with $r''$ the second derivative of the residuals along a direction in parameter space."""

        def rows(theta: Tensor) -> Tensor:
            return self.rows(theta, self.terms)

        def slope(theta: Tensor) -> Tensor:
            return jvp(rows, (theta,), (direction,))[1]

        curvature = jvp(slope, (flat,), (direction,))[1]
        return vjp(rows, flat)[1](curvature)[0]

    def remainder(self, flat: Tensor, direction: Tensor) -> Tensor:
        r"""$J^\top r$ (p), with $J$ the Jacobian here and $r$ the residuals after a step."""
        left = self.rows(flat + direction, self.terms)
        return vjp(lambda theta: self.rows(theta, self.terms), flat)[1](left)[0]

    def features(self, flat: Tensor, x: Tensor, levels: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and what goes into the modules at `levels` on the way."""
        with inputs_of(self._model, levels) as seen:
            outputs = self._model_at(flat)(x)
        missing = [level for level in levels if level not in seen]
        if missing:
            raise FipaError(f"{missing[0]!r} is never called with a tensor when the model runs: choose other levels")
        return outputs, [seen[level] for level in levels]

    def fast_loss(self, flat: Tensor, terms: Terms) -> Tensor:
        """The same as `loss`, with passes through the model by its compiled loops."""
        assert self.network is not None
        return self._loss(self.network.at(flat, self._model_at(flat)), flat, terms)

    def loss(self, flat: Tensor, terms: Terms) -> Tensor:
        """The loss at flat parameters (p) on all of the terms, or on batches of them."""
        return self._loss(self._model_at(flat), flat, terms)

    def _loss(self, model: Callable[..., Tensor], flat: Tensor, terms: Terms) -> Tensor:
        if self._client.loss == "least_squares":
            total = flat.new_zeros(())
            for rows, weight in self._residuals(model, terms):
                total = total + 0.5 * (weight * rows.square()).sum() / len(rows)
            return total
        ((x, y),) = terms
        if self._client.loss == "mse":
            z = model(x)
            if z.shape != y.shape:
                raise FipaError(f"the model returns {tuple(z.shape)} for targets y of {tuple(y.shape)}: reshape y")
            return 0.5 * (z - y).square().sum() / len(y)
        z = _widened(model(x))
        with _exact():
            return cross_entropy(z, y)


def objectives(
    model: nn.Module, layout: Layout, clients: Mapping[int, Client], fast: Fast | None = None
) -> Callable[[int], Objective]:
    """Makes the objective of a client when it is asked for, and keeps the latest: of many clients, few may be asked."""
    call = _caller(model, layout)
    return lru_cache(LATEST)(lambda client: Objective(model, layout, clients[client], fast, call))


def fast_way(model: nn.Module, layout: Layout) -> Fast | None:
    """Compiled loops for the model, if there are any that can run it."""
    return SmallCNN.of(model, layout) or TanhNetwork.of(model, layout)


def _exact() -> torch.autocast:
    """Where bfloat16 has no place, if it is on."""
    return torch.autocast("cpu", enabled=False)


def _widened(x: Tensor) -> Tensor:
    """Without what bfloat16 has left of its dtype, if it is on."""
    return x.float() if x.dtype == torch.bfloat16 else x


def _gradients(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a stack of clients."""
    return vmap(grad(loss))


def _caller(model: nn.Module, layout: Layout) -> Callable[..., Tensor]:
    """Calls the model with other parameters than its own."""
    params = dict(model.named_parameters())
    return model_caller(model, {name: params[name] for name in layout.names})


def _shifts_only(augment: object) -> bool:
    """Whether rows and columns of an image are moved as a whole, if at all."""
    return augment is None or (isinstance(augment, Augment) and not augment.rotation)


def _weights(residual: Any, like: Tensor) -> Tensor:
    """A weight per residual, with the examples along the first axis, so that it can be stacked and cut in batches."""
    weight = torch.as_tensor(residual.weight, dtype=like.dtype, device=like.device)
    n = len(residual.inputs[0])
    if weight.dim() == 0:
        return weight.expand(n, 1)
    if weight.dim() > 2 or len(weight) != n:
        raise SketchError(f"weights of shape {tuple(weight.shape)} fit no residuals of {n} examples")
    return weight.reshape(n, -1)


class StackedObjective:
    """The losses of M clients of one form, side by side; `traces` can be shared by all stacks of one model.

    Parameters
    ----------
    alone
        Whether the gradient of a client on its own may be traced as well. That asks of a model what a group asks: to be
        a function of parameters and data, and of nothing else that changes.
    """

    def __init__(self, objectives: Sequence[Objective], traces: Traces | None = None, *, alone: bool = False) -> None:
        if len({objective.form for objective in objectives}) != 1:
            raise FipaError("clients of different forms cannot be stacked")
        self._first = objectives[0]
        self._loss = objectives[0].loss
        self._small = objectives[0].small if len(objectives) == 1 else None
        self.lengths = objectives[0].lengths
        self.size = len(objectives)
        if self.size == 1:
            self.terms = objectives[0].terms
        else:
            self.terms = pytree.tree_map(lambda *leaves: torch.stack(leaves), *(o.terms for o in objectives))
        self._traces: Traces = {} if traces is None else traces
        self._alone = alone and self.size == 1 and objectives[0].traceable
        self.nbytes = sum(t.numel() * t.element_size() for t in pytree.tree_leaves(self.terms))

    def varied(self, generators: Sequence[torch.Generator]) -> StackedObjective:
        """The same losses on examples that are varied as the clients say, once for all."""
        if self._first.augment is None:
            return self
        other = copy.copy(self)
        other.terms = self._vary(self.terms, generators)
        return other

    def losses(self, thetas: Tensor) -> Tensor:
        """Each client's loss on all of its data at its own row of `thetas` (M x p)."""
        with torch.no_grad():
            if self._small is not None:
                ((x, y),) = self.terms
                return self._small.loss(thetas[0], x, y)[None]
            if self.size == 1:
                return self._loss(thetas[0], self.terms)[None]
            return self._traced(vmap, "loss", thetas, self.terms)

    def gradients(
        self,
        thetas: Tensor,
        index: Sequence[Tensor] | None = None,
        augmented: Sequence[torch.Generator] | None = None,
        *,
        often: bool = False,
    ) -> Tensor:
        """Gradients (M x p) on all data, or on the examples `index[term]` (M x batch) of each term.

        With the clients' generators in `augmented`, on examples that are varied as the clients say. `often` says that
        many follow, so that it pays to trace that of a client that is alone, too.
        """
        if self._small is not None and (augmented is None or _shifts_only(self._first.augment)):
            return self._small_gradient(thetas[0], index, augmented)[None]
        terms = self.terms if index is None else self._batch(index)
        if augmented is not None and self._first.augment is not None:
            terms = self._vary(terms, augmented)
        if self.size > 1:
            return self._traced(_gradients, "gradient", thetas, terms)
        if often and self._alone and (found := self._traced_alone(thetas, terms)) is not None:
            return found
        flat = thetas[0].detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self._loss(flat, terms), flat)
        return gradient[None]

    def gradients_with(
        self,
        extra: Callable[[Sequence[Tensor], Tensor, Tensor], Tensor],
        levels: Sequence[str],
        thetas: Tensor,
        index: Sequence[Tensor] | None,
        augmented: Sequence[torch.Generator],
    ) -> Tensor:
        """Gradient (1 x p) of cross entropy and of a loss `extra(features, x, y)`, for a client that is alone here."""
        terms = self.terms if index is None else self._batch(index)
        if self._first.augment is not None:
            terms = self._vary(terms, augmented)
        ((x, y),) = terms
        flat = thetas[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs, features = self._first.features(flat, x, levels)
            with _exact():
                loss = cross_entropy(_widened(outputs), y) + extra([_widened(level) for level in features], x, y)
            (gradient,) = torch.autograd.grad(loss, flat)
        return gradient[None]

    def features_at(self, levels: Sequence[str]) -> Callable[[Tensor, Tensor], list[Tensor]]:
        """Features of other models, as a function of their parameters and of x."""

        def features(flat: Tensor, x: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return self._first.features(flat, x, levels)[1]

        return features

    def _small_gradient(
        self, flat: Tensor, index: Sequence[Tensor] | None, generators: Sequence[torch.Generator] | None
    ) -> Tensor:
        assert self._small is not None
        ((x, y),) = self.terms
        chosen = torch.arange(len(x)) if index is None else index[0][0]
        moves = None
        if generators is not None and isinstance(self._first.augment, Augment):
            moves = self._first.augment.moves(len(chosen), generators[0])
        with _exact():
            return self._small.gradient(flat, View.of(x, chosen, moves), y[chosen])

    def _vary(self, terms: Terms, generators: Sequence[torch.Generator]) -> Terms:
        augment = self._first.augment
        assert augment is not None
        ((x, y),) = terms
        if self.size == 1:
            return ((augment(x, generators[0]), y),)
        return ((torch.stack([augment(one, g) for one, g in zip(x, generators, strict=True)]), y),)

    def _batch(self, index: Sequence[Tensor]) -> Terms:
        if self.size == 1:
            return tuple(
                pytree.tree_map(lambda t, i=i: t[i[0]], term) for term, i in zip(self.terms, index, strict=True)
            )
        rows = torch.arange(self.size)[:, None]
        return tuple(
            pytree.tree_map(lambda t, i=i: t[rows, i], term) for term, i in zip(self.terms, index, strict=True)
        )

    def _traced_alone(self, thetas: Tensor, terms: Terms) -> Tensor | None:
        """The gradient of a client as that of a group of one, or None if its model does not allow that."""
        stacked = pytree.tree_map(lambda t: t[None], terms)
        try:
            trace = self._trace(_gradients, "gradient", thetas, stacked)
        except Exception:  # the model is run as it is, and says itself what is wrong with it, if anything is
            trace = self._traces[self._key("gradient", stacked)] = None
        return None if trace is None else trace(thetas, stacked)

    def _traced(self, what: Transform, name: str, thetas: Tensor, terms: Terms) -> Tensor:
        try:
            trace = self._trace(what, name, thetas, terms)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise FipaError(
                f"this model cannot be trained for several clients at once ({reason}): set engine.group = 1"
            ) from error
        assert trace is not None
        return trace(thetas, terms)

    def _trace(self, what: Transform, name: str, thetas: Tensor, terms: Terms) -> Callable[..., Tensor] | None:
        key = self._key(name, terms)
        if key not in self._traces and self._first.network is not None:
            with suppress(Exception):  # a loss may ask for derivatives that the loops do not have
                self._traces[key] = traced(what(self._first.fast_loss), thetas, terms)
        if key not in self._traces:
            self._traces[key] = traced(what(self._loss), thetas, terms)
        return self._traces[key]

    def _key(self, name: str, terms: Terms) -> object:
        mode = (self._first.training, torch.is_autocast_enabled("cpu"))
        return (name, self._first.form, mode, *(t.shape for t in pytree.tree_leaves(terms)))
