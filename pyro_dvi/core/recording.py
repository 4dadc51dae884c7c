# SPDX-License-Identifier: Apache-2.0
"""Record what a function of tensors computes as a graph of torch operators, for any number of rows.

The function runs with three numbers of rows. What comes out equal each time, and is computed from none of the inputs,
is a constant of the graph: whatever only the weights decide is so computed once. An integer that differs is a linear
function of the number of rows. No Python code is recorded, neither from the function nor from Pyro.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.recorder import Watch, recording
from pyro_dvi.errors import UnsupportedError

Function = Callable[..., Sequence[Tensor]]


def recorded(function: Function, *arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Return a function as a module of torch operators, with its constants as buffers.

    Args:
        function: of tensors; it gives tensors.
        arguments: three times, with other numbers of rows, and other values where there may be others.

    Raises:
        UnsupportedError: the operators depend on the values of the inputs or, other than linearly in their integers,
            on the number of rows; they draw random numbers; or they change a constant in place.
    """
    _Run(function, arguments[0])  # what the function keeps for later runs is there then
    return _Graph([_Run(function, inputs) for inputs in arguments]).module()


def rows_of(inputs: Sequence[Tensor]) -> int:
    """Return the number of rows, by the first argument that has any."""
    return next(len(value) for value in inputs if value.dim())


@dataclass(frozen=True)
class _Step:
    """One call of an operator."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def given(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    @property
    def changed(self) -> set[int]:
        """Memory that is written to."""
        expected = self.func._schema.arguments
        named = {a.name: value for a, value in zip(expected, self.args, strict=False)} | self.kwargs
        written = [named.get(a.name) for a in expected if a.alias_info and a.alias_info.is_write]
        return {_memory(tensor) for tensor in _tensors(written)}


class _Run(Watch):
    """One run of the function, every step of it. It keeps all tensors, so that each has a name of its own, its id."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.steps: list[_Step] = []
        self._looks_at_values = False
        self._from_inputs = {_memory(value) for value in inputs}
        with recording(any_rows=True), self:
            self.results = list(function(*inputs))
        if self._looks_at_values:
            raise UnsupportedError(
                "it looks at values that depend on the inputs, as bool(tensor) or .item() do"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = _Step(func, args, kwargs or {}, func(*args, **(kwargs or {})))
        if any(_memory(value) in self._from_inputs for value in step.given):
            if torch.Tag.data_dependent_output in func.tags:
                self._looks_at_values = True  # an exception here might be caught by the function
            self._from_inputs |= {_memory(value) for value in _tensors(step.result)} | step.changed
        self.steps.append(step)
        return step.result


class _Graph:
    """The steps that runs with different numbers of rows have in common."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = runs
        self._inputs = runs[0].inputs
        self._rows = [rows_of(run.inputs) for run in runs]
        if any([step.func for step in run.steps] != [step.func for step in runs[0].steps] for run in runs):
            raise UnsupportedError("its operators depend on the number of rows")
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._held: dict[str, Tensor] = {}

    def module(self) -> fx.GraphModule:
        for i, value in enumerate(self._inputs):
            self._nodes[id(value)] = self._graph.placeholder(f"input_{i}")
        first = next(value for value in self._inputs if value.dim())
        self._num_rows = self._graph.call_function(torch.ops.aten.sym_size.int, (self._nodes[id(first)], 0))
        kept, self._changed = self._kept()
        for steps in kept:
            args, kwargs = self._shared(*((step.args, step.kwargs) for step in steps))
            self._name(steps[0].result, self._graph.call_function(steps[0].func, args, kwargs))
        self._graph.output(tuple(self._shared(*(run.results for run in self._runs))))
        self._graph.eliminate_dead_code(_has_effect)
        for node in self._graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise UnsupportedError(f"it draws random numbers ({node.target})")
        return fx.GraphModule(self._held, self._graph)

    def _kept(self) -> tuple[list[tuple[_Step, ...]], set[int]]:
        """Return the steps that depend on inputs or their number, and the memory that these write to."""
        changed: set[int] = set()
        while True:
            names, kept, before = set(self._nodes), [], set(changed)
            for steps in zip(*(run.steps for run in self._runs), strict=True):
                given, results = steps[0].given, _tensors(steps[0].result)
                if (
                    any(id(value) in names for value in given)
                    or any(_memory(value) in changed for value in [*results, *given])
                    or not all(_equal(results, _tensors(step.result)) for step in steps)
                ):
                    kept.append(steps)
                    names |= {id(value) for value in results}
                    changed |= steps[0].changed
            if changed == before:
                return kept, changed

    def _name(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            self._nodes[id(result)] = node
        elif isinstance(result, (list, tuple)):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._nodes[id(part)] = self._graph.call_function(operator.getitem, (node, i))

    def _shared(self, *values: Any) -> Any:
        """Return an argument of an operator as the graph has it, from the arguments of all runs."""
        first = values[0]
        if isinstance(first, Tensor):
            return self._nodes[id(first)] if id(first) in self._nodes else self._constant(*values)
        if isinstance(first, (list, tuple)):
            return type(first)(self._shared(*parts) for parts in zip(*values, strict=True))
        if isinstance(first, dict):
            return {name: self._shared(*(value[name] for value in values)) for name in first}
        return (
            first if len({repr(value) for value in values}) == 1 else self._size(*values)
        )  # by text, where NaN is NaN

    def _constant(self, *values: Tensor) -> fx.Node:
        if _memory(values[0]) in self._changed:
            raise UnsupportedError("it changes a tensor that it holds")
        if not all(_equal([values[0]], [value]) for value in values):
            raise UnsupportedError("a tensor that it makes in Python depends on the inputs or their number")
        name = f"constant_{len(self._held)}"
        # Contiguous, whatever it is a view of: torch.export.save warns of others.
        self._held[name] = values[0].detach().clone(memory_format=torch.contiguous_format)
        self._nodes[id(values[0])] = node = self._graph.get_attr(name)
        return node

    def _size(self, *values: Any) -> fx.Node:
        """Return the node of an integer ``slope * rows + offset``."""
        slope = (values[1] - values[0]) // (self._rows[1] - self._rows[0])
        offset = values[0] - slope * self._rows[0]
        if any(value != slope * rows + offset for value, rows in zip(values, self._rows, strict=True)):
            raise UnsupportedError(
                f"{values} in its operators do not follow from the numbers of rows, {self._rows}"
            )
        node = self._graph.call_function(operator.mul, (self._num_rows, slope))
        return self._graph.call_function(operator.add, (node, offset)) if offset else node


def _has_effect(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
        for a, b in zip(some, others, strict=True)
    )


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
