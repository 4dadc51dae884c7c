# SPDX-License-Identifier: Apache-2.0
"""An objective whose training steps are recorded once, and then replayed without Python."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.batches import is_strided
from pyro_dvi.core.recorder import looking
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.curvature.linearisation import twice_differentiated
from pyro_dvi.errors import UnsupportedError, warn
from pyro_dvi.objectives.objective import Objective, WrappedObjective
from pyro_dvi.objectives.reachable import Entry, is_plain
from pyro_dvi.objectives.recorded_step import KINDS, Handed, Outcome, RecordedStep, State, VoidReplayError
from pyro_dvi.objectives.recordings import Recording
from pyro_dvi.objectives.surroundings import Met, Surroundings, meta, stored
from pyro_dvi.runs.posterior_run import Call

_ATTEMPTS = 3  # failed recordings before capture is abandoned
_KINDS_OF_STEPS = 100  # number of kinds of steps after which capture is abandoned, because no kind recurs
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_STEPS = (
    Objective.loss_and_grads,
    Objective.differentiable_loss,
)  # a subclass that overrides these methods takes ordinary steps
_REPLAY_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)


class Captured(WrappedObjective):
    r"""An objective whose training steps run without Python, as graphs of torch operators.

    .. math:: (\text{parameters}, \text{buffers}, \text{batch}, \beta) \mapsto
        (\mathrm{loss}, \nabla\,\mathrm{loss})

    It is used like the wrapped objective: in ``SVI``, as ``elbo(model, guide)``, and in ``fit``. The first steps are
    ordinary steps. Then a step is recorded below autograd, including its backward pass, and later steps replay the
    recording without calling model or guide. Parameters, buffers, batch and KL weight are inputs of the recording.
    Steps that differ in the shapes of the batch, the mode of the model, the dtype or the device have separate
    recordings.

    Status: exact. Before a recording is used, a replay is compared with an ordinary step at other parameters and, if
    available, on another batch. Loss, gradients, buffers and random states must be bitwise equal. On accelerators,
    where sums have no fixed order, and for compiled recordings, they must be equal up to rounding. The comparison is
    repeated after 1, 2, 4, 8, ... steps, later every 1000 steps, and whenever a parameter is replaced.

    Everything that the Python code of model and guide can reach is monitored in each step: attributes, globals,
    closures, entries of lists and dictionaries, hooks, priors. Between comparisons, the following changes are not
    detected: changes outside Python objects, such as in clocks, files and printed output; changes in containers and
    arrays with more than 1000 entries; changes inside objects of other libraries; changed attributes of tensors; and
    replaced code.

    A model cannot be replayed if it reads values (``.item()``, ``if x.sum() > 0``), draws random numbers outside torch,
    or keeps state between steps outside its buffers. Such a model takes ordinary steps, and one warning states the
    reason. Steps inside a Pyro handler are also ordinary steps.

    Args:
        elbo: an objective of this library.
        after: number of ordinary steps of each kind before a step of this kind is recorded.
        max_recordings: largest number of kinds of steps to record; steps of other kinds are ordinary steps.
        compile: True to compile recordings with Inductor, torch's compiler, which takes seconds to minutes per kind of
            step. Random numbers are still drawn by torch.

    Attributes:
        elbo: the wrapped objective; its attributes are also attributes of the wrapper.

    Raises:
        ArgumentError: if the objective is not from this library.
        NonFiniteError: if the loss is not finite; the message contains the diagnosis of the objective.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_dvi import MeanFieldGuide, TaylorELBO
        >>> from pyro_dvi.optim import Adam
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> guide, elbo = MeanFieldGuide(model), Captured(TaylorELBO())
        >>> svi = SVI(model, guide, Adam({"lr": 0.05}), loss=elbo)
        >>> losses = [svi.step(x, 2 * x) for _ in range(300)]
        >>> bool(abs(guide.median()["w"] - 2) < 0.1), elbo.step, len(elbo.recordings)
        (True, 300, 1)
    """

    elbo: Objective
    _own = ("elbo", "after", "max_recordings", "compile")

    def __init__(
        self, elbo: Objective, *, after: int = 4, max_recordings: int = 8, compile: bool = False
    ) -> None:
        check_choice("elbo", elbo, Objective, "TaylorELBO()")
        check_count("after", after)
        check_count("max_recordings", max_recordings)
        vars(self).update(elbo=elbo, after=after, max_recordings=max_recordings, compile=compile)
        self._forget()

    def _forget(self) -> None:
        self._recordings: list[Recording] = []
        self._ordinary_steps: Counter[Any] = Counter()
        self._met: dict[Any, Surroundings] = {}
        self._to_meet: Any = None
        self._last_weight: tuple[Any, Any] = (None, None)
        self._slower: set[Any] = set()  # kinds of steps whose replays take longer than ordinary steps
        self._varied: set[Any] = set()  # kinds of steps in which an assumption has failed
        self._failures = 0
        self._given_up = (type(self.elbo).loss_and_grads, type(self.elbo).differentiable_loss) != _STEPS

    @property
    def recordings(self) -> list[RecordedStep]:
        """The recorded steps, one of each kind; the attribute ``operators`` of a step is its graph."""
        return [recording.step for recording in self._recordings]

    # Interface of the wrapped objective ---------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and files; it contains no recordings."""
        return {name: vars(self)[name] for name in self._own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss as a tensor to call ``backward`` on; counts a training step if gradients are recorded."""
        call = Call(model, guide, args, kwargs)
        outcome = self._taken(call)
        if outcome is None:
            with self._meeting(call):
                return self.elbo.differentiable_loss(model, guide, *args, **kwargs)
        loss: Tensor = Handed.apply(outcome.terms["loss"], outcome.gradients, *outcome.leaves)  # type: ignore[no-untyped-call]
        self.elbo.returned(loss, guide)
        return loss

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Accumulate gradients and return the loss, as ``SVI.step`` expects."""
        call = Call(model, guide, args, kwargs)
        outcome = self._taken(call)
        if outcome is None:
            with self._meeting(call):
                return self.elbo.loss_and_grads(model, guide, *args, **kwargs)
        outcome.hand_over()
        return outcome.value

    # A step -------------------------------------------------------------------------------------------------------

    def _taken(self, call: Call) -> Outcome | None:
        """Record, compare or replay a step; return None if an ordinary step must be taken."""
        if self._given_up or not torch.is_grad_enabled() or not all(map(_sees_parameters_only, _PYRO_STACK)):
            return None
        try:
            batch, key = self._key(call)
            recording, tensors = self._find(key, batch)
            if recording is None and not self._is_time(key):
                return None
            with self.elbo.training_step(call.guide):
                if recording is None:
                    outcome = self._recorded(call, key, batch)
                elif recording.is_due(tensors, batch):
                    outcome = self._compared(recording, call, tensors, batch)
                else:
                    outcome = self._replayed(recording, call, tensors, batch)
        except _Ordinary:
            return None
        except UnsupportedError as error:
            self._fail(str(error))
            return None
        return outcome

    def _is_time(self, key: Any) -> bool:
        """Count an ordinary step; return True if the next step of its kind should be recorded."""
        if len(self._recordings) == self.max_recordings or key in self._slower:
            return False
        self._ordinary_steps[key] += 1
        if len(self._ordinary_steps) > _KINDS_OF_STEPS:
            if not self._recordings:
                self._give_up("arguments or functions are different in each step")
            self._ordinary_steps.clear()
            self._met.clear()
        if self._ordinary_steps[key] < self.after:
            return False
        if key not in self._met:
            self._to_meet = key
        return key in self._met

    def _key(self, call: Call) -> tuple[list[Tensor], Any]:
        """Return the tensors among the arguments, and a key of everything else that determines a step's operators."""
        if not call.kwargs and all(type(value) is Tensor for value in call.args):
            batch, rest = list(call.args), None
        else:
            leaves, structure = tree_flatten((call.args, call.kwargs))
            batch = [leaf for leaf in leaves if type(leaf) is Tensor]
            others = [leaf for leaf in leaves if type(leaf) is not Tensor]
            strange = next((type(leaf).__name__ for leaf in others if not isinstance(leaf, _PLAIN)), None)
            if strange is not None:
                raise UnsupportedError(f"arguments of type {strange} cannot be recorded")
            rest = (structure, tuple(map(repr, others)))
        if not all(map(is_strided, batch)):
            raise UnsupportedError("sparse and nested tensors as arguments cannot be recorded")
        casts = tuple(torch.get_autocast_dtype(kind) for kind in KINDS if torch.is_autocast_enabled(kind))
        metas = tuple(map(meta, batch))
        who = _identity(call.model), _identity(call.guide), _repetitions(batch)
        return batch, (who, metas, rest, casts, torch.get_default_dtype(), self.elbo.recorded_for(call.guide))

    def _find(self, key: Any, batch: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return the recording for a step (None if there is none), and the tensors of its surroundings."""
        for recording in self._recordings:
            tensors = recording.tensors_for(key, batch)
            if tensors is not None:
                return recording, tensors
        return None, []

    def _recorded(self, call: Call, key: Any, batch: list[Tensor]) -> Outcome:
        surroundings = self._met.pop(key)
        tensors = surroundings.tensors()
        if tensors is None:
            raise UnsupportedError("a tensor is removed or replaced in each step")
        if (change := surroundings.changed()) is not None:
            raise UnsupportedError(change)
        inputs = [*tensors, *batch]
        state, metas = State(inputs, python=True), [meta(tensor) for tensor in tensors]
        try:
            kl_weight, assuming = self._kl_weight(tensors), key not in self._varied
            step = RecordedStep(self.elbo, call, inputs, kl_weight, assuming=assuming, compiled=self.compile)
            if not math.isfinite(step.outcome.value):
                raise _Ordinary
        except Exception as error:
            state.restore()
            if isinstance(error, _Ordinary):
                raise
            raise UnsupportedError(str(error)) from error
        outcome = step.outcome
        del step.outcome  # frees its gradients
        self.elbo.keep(outcome.terms, self.elbo.current_kl_weight())
        if (problem := step.problem or surroundings.moved(tensors)) is not None:
            self._fail(problem)
        else:
            owners, identities = (call.model, call.guide), list(map(id, batch))
            self._recordings.append(Recording(owners, key, surroundings, metas, step, tensors, identities))
        return outcome

    @contextmanager
    def _meeting(self, call: Call) -> Iterator[None]:
        """Collect the surroundings of an ordinary step, if the next step of its kind will be recorded."""
        key, self._to_meet = self._to_meet, None
        if key is None:
            yield
            return
        with Met() as met:
            yield
        self._met[key] = Surroundings(met, (call.model, call.guide), self._settings())

    def _ordinary(self, call: Call) -> tuple[Outcome, Met]:
        with twice_differentiated(), looking(), Met() as met:
            loss = self.elbo.total(call, training=True)
            outcome = Outcome.of(self.elbo, call, {**self.elbo.terms, "loss": loss}, leaves_of([loss]))
        return outcome, met

    def _compared(
        self, recording: Recording, call: Call, tensors: list[Tensor], batch: list[Tensor]
    ) -> Outcome:
        """Take an ordinary step, and drop the recording if its replay gives a different result."""
        inputs, kl_weight = [*tensors, *batch], self._kl_weight(tensors)
        trials, problem, state = [], None, State(inputs, python=True)
        try:
            trials = recording.step.trials(inputs, kl_weight)
        except VoidReplayError:
            self._void(recording)
        except _REPLAY_ERRORS as error:
            problem = f"a replay fails: {error}"
        start = time.thread_time()
        outcome, met = self._ordinary(call)
        if not math.isfinite(outcome.value):
            state.restore()
            raise _Ordinary
        if recording not in self._recordings:
            return outcome
        recording.seconds += [(trial.seconds, time.thread_time() - start) for trial in trials[:1]]
        surroundings = recording.surroundings
        for trial in trials:
            problem = problem or trial.disagreement(outcome, inputs)
        problem = problem or surroundings.moved(tensors)
        if met.names.keys() - set(surroundings.names):
            problem = "a new parameter appears"
        recording.trust(tensors, batch)
        if problem is not None or recording.is_slower():
            self._recordings.remove(recording)
        if problem is not None:
            self._fail(problem)
        elif recording not in self._recordings:
            self._slower.add(recording.key)
        return outcome

    def _replayed(
        self, recording: Recording, call: Call, tensors: list[Tensor], batch: list[Tensor]
    ) -> Outcome:
        inputs = [*tensors, *batch]
        state = recording.step.state(inputs)
        try:
            outcome = recording.step.replay(inputs, self._kl_weight(tensors))
            if not math.isfinite(outcome.value):
                raise _Ordinary  # an ordinary step then raises the error with its diagnosis
        except (*_REPLAY_ERRORS, _Ordinary) as error:  # for example, a label is out of range
            if state is not None:
                state.restore()
            if recording.step.assumes and isinstance(error, VoidReplayError):
                self._void(recording)
            raise _Ordinary from error
        self.elbo.keep(outcome.terms, self.elbo.current_kl_weight())
        self.elbo.leave_with(call.guide, outcome.left)
        _announce(recording.surroundings.names)
        return outcome

    def _void(self, recording: Recording) -> None:
        """Drop a recording whose assumptions fail; the next recording of this kind of step makes no assumptions."""
        self._recordings.remove(recording)
        self._varied.add(recording.key)

    def _kl_weight(self, tensors: list[Tensor]) -> Tensor:
        device = tensors[0].device if tensors else torch.device("cpu")
        known = (self.elbo.current_kl_weight(), device)
        if known != self._last_weight[0]:
            self._last_weight = known, torch.tensor(known[0], dtype=widest(device), device=device)
        return self._last_weight[1]

    def _settings(self) -> Iterator[Entry]:
        """Yield the attributes of the objective, and the plain values of its parts."""
        own = vars(self.elbo)
        for name in own.keys() - {"_step", "kl_weight", "terms"}:
            yield own.get, name, own[name], name
            if type(own[name]).__module__.startswith("pyro_dvi."):
                inside = getattr(own[name], "__dict__", {})
                yield from ((inside.get, n, v, f"{name}.{n}") for n, v in inside.items() if is_plain(v))

    def _fail(self, reason: str) -> None:
        self._failures += 1
        self._met.clear()
        if self._failures == _ATTEMPTS:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        warn(f"training steps are not captured, and ordinary steps are taken instead: {reason}")


class _Ordinary(Exception):  # noqa: N818 (not an error)
    """Signals that an ordinary step must be taken."""


def _identity(function: Any) -> tuple[int, Any]:
    """Return a key that is equal for two accesses of the same bound method."""
    return id(getattr(function, "__self__", function)), getattr(function, "__func__", None)


def _repetitions(batch: list[Tensor]) -> tuple[int, ...]:
    """Return the position of each tensor's first occurrence, because a recording merges repeated tensors."""
    identities = list(map(id, batch))
    return tuple(map(identities.index, identities))


def _sees_parameters_only(handler: Any) -> bool:
    return isinstance(handler, TraceMessenger) and bool(handler.param_only)


def _announce(names: Iterable[str]) -> None:
    """Report the parameters of a step to the active handlers, such as the one that SVI uses."""
    handlers: list[Any] = _PYRO_STACK  # all of them record only parameters
    for name in names if handlers else ():
        parameter: Any = stored(name)
        if not hasattr(parameter, "unconstrained"):
            parameter.unconstrained = weakref.ref(parameter)
        for handler in handlers:
            handler.trace.add_node(name, name=name, type="param", value=parameter)
