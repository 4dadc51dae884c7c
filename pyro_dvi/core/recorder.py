# SPDX-License-Identifier: Apache-2.0
"""Record the torch operators of a block as a graph.

The block runs as always; a mode below autograd sees every operator, those of backward passes inside the block too.
Inputs become placeholders. A tensor that the block finds elsewhere is held by reference, so that later changes in place
are seen. No Python code is recorded, neither the block's nor Pyro's.
"""

import linecache
import operator
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dvi.core.graph_passes import FROM_SHAPES, noted, own_memory, simplify
from pyro_dvi.errors import UnsupportedError

_RECORDING = ContextVar("recording", default=False)
_CALLERS = ("pyro_dvi.objectives.recorded_step", "pyro_dvi.predictive.predictor")  # who opens the block
_LOOKING = ContextVar("looking", default=False)
_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def is_looking() -> bool:
    """Return whether an ordinary step is taken to see whether recorded ones still stand for it."""
    return _LOOKING.get()


def is_recording() -> bool:
    """Return whether operators are being recorded; what is not to be replayed must not look at values then."""
    return _RECORDING.get()


def recording() -> AbstractContextManager[None]:
    """Let :func:`is_recording` be true."""
    return _set(_RECORDING)


def looking() -> AbstractContextManager[None]:
    """Let :func:`is_looking` be true."""
    return _set(_LOOKING)


@contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


class Watch(TorchDispatchMode):
    """Sees every call of an operator, without importing the compiler of torch, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Watch):
    """Record what runs in its block; use within :func:`recording`.

    Args:
        inputs: tensors in whose place a replay has others, or other values.

    Attributes:
        found: tensors that the block has found elsewhere, with their versions; the graph holds as long as these stay.
        coarsest: rounding error of the coarsest dtype that was met.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, int]] = []
        self.coarsest = 0.0
        self._problem: str | None = None
        self._graph = fx.Graph()
        self._held: dict[str, Tensor] = {}
        self._nodes: Any = WeakIdKeyDictionary()
        self._varying: set[fx.Node] = set()  # what depends on inputs or random numbers
        self._written: set[int] = set()  # memory that operators write to
        self._stirred: set[int] = set()  # memory that they write what varies to, as through a view
        self._memories: dict[int, int] = {}  # numbers of memory, by the address where it is now
        self._numbers = count()
        for i, value in enumerate(inputs):
            self._nodes[value] = node = self._graph.placeholder(f"input_{i}")
            self._varying.add(node)
            self._note(node, value, {_address(value)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node_args, node_kwargs = tree_map_only(Tensor, self._node, (args, kwargs))
        addresses = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        if func in _ALIASES:
            self._nodes[result] = node_args[0]
            return result
        given = [leaf for leaf in tree_leaves((node_args, node_kwargs)) if isinstance(leaf, fx.Node)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        reached = {self._memories.get(address) for address in addresses}
        varying = not (self._varying.isdisjoint(given) and self._stirred.isdisjoint(reached))
        varies = random or (func not in FROM_SHAPES and varying)
        self._look_for_problems(func, args, kwargs, varies)
        if torch.Tag.data_dependent_output in func.tags:
            return result  # a number, which depends on constants only
        if func is torch.ops.aten.lift_fresh.default:
            node = self._graph.call_function(torch.ops.aten.clone.default, node_args)
        else:
            node = self._graph.call_function(func, node_args, node_kwargs)
        written = _written(func, args, kwargs)
        self._written |= {self._memories[_address(tensor)] for tensor in written}
        if varies:
            self._stirred |= {self._memories[_address(tensor)] for tensor in written}
            self._varying.update([node, *map(self._node, written)])
        self._note(node, result, given=addresses)
        return result

    def writes(self, tensor: Tensor) -> bool:
        """Return whether the block has written to a tensor, or one that shares its memory."""
        return self._memories.get(_address(tensor)) in self._written

    def look(self, values: Any) -> None:
        """Note that Python reads values without an operator."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        if self._problem is None and any(self._nodes.get(tensor) in self._varying for tensor in tensors):
            self._problem = f"Python reads a value{_place()}"

    def module(self, results: Sequence[Tensor], owned: Sequence[Tensor] = ()) -> fx.GraphModule:
        """Return the graph as a module, from inputs to a list of results.

        Args:
            results: tensors of the block.
            owned: further ones, which share their memory with no tensor that is there afterwards.

        Raises:
            UnsupportedError: a replay would not do what the block has done.
        """
        if any(self._memories[_address(tensor)] in self._written for tensor in self._held.values()):
            self._problem = self._problem or "it writes to a tensor that belongs to no module"
        if self._problem is not None:
            raise UnsupportedError(self._problem)
        self._graph.output([self._node(result) for result in (*results, *owned)])
        simplify(self._graph, self._written, self._hold)
        own_memory(self._graph, len(results))
        return fx.GraphModule(self._held, self._graph)

    def _note(self, node: fx.Node, result: Any, given: Container[int] = ()) -> None:
        """Note a result of a node, or each of several, and whether its memory is that of an argument."""
        if isinstance(result, Tensor):
            address = _address(result)
            if address not in given or address not in self._memories:  # new memory, if at an old address
                self._memories[address] = next(self._numbers)
            node.meta["memory"] = {self._memories[address]}
            noted(node, result, node in self._varying)
            self._nodes[result] = node
            if result.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
            return
        node.meta["memory"] = set()
        for i, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
            if isinstance(part, Tensor):
                item = self._graph.call_function(operator.getitem, (node, i))
                if node in self._varying:
                    self._varying.add(item)
                self._note(item, part, given)
                node.meta["memory"] |= item.meta["memory"]

    def _node(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._nodes:
            self._nodes[tensor] = self._hold(tensor)
            if not tensor.is_inference():
                self.found.append((tensor.detach(), tensor._version))
        node: fx.Node = self._nodes[tensor]
        return node

    def _hold(self, tensor: Tensor) -> fx.Node:
        name = f"constant_{len(self._held)}"
        self._held[name] = tensor.detach()
        node = self._graph.get_attr(name)
        self._note(node, tensor, {_address(tensor)})
        return node

    def _look_for_problems(self, func: Any, args: Any, kwargs: dict[str, Any], varies: bool) -> None:
        """Note the first thing that cannot be replayed; an exception might be caught by the block."""
        if self._problem is not None:
            return
        if kwargs.get("generator") is not None:
            self._problem = f"it draws from a generator of its own{_place()}"
        elif varies and torch.Tag.data_dependent_output in func.tags:
            self._problem = f"Python reads a value{_place()}"
        elif varies and torch.Tag.dynamic_output_shape in func.tags and self._chooses(func, args):
            self._problem = f"a shape depends on values{_place()}"

    def _chooses(self, func: Any, args: Any) -> bool:
        """Return whether an operator chooses elements by values that vary."""
        if func is not torch.ops.aten.index.Tensor:
            return True
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return any(self._node(mask) in self._varying for mask in masks)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    expected = func._schema.arguments
    named = {a.name: value for a, value in zip(expected, args, strict=False)} | kwargs
    found = [named.get(a.name) for a in expected if a.alias_info and a.alias_info.is_write]
    if "batch_norm" in func.name() and named.get("training", named.get("train", True)):  # undeclared
        found += [named.get("running_mean"), named.get("running_var")]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _place() -> str:
    """Name the line that is running: the innermost of the user's within the block, or else of the library's."""
    place, frame = "", sys._getframe(3)
    while frame.f_back and not frame.f_globals.get("__name__", "").startswith(_CALLERS):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "pyro") and (package != "pyro_dvi" or not place):
            path, number = frame.f_code.co_filename, frame.f_lineno
            place = f" in {Path(path).name}, line {number}: {linecache.getline(path, number).strip()}"
            if package != "pyro_dvi":
                break
        frame = frame.f_back
    return place
