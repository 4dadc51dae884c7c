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

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.recorder import comparing
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.curvature.linearisation import twice_differentiated
from pyro_dvi.errors import CaptureError, UnsupportedError, warn
from pyro_dvi.objectives.comparison import Trial
from pyro_dvi.objectives.objective import Objective, WrappedObjective
from pyro_dvi.objectives.recorded_step import LossWithGradients, Outcome, RecordedStep, State
from pyro_dvi.objectives.recordings import Recording, key_of
from pyro_dvi.objectives.surroundings import Surroundings, UsedParts, stored
from pyro_dvi.runs.posterior_run import Call

_ATTEMPTS = 3  # failed recordings before capture is abandoned
_KINDS_OF_STEPS = 100  # number of kinds of steps after which capture is abandoned, because no kind recurs
_STEPS = (Objective.loss_and_grads, Objective.differentiable_loss)
_REPLAY_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)


class Captured(WrappedObjective):
    r"""An objective whose training steps run without Python, as graphs of torch operators.

    .. math:: (\text{parameters}, \text{buffers}, \text{batch}, \beta) \mapsto
        (\mathrm{loss}, \nabla\,\mathrm{loss})

    It is used like the wrapped objective: in ``SVI``, as ``elbo(model, guide)``, and in ``fit``. The first steps are
    ordinary steps. Then a step is recorded below autograd, including its backward pass, and later steps replay the
    recording without calling model or guide. Parameters, buffers, batch and KL weight are inputs of the recording.
    Steps that differ in the shapes of the batch, the mode of the model, the dtype or the device have separate
    recordings. On CUDA, a recording is a CUDA graph, which is launched at once.

    *The contract.* A step of the model and guide depends only on its arguments, on parameters, buffers and other
    tensors, on torch's global random generators, and on plain attributes (numbers, strings, tuples, functions), hooks
    and submodules of the modules that it uses. All of these may change between steps. Whatever else the Python code
    reads must stay the same: globals, closures, entries of lists and dictionaries, attributes of other objects,
    clocks and files. The code must not count its own calls, except in buffers: replays do not run it, so even the
    comparisons below see a count that has hardly moved.

    Status: exact under the contract. Before a recording is used, a replay is compared with an ordinary step at other
    parameters and, if available, on another batch. Loss, gradients, buffers and random states must be bitwise equal. On
    accelerators, where sums have no fixed order, they must agree as well as two ordinary steps do. The comparison is
    repeated after 1, 2, 4, 8, ... steps, later every 1000 steps, and whenever a parameter is replaced. If it fails
    after replays were used, the contract is broken, and a :class:`~pyro_dvi.errors.CaptureError` names the first step
    whose result is void.

    A model cannot be replayed if it reads values (``.item()``, ``if x.sum() > 0``), draws random numbers outside torch,
    or keeps state between steps outside its buffers. If the first comparison shows this, the model takes ordinary
    steps, and one warning states the reason. Steps inside a Pyro handler are also ordinary steps.

    Args:
        elbo: an objective of this library.
        after: number of ordinary steps of each kind before a step of this kind is recorded.
        max_recordings: largest number of kinds of steps to record; steps of other kinds are ordinary steps.

    Attributes:
        elbo: the wrapped objective; its attributes are also attributes of the wrapper.

    Raises:
        ArgumentError: if the objective is not from this library.
        CaptureError: if the contract is broken.
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
    _own = ("elbo", "after", "max_recordings")

    def __init__(self, elbo: Objective, *, after: int = 4, max_recordings: int = 8) -> None:
        check_choice("elbo", elbo, Objective, "TaylorELBO()")
        check_count("after", after)
        check_count("max_recordings", max_recordings)
        vars(self).update(elbo=elbo, after=after, max_recordings=max_recordings)
        self._forget()

    def _forget(self) -> None:
        self._recordings: list[Recording] = []
        self._ordinary_steps: Counter[Any] = Counter()
        self._seen: dict[Any, Surroundings] = {}
        self._to_see: Any = None
        self._weights: dict[torch.device, tuple[float, Tensor]] = {}
        self._slower: set[Any] = set()  # kinds of steps whose replays take longer than ordinary steps
        self._varied: set[Any] = set()  # kinds of steps in which an assumption has failed
        self._failures = 0
        self._pool: Any = None  # memory that all CUDA graphs of this objective share
        kind = type(self.elbo)  # a subclass with steps of its own takes ordinary steps
        self._given_up = (kind.loss_and_grads, kind.differentiable_loss) != _STEPS

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
        outcome = self.attempt(call)
        if outcome is None:
            with self.observing(call):
                return self.elbo.differentiable_loss(model, guide, *args, **kwargs)
        gradients = outcome.kept().gradients
        loss: Tensor = LossWithGradients.apply(outcome.terms["loss"], gradients, *outcome.leaves)  # type: ignore[no-untyped-call]
        self.elbo.returned(loss, guide)
        return loss

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Accumulate gradients and return the loss, as ``SVI.step`` expects."""
        call = Call(model, guide, args, kwargs)
        outcome = self.attempt(call)
        if outcome is None:
            with self.observing(call):
                return self.elbo.loss_and_grads(model, guide, *args, **kwargs)
        outcome.hand_over()
        return outcome.value

    # A step -------------------------------------------------------------------------------------------------------

    def attempt(self, call: Call, wait: bool = True) -> Outcome | None:
        """Record, compare or replay a step; return None if an ordinary step must be taken, inside :meth:`observing`.

        Args:
            call: model and guide with their arguments.
            wait: False to return without waiting for the device. The caller must then check that the outcome holds
                and is finite, and repeat the step otherwise.

        Raises:
            CaptureError: if the contract is broken.
        """
        if self._given_up or not torch.is_grad_enabled() or not all(map(_sees_parameters_only, _PYRO_STACK)):
            return None
        try:
            batch, key = key_of(call, self.elbo)
            recording = next((one for one in self._recordings if one.fits(key, batch)), None)
            if recording is None and not self._is_time(key):
                return None
            with self.elbo.training_step(call.guide):
                if recording is None:
                    outcome = self._recorded(call, key, batch)
                elif recording.is_due(batch):
                    outcome = self._compared(recording, call, batch)
                else:
                    outcome = self._replayed(recording, call, batch, wait)
        except _Ordinary:
            return None
        except UnsupportedError as error:
            self._fail(str(error))
            return None
        return outcome

    def doubt(self) -> None:
        """Compare the next replay of each recording, because code has run that may have changed the model."""
        for recording in self._recordings:
            recording.is_doubtful = True

    def _is_time(self, key: Any) -> bool:
        """Count an ordinary step; return True if the next step of its kind should be recorded."""
        if len(self._recordings) == self.max_recordings or key in self._slower:
            return False
        self._ordinary_steps[key] += 1
        if len(self._ordinary_steps) > _KINDS_OF_STEPS:
            if not self._recordings:
                self._give_up("arguments or functions are different in each step")
            self._ordinary_steps.clear()
            self._seen.clear()
        if self._ordinary_steps[key] < self.after:
            return False
        if key not in self._seen:
            self._to_see = key
        return key in self._seen

    def _recorded(self, call: Call, key: Any, batch: list[Tensor]) -> Outcome:
        surroundings = self._seen.pop(key)
        if not surroundings.look():
            raise UnsupportedError(
                surroundings.changed() or "a tensor of a module is removed or replaced in each step"
            )
        inputs = [*surroundings.tensors, *batch]
        state = State(inputs, python=True)
        try:
            kl_weight, assuming = self._kl_weight(_device_of(inputs)), key not in self._varied
            if self._pool is None and kl_weight.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
            step = RecordedStep(
                self.elbo, call, inputs, kl_weight, len(batch), assuming=assuming, pool=self._pool
            )
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
        if (problem := step.problem or surroundings.moved()) is not None:
            self._fail(problem)
        else:
            owners, identities = (call.model, call.guide), list(map(id, batch))
            self._recordings.append(Recording(owners, key, surroundings, step, identities))
        return self._named(outcome, surroundings)

    @contextmanager
    def observing(self, call: Call) -> Iterator[None]:
        """Collect the surroundings of an ordinary step, if the next step of its kind will be recorded."""
        key, self._to_see = self._to_see, None
        if key is None:
            yield
            return
        with UsedParts() as used:
            yield
        self._seen[key] = Surroundings(used, (call.model, call.guide), self.elbo)

    def _ordinary(self, call: Call) -> tuple[Outcome, UsedParts]:
        with twice_differentiated(), comparing(), UsedParts() as used:
            loss = self.elbo.total(call, training=True)
            outcome = Outcome.of(self.elbo, call, {**self.elbo.terms, "loss": loss}, leaves_of([loss]))
        return outcome, used

    def _compared(self, recording: Recording, call: Call, batch: list[Tensor]) -> Outcome:
        """Take an ordinary step, and drop the recording if its replay gives a different result."""
        surroundings, step = recording.surroundings, recording.step
        inputs = [*surroundings.tensors, *batch]
        kl_weight, state = self._kl_weight(step.device), State(inputs, python=True)
        trial, problem = None, None
        try:
            trial = Trial.of(step, inputs, kl_weight)
        except _REPLAY_ERRORS as error:
            problem = f"a replay fails: {error}"
        start = time.thread_time()
        outcome, used = self._ordinary(call)
        seconds = time.thread_time() - start
        if not math.isfinite(outcome.value):
            state.restore()
            raise _Ordinary
        if trial is not None and not trial.outcome.holds:
            self._void(recording)
            if not step.assumes:
                self._fail("a value or parameter is invalid for a distribution, which ordinary steps accept")
            return self._named(outcome, surroundings)
        if trial is not None:
            recording.seconds.append((trial.seconds, seconds))
            problem = trial.disagreement(outcome, inputs)
            if problem is not None and kl_weight.device.type != "cpu":
                state.restore()
                again, _ = self._ordinary(call)
                problem = trial.disagreement(outcome, inputs, again)
        problem = problem or surroundings.moved()
        if used.names.keys() - set(surroundings.names):
            problem = "a new parameter appears"
        if problem is not None:
            self._recordings.remove(recording)
            if recording.unproven:
                raise CaptureError(_broken(problem, self.elbo._step + 1, recording.first_unproven))
            self._fail(problem)
        elif recording.is_slower():
            self._recordings.remove(recording)
            self._slower.add(recording.key)
        recording.trust(batch)
        return self._named(outcome, surroundings)

    def _replayed(self, recording: Recording, call: Call, batch: list[Tensor], wait: bool) -> Outcome:
        surroundings, step = recording.surroundings, recording.step
        inputs = [*surroundings.tensors, *batch]
        state = step.state(inputs) if wait else None
        try:
            outcome = step.replay(inputs, self._kl_weight(step.device))
            # Before the results are read, as the device computes meanwhile.
            self.elbo.keep(outcome.terms, self.elbo.current_kl_weight())
            self.elbo.set_record(call.guide, outcome.record)
            _announce(surroundings.names)
            if wait and not (outcome.holds and math.isfinite(outcome.value)):
                if step.assumes and not outcome.holds:
                    self._void(recording)
                raise _Ordinary  # an ordinary step then raises the error with its diagnosis
        except (*_REPLAY_ERRORS, _Ordinary) as error:  # for example, a label is out of range
            if state is not None:
                state.restore()
            raise _Ordinary from error
        if not recording.unproven:
            recording.first_unproven = self.elbo._step + 1
        recording.unproven += 1
        return self._named(outcome, surroundings)

    @staticmethod
    def _named(outcome: Outcome, surroundings: Surroundings) -> Outcome:
        outcome.names = surroundings.names
        return outcome

    def _void(self, recording: Recording) -> None:
        """Drop a recording whose assumptions fail; the next recording of this kind of step makes no assumptions."""
        self._recordings.remove(recording)
        self._varied.add(recording.key)

    def _kl_weight(self, device: torch.device) -> Tensor:
        """Return the KL weight as a tensor on the device of the step, always the same one."""
        value = self.elbo.current_kl_weight()
        if device not in self._weights:
            self._weights[device] = value, torch.full((), value, dtype=widest(device), device=device)
        known, weight = self._weights[device]
        if value != known:
            self._weights[device] = value, weight.fill_(value)
        return weight

    def _fail(self, reason: str) -> None:
        self._failures += 1
        self._seen.clear()
        if self._failures == _ATTEMPTS:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        warn(f"training steps are not captured, and ordinary steps are taken instead: {reason}")


class _Ordinary(Exception):  # noqa: N818 (not an error)
    """Signals that an ordinary step must be taken."""


def _broken(problem: str, step: int, first: int) -> str:
    return (
        f"captured steps have gone on with an outdated value of something that the model reads: {problem} in step "
        f"{step}. The results of training since step {first} are void. Captured steps follow tensors, arguments, and "
        "plain attributes, hooks and submodules of modules: store what changes there (a buffer, an argument, an "
        "attribute of a module), or train with capture=False and without Captured"
    )


def _device_of(inputs: Iterable[Tensor]) -> torch.device:
    """Return the device of a step: the accelerator if there is one, as scalars may be on the CPU."""
    return next((t.device for t in inputs if t.device.type != "cpu"), torch.device("cpu"))


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
