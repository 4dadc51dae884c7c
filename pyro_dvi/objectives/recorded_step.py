# SPDX-License-Identifier: Apache-2.0
"""A training step as a graph of operators: recording, replay, and comparison with an ordinary step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.batches import is_strided
from pyro_dvi.core.graph_passes import quickly_called
from pyro_dvi.core.reads import Reads
from pyro_dvi.core.recorder import Recorder, draws
from pyro_dvi.core.undisturbed import accelerators, forked, state_of
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.objectives.checks import Checks
from pyro_dvi.runs.posterior_run import Call

if TYPE_CHECKING:
    from pyro_dvi.objectives.objective import Objective

_TENSOR = object()
KINDS = ("cpu", "cuda", "xpu", "mps")  # device types of autocast


class VoidReplayError(ValueError):
    """Raised if a condition fails in a replay, for example if a label is outside the support of its distribution."""


class Weight:
    """A scalar input of a recording; like a Python number, it takes the dtype of the tensor that it multiplies."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __mul__(self, other: Tensor) -> Tensor:
        return self.value.to(other.dtype) * other

    __rmul__ = __mul__


@dataclass
class Outcome:
    """The result of a training step.

    Attributes:
        terms: terms of the loss, including the loss itself.
        leaves: tensors that may have gradients.
        gradients: gradients of the loss with respect to the leaves; None for leaves that the loss does not depend on.
        left: what the objective stores in the guide.
    """

    terms: dict[str, Tensor]
    leaves: list[Tensor]
    gradients: list[Tensor | None]
    left: Any

    @classmethod
    def of(cls, objective: Objective, call: Call, terms: dict[str, Tensor], leaves: list[Tensor]) -> Outcome:
        """Differentiate a loss, and return the outcome."""
        hooks = [leaf._backward_hooks for leaf in leaves]
        try:
            for leaf in leaves:  # hooks run later, when the gradient is handed over
                leaf._backward_hooks = None
            gradients = torch.autograd.grad(terms["loss"], leaves, allow_unused=True)
        finally:
            for leaf, own in zip(leaves, hooks, strict=True):
                leaf._backward_hooks = own
        terms = {name: term.detach() for name, term in terms.items() if name != "kl_weight"}
        return cls(terms, leaves, _apart(gradients, leaves), objective.left_with(call.guide))

    @cached_property
    def value(self) -> float:
        """The loss as a float."""
        return self.terms["loss"].item()

    def hand_over(self) -> None:
        """Add the gradients to those of the leaves, as a backward pass does."""
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            if gradient is None:
                continue
            if leaf.grad is None and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks:
                leaf.grad = gradient
            else:
                leaf.backward(gradient)


class Handed(Function):
    """A loss whose gradients have already been computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()  # a copy, because the caller may change it in place

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True is not supported with Captured and DataParallel: use the objective alone"
            )
        return (None, None, *(None if g is None else out.to(g) * g for g in ctx.gradients))


class RecordedStep:
    """A step as a graph from parameters, buffers and a batch to the loss, its terms and its gradients.

    Args:
        objective: objective of the step.
        call: model and guide with the batch for recording. Recording also takes the step.
        inputs: tensors of the step that a replay may replace by others.
        kl_weight: the KL weight, which is also an input.
        assuming: True to let the graph rely on conditions that hold in this step, which shortens the computation.
        compiled: True to compile the graph.

    Attributes:
        outcome: outcome of the step that was recorded.
        operators: the graph.
        assumes: True if the graph relies on conditions; a replay in which they fail is void.
        problem: why the step cannot be replayed; None if it can be. The step was taken in either case.
        found: tensors that the step uses but that are not inputs, with their versions; if one of them changes, the
            recording becomes invalid.
    """

    def __init__(
        self,
        objective: Objective,
        call: Call,
        inputs: list[Tensor],
        kl_weight: Tensor,
        *,
        assuming: bool = True,
        compiled: bool = False,
    ) -> None:
        self._leaves = [k for k, t in enumerate(inputs) if t.requires_grad and t.is_leaf]
        drawn = python_generators()
        recorder = Recorder([*inputs, kl_weight], assuming=assuming)
        torch.clear_autocast_cache()  # otherwise, earlier casts would become constants
        checks = Checks()
        with pyro.validation_enabled(0), checks, recorder, Reads(recorder):  # type: ignore[arg-type] # see Checks
            with torch.enable_grad():
                terms = objective.averaged(call, Weight(kl_weight), True)
            leaves = [inputs[k] for k in self._leaves]
            unknown = [leaf for leaf in leaves_of([terms["loss"]]) if not any(leaf is one for one in leaves)]
            self.outcome = Outcome.of(objective, call, terms, [*leaves, *unknown])
            # The scalars of a model may be on the CPU even if its data are on another device.
            conditions = [c.to(kl_weight.device) for c in (*(recorder.assumptions or []), *checks.passed)]
            holds = torch.stack(conditions).all() if conditions else torch.ones((), dtype=torch.bool)
        self.problem = None
        if unknown:
            self.problem = "the loss has a gradient with respect to a tensor that belongs to no module"
        elif repr(drawn) != repr(python_generators()):
            self.problem = "the step draws random numbers outside torch"
        elif any(map(recorder.writes, leaves)):
            self.problem = "the step writes to a parameter"
        elif not all(g is None or is_strided(g) for g in self.outcome.gradients):
            self.problem = "a gradient is sparse"
        left, self._structure = tree_flatten(self.outcome.left)
        self.assumes = bool(recorder.assumptions)
        self._left = [_TENSOR if isinstance(value, Tensor) else value for value in left]
        self._names = list(terms)
        self._has_gradient = [gradient is not None for gradient in self.outcome.gradients]
        results = [holds, *self.outcome.terms.values()]
        results += [value for value in left if isinstance(value, Tensor)]
        gradients = [gradient for gradient in self.outcome.gradients if gradient is not None]
        try:
            self.operators = recorder.module(results, [] if self.problem else gradients)
        except UnsupportedError as error:
            self.problem = self.problem or str(error)
        except SyntaxError:  # in the generated code of the graph
            self.problem = self.problem or "an argument of a torch operator cannot be stored in a graph"
        if self.problem is not None:
            return
        self.found = recorder.found
        self._draws = any(map(draws, self.operators.graph.nodes))
        self._written = {k for k, tensor in enumerate(inputs) if recorder.writes(tensor)}
        self._rounding = recorder.coarsest**0.5
        self._casting = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
        self._ways: list[Any] = [fx.GraphModule(self.operators, quickly_called(self.operators.graph)).forward]
        if compiled:  # the compiled graph comes first, because replays use the first way
            with self._operators_only():
                self._ways.insert(0, _compiled(self.operators, [*inputs, kl_weight]))

    @contextmanager
    def _operators_only(self) -> Iterator[None]:
        """Disable gradients and autocast, because the graph already contains gradients and casts."""
        with ExitStack() as without:
            without.enter_context(torch.no_grad())
            for kind in self._casting:
                without.enter_context(torch.autocast(kind, enabled=False))
            yield

    def replay(self, inputs: list[Tensor], kl_weight: Tensor, way: int = 0) -> Outcome:
        """Take a step with other inputs; it changes buffers and random states as the recorded step did."""
        with self._operators_only():
            holds, *found = self._ways[way](*inputs, kl_weight)
        if not holds:
            raise VoidReplayError
        results = iter(found)
        terms = {name: next(results) for name in self._names}
        left = [next(results) if value is _TENSOR else value for value in self._left]
        gradients = [next(results) if has else None for has in self._has_gradient]
        return Outcome(
            terms, [inputs[k] for k in self._leaves], gradients, tree_unflatten(left, self._structure)
        )

    def state(self, inputs: list[Tensor]) -> State | None:
        """Return the state that a replay changes; None if it changes nothing."""
        written = [inputs[k] for k in self._written]
        return State(written) if written or self._draws else None

    def trials(self, inputs: list[Tensor], kl_weight: Tensor) -> list[Trial]:
        """Replay on copies of buffers, with the compiled and the plain graph, and restore random states."""
        found = []
        for way in range(len(self._ways)):
            copies = [t.clone() if k in self._written else t for k, t in enumerate(inputs)]
            with forked(*accelerators()):
                start = time.thread_time()
                outcome = self.replay(copies, kl_weight, way)
                seconds = time.thread_time() - start
                rounding = self._rounding if way < len(self._ways) - 1 else 0.0
                versions = [tensor._version for tensor in copies]
                found.append(Trial(outcome, copies, versions, _random_states(), rounding, seconds))
        return found


@dataclass
class Trial:
    """A replay that will be compared with an ordinary step from the same state.

    Attributes:
        outcome: outcome of the replay.
        inputs: inputs after the replay; inputs that the replay writes to are copies.
        versions: versions of these inputs.
        random_states: random states after the replay.
        rounding: relative error that is allowed, because the compiler may have fused operators.
        seconds: duration of the replay.
    """

    outcome: Outcome
    inputs: list[Tensor]
    versions: list[int]
    random_states: list[Tensor]
    rounding: float
    seconds: float

    def disagreement(self, ordinary: Outcome, inputs: list[Tensor]) -> str | None:
        """Return how the replay differs from an ordinary step, which has changed ``inputs``; None if it does not."""
        mine, known = self.outcome, {id(leaf) for leaf in self.outcome.leaves}
        if any(id(leaf) not in known for leaf in ordinary.leaves):
            return "a new parameter appears"
        versions = zip(self.inputs, inputs, self.versions, strict=True)
        if any(a is b and a._version != version for a, b, version in versions):
            return "a buffer differs in a replay"
        by_leaf = {id(leaf): g for leaf, g in zip(ordinary.leaves, ordinary.gradients, strict=True)}
        gradients = [by_leaf.get(id(leaf)) for leaf in mine.leaves]
        pairs = [
            *((name, mine.terms.get(name), term) for name, term in ordinary.terms.items()),
            *(("a gradient", a, b) for a, b in zip(mine.gradients, gradients, strict=True)),
            *(("a buffer", a, b) for a, b in zip(self.inputs, inputs, strict=True)),
            *(("the random state", a, b) for a, b in zip(self.random_states, _random_states(), strict=True)),
        ]
        left, structure = tree_flatten(mine.left)
        again, other = tree_flatten(ordinary.left)
        if structure != other:
            return "measurements differ in a replay"
        pairs += [("a measurement", a, b) for a, b in zip(left, again, strict=True)]
        sizes = [float(g.detach().norm()) for g in (*gradients, *ordinary.terms.values()) if g is not None]
        differs = (what for what, a, b in pairs if not _agree(a, b, self.rounding, max(sizes)))
        return next((f"{what} differs in a replay" for what in differs), None)


class State:
    """The state that a step changes, except parameters; it is restored if the step fails.

    Args:
        inputs: tensors of the step, including all that it may write to.
        python: True if the step may draw from the generators of Python and NumPy.
    """

    def __init__(self, inputs: Sequence[Tensor], python: bool = False) -> None:
        self._tensors = [(t, t.clone()) for t in inputs if not t.requires_grad]
        self._random = _random_states()
        self._python = python_generators() if python else None

    def restore(self) -> None:
        """Restore the state."""
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
        for device, state in zip(_devices(), self._random, strict=True):
            state_of(device)[1](state)
        if self._python is not None:
            random.setstate(self._python[0])
            np.random.set_state(self._python[1])


def _apart(gradients: Sequence[Tensor | None], leaves: list[Tensor]) -> list[Tensor | None]:
    """Return gradients as a backward pass stores them: each in its own memory, with the memory layout of its leaf."""
    found: list[Tensor | None] = []
    memories: set[int] = set()
    for gradient, leaf in zip(gradients, leaves, strict=True):
        if gradient is not None and is_strided(gradient):
            memory = gradient.untyped_storage()._cdata
            if memory in memories or gradient.stride() != leaf.stride():
                gradient = torch.empty_like(leaf).copy_(gradient)  # noqa: PLW2901
            memories.add(memory)
        found.append(gradient)
    return found


def python_generators() -> tuple[Any, Any]:
    """Return the states of the generators of Python and NumPy."""
    return random.getstate(), np.random.get_state(legacy=True)


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *accelerators()]


def _random_states() -> list[Tensor]:
    return [state_of(device)[0]() for device in _devices()]


def _agree(one: Any, other: Any, rounding: float, largest: float) -> bool:
    """Return True if two results are equal: bitwise on the CPU, or up to rounding where sums have no fixed order.

    Args:
        one: a result.
        other: the other result.
        rounding: relative error that is allowed even on the CPU.
        largest: norm of the largest gradient or term; results that are tiny relative to it may be rounding errors.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or (one.device.type == "cpu" and not rounding):
        return torch.equal(one, other)
    one, other, eps = one.detach(), other.detach(), torch.finfo(one.dtype).eps
    error, size = float((one - other).norm()), float(other.norm())
    return error <= max(rounding, eps**0.5) * size + 10 * eps * largest


def _compiled(operators: fx.GraphModule, inputs: list[Any]) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph with Inductor; TorchDynamo is not needed, because a graph contains no Python code."""
    from torch import _inductor  # takes seconds to import

    graphs = any(value.is_cuda for value in inputs)
    options = {"fallback_random": True, "triton.cudagraphs": graphs}  # random numbers are drawn by torch
    run = _inductor.compile(operators, inputs, options)
    if not graphs:
        return run
    return lambda *arguments: [result.clone() for result in run(*arguments)]  # the next step overwrites them
