# SPDX-License-Identifier: Apache-2.0
"""Record a function of tensors as a graph of torch operators that is valid for any number of rows.

The function is recorded with three numbers of rows. Results that are equal each time, and are not computed from the
inputs, become constants of the graph, so that everything that depends only on the weights is computed once. Integers
that differ between the recordings must be linear functions of the number of rows.
"""

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map, tree_structure

from pyro_dvi.core.graph_passes import has_effect
from pyro_dvi.core.recorder import Recorder, draws, tensors
from pyro_dvi.core.undisturbed import layer_by_layer
from pyro_dvi.errors import UnsupportedError

Function = Callable[..., Sequence[Tensor]]


def recorded(function: Function, *arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Return a function as a module of torch operators, with its constants as buffers.

    Args:
        function: takes and returns tensors.
        arguments: three sets of arguments, with different numbers of rows and, if possible, different values.

    Raises:
        UnsupportedError: if the operators depend on the values of the inputs or nonlinearly on the number of rows, draw
            random numbers, or change a constant in place.
    """
    _run(function, arguments[0])  # first, so that caches of the function are filled
    return _Common([_run(function, inputs) for inputs in arguments], list(map(rows_of, arguments))).module()


def rows_of(inputs: Sequence[Tensor]) -> int:
    """Return the number of rows of the first argument that has rows."""
    return next(len(value) for value in inputs if value.dim())


def _run(function: Function, inputs: Sequence[Tensor]) -> fx.Graph:
    with layer_by_layer(), Recorder(inputs, any_rows=True) as recorder:
        results = function(*inputs)
    return recorder.graph(results)


class _Common:
    """The common graph of runs with different numbers of rows.

    Nodes at the same position compute the same function, and have the same name.
    """

    def __init__(self, runs: Sequence[fx.Graph], rows: Sequence[int]) -> None:
        if any(list(map(_kind, run.nodes)) != list(map(_kind, runs[0].nodes)) for run in runs):
            raise UnsupportedError("the operators depend on the number of rows")
        self._places: list[tuple[fx.Node, ...]] = list(zip(*(run.nodes for run in runs), strict=True))
        self._rows = rows
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, fx.Node] = {}  # nodes of the common graph, by the nodes of the first run
        self._held: dict[str, Tensor] = {}
        self._kept = {node for node in runs[0].nodes if node.op in ("placeholder", "output")}
        self._written: set[StorageWeakRef] = set()  # memory that these nodes write to

    def module(self) -> fx.GraphModule:
        self._find_kept()
        for nodes in self._places:
            if (first := nodes[0]) in self._kept:
                args, kwargs = tree_map(self._shared, *((node.args, node.kwargs) for node in nodes))
                self._nodes[first] = self._graph.create_node(first.op, first.target, args, kwargs)
        self._graph.eliminate_dead_code(lambda node: has_effect(node) and not draws(node))
        if drawn := next(filter(draws, self._graph.nodes), None):
            raise UnsupportedError(f"the model draws random numbers ({drawn.target})")
        return fx.GraphModule(self._held, self._graph)

    def _find_kept(self) -> None:
        """Find the nodes that depend on inputs or on the number of rows, and the memory that they write to."""
        before = len(self._written)
        for nodes in self._places:
            first, given = nodes[0], nodes[0].all_input_nodes
            met = set[StorageWeakRef]().union(*(node.meta.get("memory", ()) for node in (first, *given)))
            known = self._kept.isdisjoint(given) and self._written.isdisjoint(met)
            if first.op == "call_function" and not (known and _agree(nodes)):
                self._kept.add(first)
                self._written.update(first.meta.get("written", ()))
        if before < len(self._written):  # other nodes may read this memory
            self._find_kept()

    def _shared(self, first: Any, *others: Any) -> Any:
        """Return an argument of an operator in the common graph, from the arguments in all runs."""
        if any(repr(first) != repr(other) for other in others):  # compared as text, in which NaN equals NaN
            return self._size(first, *others)
        if isinstance(first, fx.Node) and first not in self._nodes:
            self._nodes[first] = self._constant(first, *others)
        return self._nodes.get(first, first)

    def _constant(self, *nodes: fx.Node) -> fx.Node:
        if not self._written.isdisjoint(nodes[0].meta["memory"]):
            raise UnsupportedError("the model changes a stored tensor in place")
        if not _agree(nodes):
            raise UnsupportedError(
                "a tensor that is created in Python depends on the inputs or on the number of rows"
            )
        name = f"constant_{len(self._held)}"
        # Contiguous, because torch.export.save warns about other tensors.
        self._held[name] = nodes[0].meta["value"].detach().clone(memory_format=torch.contiguous_format)
        return self._graph.get_attr(name)

    def _size(self, *values: Any) -> fx.Node:
        """Return the node of an integer ``slope * rows + offset``."""
        if all(isinstance(value, (int, float)) for value in values):
            slope = (values[1] - values[0]) // (self._rows[1] - self._rows[0])
            offset = values[0] - slope * self._rows[0]
            if all(value == slope * rows + offset for value, rows in zip(values, self._rows, strict=True)):
                node = self._graph.call_function(operator.mul, (self._num_rows, slope))
                return self._graph.call_function(operator.add, (node, offset)) if offset else node
        raise UnsupportedError(
            f"the operators contain integers, {values} for {self._rows} rows, that are not linear in the number of rows"
        )

    @cached_property
    def _num_rows(self) -> fx.Node:
        first = next(nodes[0] for nodes in self._places if nodes[0].meta["value"].dim())
        return self._graph.call_function(torch.ops.aten.sym_size.int, (self._nodes[first], 0))


def _kind(node: fx.Node) -> Any:
    return node.op, node.target, tree_structure((node.args, node.kwargs))


def _agree(nodes: Sequence[fx.Node]) -> bool:
    """Return True if the results of the nodes are equal tensors."""
    first, *others = (tensors(node.meta["value"]) for node in nodes)
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
        for other in others
        for a, b in zip(first, other, strict=True)
    )
