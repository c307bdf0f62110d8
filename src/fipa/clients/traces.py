"""Functions as plain tensor operations, which torch's interpreter of traces calls faster than Python.

Torch never frees a trace. So traces hold no data, and functions with the same operations share one: without that,
every arm and seed of a run would leave its own behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Terms = tuple[Any, ...]  # one pytree of tensors per term of the loss, with the examples along the first axis

_known: dict[tuple[Any, ...], Callable[..., Tensor] | None] = {}  # None is for graphs that torch cannot trace


def traced(function: Callable[..., Tensor], thetas: Tensor, terms: Terms) -> Callable[..., Tensor]:
    """The operations of a function, called by torch's interpreter of traces if it knows all of them.

    It calls them as they are: what it makes of them after a few runs might have other last bits than the first.
    """
    leaves, structure = pytree.tree_flatten(terms)
    leaves = [leaf.clone() for leaf in leaves]  # one tensor in two places would be taken for one from then on

    def call(thetas: Tensor, *leaves: Tensor) -> Tensor:
        return function(thetas, pytree.tree_unflatten(list(leaves), structure))

    graph = make_fx(call)(thetas, *leaves)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    trace = interpreted(graph, (thetas, *leaves))

    def run(thetas: Tensor, terms: Terms) -> Tensor:
        with torch.no_grad(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return trace(thetas, *pytree.tree_leaves(terms))

    return run


def interpreted(graph: GraphModule, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """A graph as torch's interpreter runs it, or as it is if that does not know all operations."""
    taken = [node for node in graph.graph.nodes if node.op == "get_attr"]
    outside = [attrgetter(str(node.target))(graph) for node in taken]
    if not all(isinstance(one, Tensor) for one in outside):
        return graph  # parts of it are graphs themselves
    lifted, given = _lifted(graph, taken), (*inputs, *outside)
    key = (lifted.code, torch.get_default_dtype(), *((t.dtype, t.device, t.shape) for t in given))
    if key not in _known:
        _known[key] = None
        with warnings.catch_warnings(), torch.no_grad():
            # torch would rather compile, which needs a compiler here
            warnings.simplefilter("ignore", DeprecationWarning)
            with suppress(Exception):  # gradients of convolutions, which take longer than their calls anyway
                copies = tuple(t.clone() for t in given)
                _known[key] = torch.jit.trace(lifted, copies, check_trace=False, _store_inputs=False)
    trace = _known[key]
    return graph if trace is None else lambda *inputs: trace(*inputs, *outside)


def _lifted(graph: GraphModule, taken: list[Node]) -> GraphModule:
    """The same graph, but tensors that it took from outside, one in the loss say, are its last inputs."""
    new, copies = Graph(), dict[Node, Node]()
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    copies |= {node: new.placeholder(node.name) for node in (*inputs, *taken)}
    for node in graph.graph.nodes:
        if node not in copies:
            copies[node] = new.node_copy(node, copies.__getitem__)
    return GraphModule({}, new)
