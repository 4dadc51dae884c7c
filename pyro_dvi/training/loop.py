# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.batches import arguments, check_loader, number_of_batches
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.fingerprint import input_shapes
from pyro_dvi.runs.trained_for import check_trainable, note_trained_for
from pyro_dvi.training.between_epochs import (
    EarlyStopping,
    EveryStep,
    Schedule,
    delayed_interrupts,
    training_mode,
    validation_metrics,
)
from pyro_dvi.training.checkpoint import save
from pyro_dvi.training.first_step import informed
from pyro_dvi.training.history import History, posterior_scale
from pyro_dvi.training.known_code import runs_known_code
from pyro_dvi.training.minibatches import Minibatches
from pyro_dvi.training.parameter_checks import check_parameters, claim_parameters
from pyro_dvi.training.rollback import Rollback
from pyro_dvi.training.routes import Route
from pyro_dvi.training.step_log import FailedStep, StepLog
from pyro_dvi.training.targets import route_of

_CAPTURED_STEPS = (
    50  # fewest steps for which a call records; a recording takes as long as about ten ordinary steps
)


@dataclass
class TrainingState:
    """The state of training, passed to callbacks after every epoch.

    Attributes:
        epoch: number of completed epochs, counted over all calls that share the history.
        history: the record so far; ``history.epochs.last()`` is the epoch that has just finished.
        model: the model.
        guide: the guide.
        elbo: the ELBO, or None if the loss is a plain function.
        stop: set it to True to end training after this epoch.
    """

    epoch: int
    history: History
    model: Any
    guide: Any
    elbo: Any
    stop: bool = False


def fit(
    svi: Any,
    loader: Iterable[Any],
    epochs: int,
    *,
    optimizer: Optimizer | None = None,
    validate: Callable[[], Any] | Iterable[Any] | None = None,
    callbacks: Sequence[Callable[[TrainingState], None]] = (),
    progress: bool = True,
    lr_schedule: LRScheduler | ReduceLROnPlateau | EveryStep | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    history: History | None = None,
    capture: bool | None = None,
    data_on_device: bool = False,
) -> History:
    r"""Train for a number of epochs, and return the history.

    Every step minimises the loss of one minibatch,

    .. math::
        -\mathrm{ELBO} \approx -\frac NM \sum_{i \le M} \mathrm E_q \log p(y_i \mid x_i) + \beta\,\mathrm{KL},

    just as ``svi.step`` or ``loss.backward(); optimizer.step()`` does.

    Status: exact; ``fit`` adds no approximation to the objective.

    *Batches*: a tuple or list becomes positional arguments of model and guide, a mapping becomes keyword arguments, and
    anything else becomes the only argument. Tensors move to the device of the parameters. If the ELBO has
    ``num_data=None``, ``fit`` sets it during training to the number of examples from which the loader draws, so that a
    plate of the wrong size is detected. With a sampler of your own, this number is unknown, and nothing is checked. For
    a list, ``fit`` counts the examples in the batches instead. If a list contains only a part of the data, set
    ``num_data`` in the ELBO.

    *Modes*: a model in evaluation mode is switched to training mode, and back afterwards. If the model is in training
    mode, modules inside it that are in evaluation mode (such as a frozen BatchNorm) stay in evaluation mode.

    *Divergence* is detected before the optimizer takes its step. Its signs are a loss that is not finite, or a
    distribution that rejects parameters because training has made them far too large. Parameters, buffers, optimizer
    and ELBO then return to the end of the last good epoch, and the error contains the history. Errors that the weights
    have not caused are raised unchanged.

    *Ctrl-C*, like the signal SIGTERM that cluster schedulers send, ends training but not the program. The state after
    the current step is kept and saved, and the history is returned with ``stopped == "interrupted"``. The next call
    with this history restarts the unfinished epoch. A second signal takes effect immediately.

    Args:
        svi: a :class:`pyro.infer.SVI` with any Pyro optimizer or scheduler; or ``elbo(model, guide)`` together with
            ``optimizer``. The second form also works under ``pyro.settings.set(module_local_params=True)``.
        loader: a DataLoader, a list of batches, or any iterable that can be iterated repeatedly.
        epochs: number of additional epochs. With ``history``, it may be 0.
        optimizer: torch optimizer of an ``ELBOModule``; see :func:`~pyro_dvi.optim.parameter_groups`.
        validate: a loader, over which the mean loss is recorded as ``validation_loss``; or a callable without arguments
            that returns a number or a mapping of metrics. Validation runs after every epoch in evaluation mode. It
            changes neither running statistics nor the random numbers of training.
        callbacks: functions that are called with a :class:`TrainingState` after every epoch.
        progress: show a progress bar in a terminal or notebook.
        lr_schedule: a torch scheduler of ``optimizer``. It is stepped after every epoch; to step it after every
            training step, wrap it in :class:`EveryStep`. A ``PyroLRScheduler`` in the SVI is stepped after every epoch
            automatically. ``ReduceLROnPlateau`` monitors ``validation_loss``, or the training loss if there is no
            validation.
        early_stopping: stops training early, with the weights of the best epoch; needs ``validate``. If the patience is
            already exhausted in ``history``, training does not continue.
        checkpoint: path of a checkpoint, written after every epoch. :func:`load` reads it; call :func:`save` in a
            callback to save less often.
        device: device to which model and guide are moved before training.
        history: the history of an earlier call, to continue it. To keep the record even if the model, a callback or the
            loader raises an error, pass your own ``History()``.
        capture: True to replay the steps of an objective of this library from recordings, under the contract of
            :class:`~pyro_dvi.objectives.Captured`; model and guide are then called only occasionally. On the CPU,
            results are bitwise equal to those of ordinary steps; on CUDA, a step is one CUDA graph, and its loss is
            read later. By default, steps are captured if the model was made by ``classifier`` or ``regressor`` from
            modules of torch or torchvision, because only the code of other modules can break the contract. If the
            call has few steps, all steps are ordinary; with False, this holds for every call.
        data_on_device: True to copy the tensors of a ``TensorDataset`` to the device once, instead of copying each
            minibatch.

    Returns:
        The history, ready to plot.

    Raises:
        NonFiniteError: if a loss or parameter is NaN or infinite; the attributes ``epoch`` and ``step`` of the error
            state when this happened, and ``history`` contains the record.
        DataError: if the loader is empty, cannot be iterated again, disagrees with the plate of the model, or does not
            have as many batches as the loaders of other processes.
        ArgumentError: if an option is out of range, or does not fit ``svi``.
        GuideError: if the optimizer lacks parameters, or if Pyro's store contains parameters of another model under the
            same names.
        CaptureError: if captured steps have gone on with an outdated value that the model reads.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro_dvi.optim import Adam
        >>> pyro.clear_param_store()
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", 40, subsample_size=len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
        >>> x = torch.linspace(-1, 1, 40)
        >>> guide = AutoNormal(model)
        >>> svi = SVI(model, guide, Adam({"lr": 0.05}), loss=Trace_ELBO())
        >>> history = fit(svi, [(x[::2], 2 * x[::2]), (x[1::2], 2 * x[1::2])], epochs=60)
        >>> history["loss"][-1] < history["loss"][0], history.stopped
        (True, 'epochs')
    """
    route = route_of(svi, optimizer)
    check_count("epochs", epochs, least=1 if history is None else 0)
    check_loader(loader, max(epochs, 1))
    if validate is not None and not callable(validate):
        check_loader(validate, epochs, role="validate")
    if early_stopping is not None:
        check_choice("early_stopping", early_stopping, EarlyStopping, "EarlyStopping(patience=10)")
        if validate is None:
            raise ArgumentError(
                "early_stopping needs validate=, a loader or a callable that returns the metric."
            )
    if device is not None:
        for part in route.modules().values():
            part.to(device)
    check_trainable(route.guide, route.elbo)
    check_parameters(route)
    schedule, history = Schedule(route, lr_schedule), History() if history is None else history
    place = None if device is None else torch.device(device)
    return _Run(
        route,
        history,
        loader,
        validate,
        callbacks,
        schedule,
        early_stopping,
        checkpoint,
        place,
        data_on_device,
    ).train(epochs, progress, capture)


@dataclass
class _Run:
    """One call of :func:`fit`."""

    route: Route
    history: History
    loader: Iterable[Any]
    validate: Callable[[], Any] | Iterable[Any] | None
    callbacks: Sequence[Callable[[TrainingState], None]]
    schedule: Schedule
    early_stopping: EarlyStopping | None
    checkpoint: str | os.PathLike[str] | None
    device: torch.device | None
    data_on_device: bool

    def __post_init__(self) -> None:
        self.rollback = Rollback(self.route, self.history, self.loader)
        self._minibatches = Minibatches(self.loader, self.data_on_device)
        self._log = StepLog(self.route, self.history, self.rollback)
        self._waits = True  # for the loss of each step

    def train(self, epochs: int, progress: bool, capture: bool | None) -> History:
        """Train, save, and restore the best weights."""
        last = self.history.epoch + epochs
        steps = number_of_batches(self.loader)
        if capture is None:
            capture = runs_known_code(self.route.model, self.route.guide, self.route.elbo)
        if capture and (steps is None or epochs * steps >= _CAPTURED_STEPS):
            self.route.capture()
        if steps is not None:
            if hasattr(self.route.elbo, "check_number_of_batches"):  # training may use several processes
                self.route.elbo.check_number_of_batches(steps)
            if self.schedule.scheduler is None and hasattr(self.route.steered, "set_total_steps"):
                self.route.steered.set_total_steps(last * steps)
        with (
            in_turn,
            progress_bar(progress, None if steps is None else epochs * steps) as self._bar,
            informed(self.route, self.loader) as self._first_step,
            training_mode(self.route),
        ):
            self._train_until(last)
            self._save()
            if self.early_stopping is not None and self.history.best_weights:
                self.route.set_weights(self.history.best_weights)
        return self.history

    def _train_until(self, last: int) -> None:
        """Train up to the last epoch or until there is a reason to stop, and record the reason in the history."""
        history, stopping = self.history, self.early_stopping
        stopped_before = stopping is not None and stopping.exhausted(stopping.monitored(history))
        history.stopped = "early stopping" if stopped_before else None
        try:
            with delayed_interrupts() as self._check_signals:
                while history.stopped is None and history.epoch < last:
                    history.stopped = self._epoch(history.epoch + 1)
                    if history.stopped is None and history.epoch < last:
                        self._save()
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        except Exception as error:
            self.route.announce(error)
            raise
        finally:  # after an interruption or an error, steps may be unread
            with suppress(FailedStep):
                self._log.read()
        history.stopped = history.stopped or "epochs"

    def _epoch(self, epoch: int) -> str | None:
        """Train one epoch; return the reason to stop, if there is one."""
        started, first = time.perf_counter(), self.history.step
        if self.callbacks or callable(self.validate):
            self.route.doubt()  # this code may have changed the model
        self.rollback.note_random_state()
        try:
            self._steps(epoch)
        except FailedStep as failed:  # repeat the epoch, so that the error is that of the failed step
            self._bar.update(-failed.undone)
            self._waits = True
            self._steps(epoch)
        self._waits = not self.route.is_read_later()
        steps = self.history.step - first
        if not steps:
            raise DataError(f"The loader yielded no batch in epoch {epoch}. Can it be read more than once?")
        self.rollback.check_after_epoch(epoch)
        record = self.history.epoch_of(steps)
        record["seconds"] = time.perf_counter() - started
        scale = posterior_scale(self.route)
        if scale is not None:
            record["posterior_scale"] = scale
        record |= self._validated()
        self.history.epochs.append(**record)
        self.schedule.after_epoch(record.get("validation_loss", record["loss"]))
        self.rollback.remember()
        stopped = self._after_epoch(epoch)
        self._check_signals()
        return stopped

    def _steps(self, epoch: int) -> None:
        """Take the steps of an epoch."""
        device = self._target_device()
        for batch in self._minibatches.of_epoch(device):
            self._step(epoch, *arguments(batch, device))
            self._check_signals()
            device = device or self._target_device()  # some guides have no parameters before the first step
        self._log.read()

    def _validated(self) -> dict[str, float]:
        """Return the validation metrics as columns of the history."""
        if self.validate is None:
            return {}
        metrics = self.route.agreed(validation_metrics(self.route, self.validate, self._target_device()))
        if self.early_stopping is not None and self.early_stopping.monitor not in metrics:
            raise ArgumentError(
                f"EarlyStopping monitors {self.early_stopping.monitor!r}, but validate reports {list(metrics)}"
            )
        return {f"validation_{name}": value for name, value in metrics.items()}

    def _after_epoch(self, epoch: int) -> str | None:
        exhausted = False
        if self.early_stopping is not None:
            values = self.early_stopping.monitored(self.history)
            if self.early_stopping.best_epoch(values) == len(values):
                self.history.best_epoch, self.history.best_weights = epoch, self.route.weights()
            exhausted = self.early_stopping.exhausted(values)
        state = TrainingState(epoch, self.history, self.route.model, self.route.guide, self.route.elbo)
        with in_turn.passed():
            for callback in self.callbacks:
                callback(state)
        return self.route.agreed("early stopping" if exhausted else "callback" if state.stop else None)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Create the parameters before the first step, and store their initial values."""
        with explained_errors(self.route.model, args, kwargs):
            self.route.initialise(args, kwargs)
        for module in self.route.loose_modules:
            module.train()
        check_parameters(self.route)
        claim_parameters(self.route)
        rule = getattr(self.route.elbo, "prediction_rule", "Samples")
        note_trained_for(self.route.guide, rule, getattr(self.route.elbo, "temperature", 1.0))
        self.history.inputs = self.history.inputs or input_shapes(args, kwargs)
        self.rollback.remember()

    def _step(self, epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if not self.rollback.snapshots:
                self._prepare(args, kwargs)
            check, self._first_step = self._first_step, nullcontext()
            with check:
                loss = self.route.step(args, kwargs, self._waits)
        except Exception as error:
            self._log.read()  # an earlier step may be the cause
            diverged = self.rollback.after(error, epoch, args, kwargs)
            if diverged is None:
                raise
            raise diverged from error
        self._log.add(epoch, loss)
        self.schedule.after_step()
        self._bar.update()
        self._bar.set_postfix(epoch=epoch, loss=f"{self._log.loss:.5g}", refresh=False)

    def _save(self) -> None:
        if self.checkpoint is not None:
            schedule = self.schedule.saved
            save(self.checkpoint, self.route, lr_schedule=schedule, history=self.history, loader=self.loader)

    def _target_device(self) -> torch.device | None:
        return self.device or self.route.device()
