# SPDX-License-Identifier: Apache-2.0
"""A training step as a graph of operators: recording and replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.batches import is_strided
from pyro_dvi.core.graph_passes import called_quickly
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.core.launch import LAUNCHING, Launch
from pyro_dvi.core.reads import Reads
from pyro_dvi.core.recorder import Recorder, draws
from pyro_dvi.core.undisturbed import accelerators, state_of
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.objectives.checks import Checks
from pyro_dvi.runs.posterior_run import Call

if TYPE_CHECKING:
    from pyro_dvi.objectives.objective import Objective

_TENSOR = object()
_OF_LAUNCH = "_pyro_dvi_is_of_launch"  # attribute of gradients at fixed addresses
KINDS = ("cpu", "cuda", "xpu", "mps")  # device types of autocast


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
        record: what the objective stores in the guide.
        report: for a replay, whether all its conditions hold, and the terms, in one tensor.
        is_fixed: True if the next launch overwrites gradients and record.
        names: names of the parameters that the step takes from Pyro's store.
    """

    terms: dict[str, Tensor]
    leaves: list[Tensor]
    gradients: list[Tensor | None]
    record: Any
    report: Tensor | None = None
    is_fixed: bool = False
    names: list[str] = field(default_factory=list)

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
        return cls(terms, leaves, _apart(gradients, leaves), objective.record_of(call.guide))

    @cached_property
    def _values(self) -> list[float]:
        """The report, read from the device at once."""
        if self.report is None:
            return [1.0, self.terms["loss"].item()]
        found: list[float] = self.report.tolist()
        return found

    @property
    def holds(self) -> bool:
        """False if a condition of a replay has failed."""
        return bool(self._values[0])

    @property
    def value(self) -> float:
        """The loss as a float."""
        return self._values[1]

    def kept(self) -> Outcome:
        """Return an outcome that later launches do not overwrite."""
        if not self.is_fixed:
            return self
        gradients = [None if gradient is None else gradient.clone() for gradient in self.gradients]
        leaves, structure = tree_flatten(self.record)
        record = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return replace(self, gradients=gradients, record=tree_unflatten(record, structure), is_fixed=False)

    def hand_over(self) -> None:
        """Add the gradients to those of the leaves, as a backward pass does."""
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            if gradient is None:
                continue
            if leaf.grad is None and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks:
                leaf.grad = gradient
            else:
                leaf.backward(gradient)


class LossWithGradients(Function):
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

    On CUDA, the graph is launched at once, and its results have fixed addresses. If it cannot be, and on all other
    devices, its operators run one after the other.

    Args:
        objective: objective of the step.
        call: model and guide with the batch for recording. Recording also takes the step.
        inputs: tensors of the step that a replay may replace by others; the batch comes last.
        kl_weight: the KL weight, which is also an input.
        num_fed: number of tensors of the batch.
        assuming: True to let the graph rely on conditions that hold in this step, which shortens the computation.
        pool: memory pool of CUDA graphs.

    Attributes:
        outcome: outcome of the step that was recorded.
        operators: the graph.
        assumes: True if the graph relies on conditions; a replay in which they fail is void.
        problem: why the step cannot be replayed; None if it can be. The step was taken in either case.
        found: tensors that the step uses but that are not inputs; if the version of one of them changes, the recording
            becomes invalid.
        is_launched: True if replays are launches.
        device: the device of the results.
    """

    def __init__(
        self,
        objective: Objective,
        call: Call,
        inputs: list[Tensor],
        kl_weight: Tensor,
        num_fed: int,
        *,
        assuming: bool = True,
        pool: Any = None,
    ) -> None:
        self._leaves = [k for k, t in enumerate(inputs) if t.requires_grad and t.is_leaf]
        drawn = python_generators()
        recorder = Recorder([*inputs, kl_weight], assuming=assuming)
        torch.clear_autocast_cache()  # otherwise, earlier casts would become constants
        checks = Checks()
        with in_turn, pyro.validation_enabled(0), checks, recorder, Reads(recorder):  # type: ignore[arg-type] # see Checks
            with torch.enable_grad():
                terms = objective.averaged(call, Weight(kl_weight), True)
            leaves = [inputs[k] for k in self._leaves]
            unknown = [leaf for leaf in leaves_of([terms["loss"]]) if not any(leaf is one for one in leaves)]
            self.outcome = Outcome.of(objective, call, terms, [*leaves, *unknown])
            # The scalars of a model may be on the CPU even if its data are on another device.
            conditions = [c.to(kl_weight.device) for c in (*(recorder.assumptions or []), *checks.passed)]
            holds = torch.stack(conditions).all() if conditions else torch.ones_like(kl_weight)
            self._names = ["loss", *(name for name in self.outcome.terms if name != "loss")]
            found = [self.outcome.terms[name] for name in self._names]
            report = torch.stack([term.to(terms["loss"]) for term in (holds, *found)])
            self._dtypes = [term.dtype for term in found]
        self.problem = None
        if unknown:
            self.problem = "the loss has a gradient with respect to a tensor that belongs to no module"
        elif repr(drawn) != repr(python_generators()):
            self.problem = "the step draws random numbers outside torch"
        elif any(map(recorder.writes, leaves)):
            self.problem = "the step writes to a parameter"
        elif not all(g is None or is_strided(g) for g in self.outcome.gradients):
            self.problem = "a gradient is sparse"
        record, self._structure = tree_flatten(self.outcome.record)
        self.assumes = bool(recorder.assumptions)
        self._record = [_TENSOR if isinstance(value, Tensor) else value for value in record]
        self._has_gradient = [gradient is not None for gradient in self.outcome.gradients]
        results = [report, *(value for value in record if isinstance(value, Tensor))]
        gradients = [gradient for gradient in self.outcome.gradients if gradient is not None]
        try:
            self.operators = recorder.module(results, [] if self.problem else gradients)
        except UnsupportedError as error:
            self.problem = self.problem or str(error)
        except SyntaxError:  # in the generated code of the graph
            self.problem = self.problem or "an argument of a torch operator cannot be stored in a graph"
        if self.problem is not None:
            return
        self.found = [tensor for tensor, _ in recorder.found]
        self._versions = [version for _, version in recorder.found]
        self._draws = any(map(draws, self.operators.graph.nodes))
        self.written = {k for k, tensor in enumerate(inputs) if recorder.writes(tensor)}
        self._casting = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
        self._run = called_quickly(self.operators)
        self.device, self._fed, self._pool = report.device, range(len(inputs) - num_fed, len(inputs)), pool
        self.is_launched = self.device.type in LAUNCHING
        self._launch: Launch | None = None
        self._fixed_record: Any = None  # of a launch, whose tensors are always the same

    def is_current(self) -> bool:
        """Return True if the other tensors that the step uses are unchanged."""
        return [tensor._version for tensor in self.found] == self._versions

    def _operators_only(self) -> AbstractContextManager[Any]:
        """Disable gradients and autocast, because the graph already contains gradients and casts."""
        if not self._casting:
            return torch.no_grad()
        without = ExitStack()
        without.enter_context(torch.no_grad())
        for kind in self._casting:
            without.enter_context(torch.autocast(kind, enabled=False))
        return without

    def replay(self, inputs: list[Tensor], kl_weight: Tensor) -> Outcome:
        """Take a step with other inputs; it changes buffers and random states as the recorded step did.

        The outcome may state that a condition has failed; the replay is then void.
        """
        with self._operators_only():
            report, *rest = self._results([*inputs, kl_weight])
            is_launched = self.is_launched
            report = report.clone() if is_launched else report
        record = self._fixed_record
        if record is None:
            results = iter(rest)
            leaves = [next(results) if value is _TENSOR else value for value in self._record]
            record = tree_unflatten(leaves, self._structure)
            self._fixed_record = record if is_launched else None
        gradients = iter(rest[len(rest) - sum(self._has_gradient) :])
        _, *terms = report.unbind()
        return Outcome(
            {
                name: term if term.dtype is dtype else term.to(dtype)
                for name, term, dtype in zip(self._names, terms, self._dtypes, strict=True)
            },
            [inputs[k] for k in self._leaves],
            [next(gradients) if has else None for has in self._has_gradient],
            record,
            report,
            is_launched,
        )

    def _results(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        if self.is_launched and (self._launch is None or not self._launch.fits(inputs)):
            self._launch = self._fixed_record = None  # before the next one, so that both do not need memory
            try:
                self._launch = Launch(
                    self.operators, inputs, self._fed, self.written, self.device, self._pool
                )
                for result in self._launch.results:
                    setattr(result, _OF_LAUNCH, True)
            except UnsupportedError:
                self.is_launched = False
        if self._launch is None:
            found: Sequence[Tensor] = self._run(*inputs)
            return found
        # Gradients that the program has kept must not be overwritten; graphs that share a pool share memory, too.
        for k in self._leaves:
            if getattr(inputs[k].grad, _OF_LAUNCH, False):
                inputs[k].grad = inputs[k].grad.clone()  # type: ignore[union-attr]
        return self._launch(inputs)

    def state(self, inputs: list[Tensor]) -> State | None:
        """Return the state that a replay changes; None if it changes nothing."""
        written = [inputs[k] for k in self.written]
        return State(written) if written or self._draws else None


class State:
    """The state that a step changes, except parameters; it is restored if the step fails.

    Args:
        inputs: tensors of the step, including all that it may write to.
        python: True if the step may draw from the generators of Python and NumPy.
    """

    def __init__(self, inputs: Sequence[Tensor], python: bool = False) -> None:
        kinds: dict[Any, list[Tensor]] = {}
        for tensor in inputs:
            if not tensor.requires_grad:
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        # Copies of one kind take a single launch.
        self._copies = [(some, list(map(torch.empty_like, some))) for some in kinds.values()]
        for some, copies in self._copies:
            torch._foreach_copy_(copies, some)
        self._random = random_states()
        self._python = python_generators() if python else None

    def restore(self) -> None:
        """Restore the state."""
        with torch.no_grad():
            for some, copies in self._copies:
                torch._foreach_copy_(some, copies)
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


def random_states() -> list[Tensor]:
    """Return the states of torch's generators."""
    return [state_of(device)[0]() for device in _devices()]
