# SPDX-License-Identifier: Apache-2.0
"""Record the torch operators of a block of code as a graph.

The block runs normally; a mode below autograd sees every operator, including the operators of backward passes inside
the block. Inputs become placeholders. Other tensors that the block uses are stored by reference, so that later changes
in place take effect. No Python code is recorded, neither the block's nor Pyro's.
"""

import linecache
import operator
import sys
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dvi.core.graph_passes import FROM_SHAPES, noted, own_memory, simplify
from pyro_dvi.errors import UnsupportedError

_RECORDING: ContextVar["Recorder | None"] = ContextVar("recording", default=None)
_COMPARING = ContextVar("comparing", default=False)
_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def is_comparing() -> bool:
    """Return True within an ordinary step that is compared with a recording."""
    return _COMPARING.get()


def is_recording() -> bool:
    """Return True while operators are recorded; during this time, code must not read values of tensors."""
    return _RECORDING.get() is not None


def is_for_any_rows() -> bool:
    """Return True while recording operators that must not depend on the number of rows."""
    recorder = _RECORDING.get()
    return recorder is not None and recorder.any_rows


@contextmanager
def comparing() -> Iterator[None]:
    """Make :func:`is_comparing` return True within the context."""
    token = _COMPARING.set(True)
    try:
        yield
    finally:
        _COMPARING.reset(token)


def assumed(condition: Tensor) -> bool:
    """Return True if a condition holds, so that the caller may take a shortcut that gives the same result.

    While recording, the result is False unless conditions are allowed. If they are, the recording depends on the
    condition, and replays in which the condition fails are void.
    """
    recorder = _RECORDING.get()
    if recorder is None:
        return bool(condition)
    if recorder.assumptions is None:
        return False
    with _disable_current_modes():  # so that it is not recorded as reading a value
        holds = bool(condition)
    if holds:
        recorder.assumptions.append(condition)
    return holds


def structural(condition: Tensor) -> bool:
    """Return a condition that holds for all inputs or for none; a recording for any number of rows relies on this."""
    with _disable_current_modes() if is_for_any_rows() else nullcontext():
        return bool(condition)


def refuse_to_record(problem: str) -> None:
    """While operators are recorded, report why the running code cannot be replayed."""
    recorder = _RECORDING.get()
    if recorder is not None:
        recorder.note(problem)


class Watch(TorchDispatchMode):
    """A dispatch mode that avoids importing torch's compiler, because this import takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Watch):
    """Record the operators of a block, in which :func:`is_recording` returns True.

    Args:
        inputs: tensors that a replay may replace, or whose values may differ.
        any_rows: True if the graph is compared with graphs for other numbers of rows. The result of each node is then
            stored as ``meta["value"]``, and random numbers, which come from a seed, are constants.
        assuming: True if the graph may rely on conditions.

    Attributes:
        assumptions: conditions that the graph relies on; None if it must not rely on any.
        found: other tensors that the block uses, with their versions; the graph is valid as long as the versions do not
            change.
        coarsest: rounding error of the coarsest dtype in the block.
    """

    def __init__(self, inputs: Sequence[Tensor], any_rows: bool = False, assuming: bool = False) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, int]] = []
        self.coarsest = 0.0
        self.any_rows = any_rows
        self.assumptions: list[Tensor] | None = [] if assuming else None
        self._problem: str | None = None
        self._graph = fx.Graph()
        self._held: dict[str, Tensor] = {}
        self._nodes: MutableMapping[Tensor, fx.Node] = WeakIdKeyDictionary()
        self._varying = set(map(memory, inputs))  # memory that depends on inputs or random numbers
        self._written: set[StorageWeakRef] = set()
        for i, value in enumerate(inputs):
            self._note(value, self._graph.placeholder(f"input_{i}"))

    def __enter__(self) -> Self:
        self._opener = sys._getframe(1).f_code
        self._token = _RECORDING.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _RECORDING.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.clone.default  # the block may write to it
        node_args, node_kwargs = tree_map_only(Tensor, self._node, (args, kwargs))
        result = func(*args, **kwargs)
        if func in _ALIASES:
            self._nodes[result] = node_args[0]
            return result
        node = self._graph.call_function(func, node_args, node_kwargs)
        varies = func not in FROM_SHAPES and self._varies(tensors((args, kwargs)))
        self._look_for_problems(func, args, kwargs, varies)
        written = node.meta["written"] = _written(func, args, kwargs)
        self._written |= written
        if varies or (draws(node) and not self.any_rows):
            self._varying |= written.union(map(memory, tensors(result)))
        self._note(result, node)
        return result

    def writes(self, tensor: Tensor) -> bool:
        """Return True if the block has written to a tensor, or to one that shares its memory."""
        return memory(tensor) in self._written

    def look(self, values: Any) -> None:
        """Record that Python reads values without an operator."""
        if self._varies(tensors(values)):
            self.note("Python reads a value")

    def graph(self, results: Sequence[Tensor]) -> fx.Graph:
        """Return a graph of all recorded operators; it maps the inputs to a list of results.

        Raises:
            UnsupportedError: if a replay would differ from the block.
        """
        if self._problem is not None:
            raise UnsupportedError(self._problem)
        self._graph.output([self._node(result) for result in results])
        return self._graph

    def module(self, results: Sequence[Tensor], owned: Sequence[Tensor] = ()) -> fx.GraphModule:
        """Return a module of the operators that the results need; it maps the inputs to a list of results.

        Args:
            results: tensors of the block.
            owned: further results, which must not share memory with any other tensor.

        Raises:
            UnsupportedError: if a replay would differ from the block.
        """
        graph = self.graph([*results, *owned])
        if not self._written.isdisjoint(map(memory, self._held.values())):
            raise UnsupportedError("the step writes to a tensor that belongs to no module")
        simplify(graph, self._written, self._hold)
        own_memory(graph, len(results))
        for node in graph.nodes:
            # The rest of these notes refers to memory, which must not be copied.
            node.meta = {"on_host": _is_on_host(node)}
        return fx.GraphModule(self._held, graph)

    def _note(self, result: Any, node: fx.Node) -> None:
        """Record the result of a node, or each of several results."""
        found = tensors(result)
        node.meta["memory"] = set(map(memory, found))
        node.meta["devices"] = {tensor.device.type for tensor in found}
        noted(node, result, self._varies(found))
        if self.any_rows:
            node.meta["value"] = result
        if isinstance(result, Tensor):
            self._nodes[result] = node
            if result.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
        for i, part in enumerate(result if isinstance(result, (list, tuple)) else []):
            self._note(part, self._graph.call_function(operator.getitem, (node, i)))

    def _node(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._nodes:
            self._nodes[tensor] = self._hold(tensor)
            if not tensor.is_inference():
                # An alias would not share the version, because this code runs below autograd.
                self.found.append((tensor if tensor.grad_fn is None else tensor.detach(), tensor._version))
        return self._nodes[tensor]

    def _hold(self, tensor: Tensor) -> fx.Node:
        name = f"constant_{len(self._held)}"
        self._held[name] = tensor.detach()
        node = self._graph.get_attr(name)
        self._note(tensor, node)
        return node

    def _varies(self, given: Iterable[Tensor]) -> bool:
        return not self._varying.isdisjoint(map(memory, given))

    def _look_for_problems(self, func: Any, args: Any, kwargs: dict[str, Any], varies: bool) -> None:
        """Record the first problem that prevents a replay, because the block might catch an exception."""
        problem = None
        if varies and torch.Tag.data_dependent_output in func.tags:
            problem = "Python reads a value"
        elif self.any_rows:
            return  # the comparison of runs detects other problems
        elif kwargs.get("generator") is not None:
            problem = "the model draws from a generator of its own"
        elif varies and torch.Tag.dynamic_output_shape in func.tags:
            masks = [i for i in tensors(args[1:]) if i.dtype in (torch.bool, torch.uint8)]
            if func is not torch.ops.aten.index.Tensor or self._varies(masks):
                problem = "a shape depends on values"
        if problem:
            self.note(problem)

    def note(self, problem: str) -> None:
        """Record why the block cannot be replayed; the first reason counts."""
        self._problem = self._problem or problem + self._place()

    def _place(self) -> str:
        """Return the running line: the innermost line of the user's code in the block, or else of this library."""
        lines: dict[bool, str] = {}
        within = takewhile(lambda at: at[0].f_code is not self._opener, walk_stack(sys._getframe(4)))
        for frame, number in within:
            package, path = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
            if package not in ("torch", "pyro"):
                line = f" in {Path(path).name}, line {number}: {linecache.getline(path, number).strip()}"
                lines.setdefault(package == "pyro_dvi", line)
        return lines.get(False) or lines.get(True, "")


def memory(tensor: Tensor) -> StorageWeakRef:
    """Return a key that is equal for tensors that share memory, and differs for all others, including later ones."""
    return StorageWeakRef(tensor.untyped_storage())


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def draws(node: fx.Node) -> bool:
    """Return True if a node draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return bool(_by_name(node.target, node.args, node.kwargs).get("dropout_p", 1.0) != 0)


def _is_on_host(node: fx.Node) -> bool:
    """Return True if a node computes on the CPU; earlier nodes are already marked."""
    if node.target is not operator.getitem and node.meta.get("devices"):
        return bool(node.meta["devices"] == {"cpu"})
    given = node.all_input_nodes
    return bool(given) and all(one.meta["on_host"] for one in given)


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operator, with their defaults."""
    expected = func._schema.arguments
    given = {a.name: value for a, value in zip(expected, args, strict=False)} | kwargs
    return {a.name: a.default_value for a in expected if a.has_default_value()} | given


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[StorageWeakRef]:
    """Return the memory that an operator writes to."""
    named = _by_name(func, args, kwargs)
    found = [named.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    # Writes that the schema does not declare.
    if "batch_norm" in func.name() and named.get("training", named.get("train", True)):
        found += [named.get("running_mean"), named.get("running_var")]
    return set(map(memory, tensors(found)))
