# SPDX-License-Identifier: Apache-2.0
"""Passes that shorten a graph of operators without changing its results, which stay bitwise equal.

Each operator costs some microseconds, whatever it computes, and autograd creates many superfluous operators: views of a
whole tensor, products with 1, the same difference twice. No pass affects memory that an operator writes to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten
_LARGEST = 1 << 12  # largest number of elements of a constant that is stored instead of computed
# Operators whose results depend only on the shapes of arguments.
FROM_SHAPES = {
    getattr(aten, name).default
    for name in ("ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full")
}
_VIEWS = {aten.expand.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_METHODS = {"expand", "view", "t", "unsqueeze", "squeeze"}
_UNLIKE = {
    "full",
    "arange",
    "zeros",
    "ones",
    "empty",
    "scalar_tensor",
    "randperm",
    "rand",
    "randn",
    "_to_copy",
}
_PRODUCTS = {aten.mul.Tensor}


def noted(node: fx.Node, result: Any, varies: bool) -> fx.Node:
    """Store in a node what the passes need to know about its result."""
    if isinstance(result, Tensor):
        node.meta["form"] = (result.shape, result.stride(), result.dtype, result.device)
        if not varies and result.numel() <= _LARGEST:
            node.meta["value"] = result.detach()
    return node


def simplify(graph: fx.Graph, written: set[StorageWeakRef], hold: Callable[[Tensor], fx.Node]) -> None:
    """Shorten a graph.

    Args:
        graph: a graph whose nodes were :func:`noted`.
        written: memory that operators write to, in the form of ``node.meta["memory"]``.
        hold: function that returns the node of a constant.
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or has_effect(node):
            continue
        calm = all(written.isdisjoint(n.meta["memory"]) for n in (node, *node.all_input_nodes))
        other = _same_as(node) or (calm and _folded(node, graph, hold)) or (calm and _seen(node, seen))
        if other:
            node.replace_all_uses_with(other)
            graph.erase_node(node)
    graph.eliminate_dead_code(has_effect)


def own_memory(graph: fx.Graph, start: int) -> None:
    """Give each result from index ``start`` onwards its own memory, because the caller may write to it."""
    output = next(iter(reversed(graph.nodes)))
    taken = {
        number
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for number in node.meta["memory"]
    }
    results = list(output.args[0])
    for i in range(start, len(results)):
        memory = results[i].meta["memory"]
        if not taken.isdisjoint(memory):
            with graph.inserting_before(output):
                results[i] = graph.call_function(aten.clone.default, (results[i],))
        taken |= memory
    output.args = (results,)


def called_quickly(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function of the module's operators that calls them as torch functions where these exist.

    Such calls take half the time. Constants are attributes of the object, which Python finds before it asks the module.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(module.graph, {}))
    for node in copy.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        name = "" if packet is None else packet.__name__
        if name in _METHODS:
            node.op, node.target = "call_method", name
        elif (
            node.op == "call_function" and name not in _UNLIKE and hasattr(torch._C._VariableFunctions, name)
        ):
            node.target = getattr(torch, name)
    made = fx.GraphModule(module, copy)
    vars(made).update(made._buffers)
    return made.forward  # type: ignore[no-any-return]


def has_effect(node: fx.Node) -> bool:
    """Return True if a node writes to an argument, changes a random state, or checks a condition."""
    if node.op in ("placeholder", "output"):
        return True
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    moves = torch.Tag.nondeterministic_seeded in tags or "batch_norm" in str(node.target)
    return moves or (schema is not None and (schema.is_mutable or not schema.returns))


def _same_as(node: fx.Node) -> fx.Node | None:
    """Return the argument that a node passes on unchanged, or None."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or "form" not in node.meta:
        return None
    if node.target in _VIEWS and first.meta.get("form") == node.meta["form"]:
        return first
    if node.target is aten.t.default and first.target is aten.t.default:
        return first.all_input_nodes[0]
    return None


def _folded(node: fx.Node, graph: fx.Graph, hold: Callable[[Tensor], fx.Node]) -> fx.Node | None:
    if "value" in node.meta:
        with graph.inserting_before(node):
            return hold(node.meta["value"])
    if node.target in _PRODUCTS:
        for one, other in (node.args, node.args[::-1]):
            value = one.meta.get("value") if isinstance(one, fx.Node) else None
            if (
                value is not None
                and isinstance(other, fx.Node)
                and other.meta.get("form") == node.meta["form"]
            ):
                if bool((value == 1).all()):
                    return other
    return None


def _seen(node: fx.Node, seen: dict[Any, fx.Node]) -> fx.Node | None:
    """Return an earlier node with the same result, or None."""
    key = (node.target, repr(node.args), repr(node.kwargs))
    return None if seen.setdefault(key, node) is node else seen[key]
