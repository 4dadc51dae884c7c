# SPDX-License-Identifier: Apache-2.0
"""Record the torch operators of a block as a graph.

The block runs as always; a mode below autograd sees every operator, those of backward passes inside the block too.
Inputs become placeholders. A tensor that the block finds elsewhere is held by reference, so that later changes in place
are seen. No Python code is recorded, neither the block's nor Pyro's.
"""

import linecache
import operator
import sys
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
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
_LOOKING = ContextVar("looking", default=False)
_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def is_looking() -> bool:
    """Return whether an ordinary step is taken to see whether recorded ones still stand for it."""
    return _LOOKING.get()


def is_recording() -> bool:
    """Return whether operators are being recorded; what is not to be replayed must not look at values then."""
    return _RECORDING.get() is not None


def is_for_any_rows() -> bool:
    """Return whether operators are being recorded that must not depend on the number of rows."""
    recorder = _RECORDING.get()
    return recorder is not None and recorder.any_rows


@contextmanager
def looking() -> Iterator[None]:
    """Let :func:`is_looking` be true."""
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def assumed(condition: Tensor) -> bool:
    """Return whether a condition holds, for a shorter way of computing the same.

    A recording notes that it relies on the condition, if it may rely on any, and a replay in which it fails is void.
    """
    recorder = _RECORDING.get()
    if recorder is None:
        return bool(condition)
    if recorder.assumptions is None:
        return False
    with _disable_current_modes():  # so that it does not count as reading a value
        holds = bool(condition)
    if holds:
        recorder.assumptions.append(condition)
    return holds


def refuse_to_record(problem: str) -> None:
    """Say why what is happening cannot be replayed, if it is being recorded."""
    recorder = _RECORDING.get()
    if recorder is not None:
        recorder.note(problem)


class Watch(TorchDispatchMode):
    """Sees every call of an operator, without importing the compiler of torch, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Watch):
    """Record what runs in its block, where :func:`is_recording` is true.

    Args:
        inputs: tensors in whose place a replay has others, or other values.
        any_rows: whether the graph is compared with those for other numbers of rows. Then keep what each node gave
            as ``meta["value"]``, and let random numbers, which come from a seed, be constants.
        assuming: the graph may rely on conditions.

    Attributes:
        assumptions: conditions that the graph relies on; None where it may rely on none.
        found: tensors that the block has found elsewhere, with their versions; the graph holds as long as these stay.
        coarsest: rounding error of the coarsest dtype that was met.
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
        self._varying = set(map(memory, inputs))  # what depends on inputs or random numbers
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
        """Return whether the block has written to a tensor, or one that shares its memory."""
        return memory(tensor) in self._written

    def look(self, values: Any) -> None:
        """Note that Python reads values without an operator."""
        if self._varies(tensors(values)):
            self.note("Python reads a value")

    def graph(self, results: Sequence[Tensor]) -> fx.Graph:
        """Return everything that ran as a graph, from inputs to a list of results.

        Raises:
            UnsupportedError: a replay would not do what the block has done.
        """
        if self._problem is not None:
            raise UnsupportedError(self._problem)
        self._graph.output([self._node(result) for result in results])
        return self._graph

    def module(self, results: Sequence[Tensor], owned: Sequence[Tensor] = ()) -> fx.GraphModule:
        """Return what the results need as a module, from inputs to a list of results.

        Args:
            results: tensors of the block.
            owned: further ones, which share their memory with no tensor that is there afterwards.

        Raises:
            UnsupportedError: a replay would not do what the block has done.
        """
        graph = self.graph([*results, *owned])
        if not self._written.isdisjoint(map(memory, self._held.values())):
            raise UnsupportedError("it writes to a tensor that belongs to no module")
        simplify(graph, self._written, self._hold)
        own_memory(graph, len(results))
        for node in graph.nodes:
            node.meta.clear()  # references to memory are not to be copied
        return fx.GraphModule(self._held, graph)

    def _note(self, result: Any, node: fx.Node) -> None:
        """Note the result of a node, or each of several."""
        found = tensors(result)
        node.meta["memory"] = set(map(memory, found))
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
                # Below autograd, where this runs, an alias would not share the version.
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
        """Note the first thing that cannot be replayed; an exception might be caught by the block."""
        problem = None
        if varies and torch.Tag.data_dependent_output in func.tags:
            problem = "Python reads a value"
        elif self.any_rows:
            return  # other runs show the rest
        elif kwargs.get("generator") is not None:
            problem = "it draws from a generator of its own"
        elif varies and torch.Tag.dynamic_output_shape in func.tags:
            masks = [i for i in tensors(args[1:]) if i.dtype in (torch.bool, torch.uint8)]
            if func is not torch.ops.aten.index.Tensor or self._varies(masks):
                problem = "a shape depends on values"
        if problem:
            self.note(problem)

    def note(self, problem: str) -> None:
        """Note why the block cannot be replayed; the first reason counts."""
        self._problem = self._problem or problem + self._place()

    def _place(self) -> str:
        """Name the line that is running: the innermost of the user's within the block, or else of the library's."""
        lines: dict[bool, str] = {}
        within = takewhile(lambda at: at[0].f_code is not self._opener, walk_stack(sys._getframe(4)))
        for frame, number in within:
            package, path = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
            if package not in ("torch", "pyro"):
                line = f" in {Path(path).name}, line {number}: {linecache.getline(path, number).strip()}"
                lines.setdefault(package == "pyro_dvi", line)
        return lines.get(False) or lines.get(True, "")


def memory(tensor: Tensor) -> StorageWeakRef:
    """Return what is equal for tensors that share memory, and for no others, later ones included."""
    return StorageWeakRef(tensor.untyped_storage())


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def draws(node: fx.Node) -> bool:
    """Return whether a node gives random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[StorageWeakRef]:
    """Return the memory that an operator writes to."""
    expected = func._schema.arguments
    named = {a.name: value for a, value in zip(expected, args, strict=False)} | kwargs
    found = [named.get(a.name) for a in expected if a.alias_info and a.alias_info.is_write]
    if "batch_norm" in func.name() and named.get("training", named.get("train", True)):  # undeclared
        found += [named.get("running_mean"), named.get("running_var")]
    return set(map(memory, tensors(found)))
