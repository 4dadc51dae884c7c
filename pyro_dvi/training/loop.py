# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.batches import (
    batches,
    check_loader,
    dataset_size,
    non_finite_inputs,
    number_of_batches,
)
from pyro_dvi.errors import ArgumentError, DataError, ModelError, NonFiniteError, PyroDviError
from pyro_dvi.progress import progress_bar
from pyro_dvi.training.batch_norm import BatchNormStatistics, recompute_batch_norm
from pyro_dvi.training.checkpoint import Checkpoint, write
from pyro_dvi.training.data_size import PlateCheck, known_data_size
from pyro_dvi.training.diagnosis import diagnose, non_finite_tensors
from pyro_dvi.training.early_stopping import EarlyStopping
from pyro_dvi.training.history import History
from pyro_dvi.training.interrupts import interrupt_deferred
from pyro_dvi.training.lr_schedule import EveryStep, Schedule
from pyro_dvi.training.ownership import check_parameters, claim_parameters
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.training.routes import ModuleRoute, Route, route_of
from pyro_dvi.training.snapshot import Snapshot, copy_weights, restore_weights
from pyro_dvi.training.validation import training_mode, validation_metrics

__all__ = ["TrainingState", "fit"]

_TERMS = ("log_likelihood", "penalty", "kl", "kl_weight")


@dataclass
class TrainingState:
    """What a callback sees after an epoch.

    Attributes:
        epoch: number of epochs done, over all calls that share the history.
        history: the record so far; ``history.epochs.last()`` is the epoch that has just ended.
        model: the model.
        guide: the guide.
        elbo: the ELBO, or None where the loss is a plain function.
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
    recompute_batch_norm: bool | BatchNormStatistics = False,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    history: History | None = None,
) -> History:
    r"""Train for a number of epochs and return the history.

    Every step minimises the loss of one minibatch,

    .. math::
        -\mathrm{ELBO} \approx -\frac NM \sum_{i \le M} \mathrm E_q \log p(y_i \mid x_i) + \beta\,\mathrm{KL},

    as ``svi.step`` or ``loss.backward(); optimizer.step()`` do; the loop adds what surrounds it.

    Status: no approximation of its own.

    *Batches*: a tuple or list becomes positional arguments of model and guide, a mapping keyword arguments, anything
    else the only argument. Tensors move to the device of the parameters. Where the ELBO has ``num_data=None``, it is
    told the size of ``loader.dataset`` while training lasts, so that a plate of the wrong size is found.

    *Modes*: a model in evaluation mode is put into training mode and back afterwards. A module that is in evaluation
    mode within a training model (frozen BatchNorm) stays so.

    *NaN*: a loss that is not finite is noticed before the optimizer acts. Parameters, buffers, optimizer and ELBO go
    back to the end of the last good epoch, and the error carries the history.

    *Ctrl-C* ends training, not the program: the state after the last finished step is kept and saved, and the history
    is returned with ``stopped == "interrupted"``. A second Ctrl-C within the step, or after the loop, is not caught.

    Args:
        svi: a :class:`pyro.infer.SVI` with any Pyro optimizer or scheduler; or ``elbo(model, guide)`` with
            ``optimizer``, which is the way under ``pyro.settings.set(module_local_params=True)``.
        loader: a DataLoader, a list of batches, or any iterable that can be read again and again.
        epochs: how many more epochs to train.
        optimizer: torch optimizer of an ``ELBOModule``; see :func:`~pyro_dvi.parameter_groups`.
        validate: a loader, whose mean loss is recorded as ``validation_loss``, or a callable without arguments that
            returns a number or a mapping of metrics. Runs after every epoch in evaluation mode and changes neither
            running statistics nor random numbers of the training.
        callbacks: called with a :class:`TrainingState` after every epoch.
        progress: show a progress bar where there is a terminal or notebook.
        lr_schedule: a torch scheduler of ``optimizer``, stepped after every epoch; wrap it in :class:`EveryStep` for
            every step. A ``PyroLRScheduler`` in the SVI is stepped after every epoch of its own accord.
            ``ReduceLROnPlateau`` follows ``validation_loss``, or the training loss where there is none.
        early_stopping: when to stop, and whether to restore the best epoch. Needs ``validate``.
        recompute_batch_norm: recompute the statistics of batch normalisation at the posterior mean in the end.
        checkpoint: where to save; a path saves every epoch. See :func:`load` for going on.
        device: move model and guide there first.
        history: of an earlier call, to be continued. One of your own, ``History()``, stays in your hands if the model,
            a callback or the loader raises.

    Returns:
        The history, ready to plot.

    Raises:
        NonFiniteError: a loss or parameter is NaN or infinite. Its ``history``, ``epoch`` and ``step`` say where.
        DataError: the loader is empty, ends after one pass, disagrees with the plate of the model, or has more batches
            than that of another process.
        ArgumentError: an option is out of range, or does not go with the way of training.
        GuideError: the optimizer lacks parameters, or Pyro's store holds another model's under the same names.
        DeviceError: parameters live on several devices.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoNormal
        >>> pyro.clear_param_store()
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", 40, subsample_size=len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
        >>> x = torch.linspace(-1, 1, 40)
        >>> guide = AutoNormal(model)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=Trace_ELBO())
        >>> history = fit(svi, [(x[::2], 2 * x[::2]), (x[1::2], 2 * x[1::2])], epochs=60)
        >>> history["loss"][-1] < history["loss"][0], history.stopped
        (True, 'epochs')
    """
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ArgumentError(f"epochs must be a positive integer, got {epochs!r}.")
    check_loader(loader, epochs)
    if validate is not None and not callable(validate):
        check_loader(validate, epochs, role="validate")
    if early_stopping is not None and validate is None:
        raise ArgumentError("early_stopping needs validate=: a loader or a callable that returns the metric.")
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = Checkpoint(checkpoint)
    if isinstance(recompute_batch_norm, bool):
        statistics = BatchNormStatistics() if recompute_batch_norm else None
    else:
        statistics = recompute_batch_norm
    route = route_of(svi, optimizer)
    if device is not None:
        for part in route.modules().values():
            part.to(device)
    if isinstance(route, ModuleRoute):
        route.check_optimizer()
    check_parameters(route)
    run = _Run(
        route=route,
        loader=loader,
        validate=validate,
        callbacks=callbacks,
        learning_rate=Schedule(route, lr_schedule),
        early_stopping=early_stopping,
        statistics=statistics,
        checkpoint=checkpoint,
        device=None if device is None else torch.device(device),
        history=History() if history is None else history,
    )
    steps = number_of_batches(loader)
    if steps is not None and hasattr(route.elbo, "check_number_of_batches"):  # of several processes
        route.elbo.check_number_of_batches(steps)
    if steps is not None and run.learning_rate.scheduler is None:  # else that one says how the rate falls
        route.announce_length((run.history.epoch + epochs) * steps)
    with ExitStack() as stack:
        run.bar = stack.enter_context(progress_bar(progress, None if steps is None else epochs * steps))
        stack.enter_context(route.serving())
        stack.enter_context(training_mode(route))
        stack.enter_context(known_data_size(route, dataset_size(loader)))
        return run.train(epochs)


@dataclass
class _Run:
    """One call of :func:`fit`."""

    route: Route
    loader: Iterable[Any]
    validate: Callable[[], Any] | Iterable[Any] | None
    callbacks: Sequence[Callable[[TrainingState], None]]
    learning_rate: Schedule
    early_stopping: EarlyStopping | None
    statistics: BatchNormStatistics | None
    checkpoint: Checkpoint | None
    device: torch.device | None
    history: History
    bar: Any = None
    last_good: Snapshot | None = None
    watch: PlateCheck | None = None

    def train(self, epochs: int) -> History:
        history = self.history
        history.stopped = None
        first = history.epoch
        try:
            for epoch in range(first + 1, first + epochs + 1):
                history.stopped = self._epoch(epoch)
                if history.stopped is not None:
                    break
            else:
                history.stopped = "epochs"
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        interrupted = history.stopped == "interrupted"
        if self.checkpoint is not None and (interrupted or history.epoch % self.checkpoint.every):
            self._save(self.checkpoint)
        if (
            self.early_stopping is not None
            and self.early_stopping.restore_best
            and history.best_weights is not None
        ):
            restore_weights(self.route, history.best_weights)
        if self.statistics is not None and not interrupted:
            self._recompute_batch_norm(self.statistics)
        return history

    def _epoch(self, epoch: int) -> str | None:
        """Train an epoch; return the reason to stop, if there is one."""
        started, steps = time.perf_counter(), 0
        rows: list[dict[str, float]] = []
        for args, kwargs in batches(self.loader, self._target_device()):
            if self.last_good is None:
                self._prepare(args, kwargs)
            with interrupt_deferred():
                rows.append(self._step(epoch, args, kwargs))
            steps += 1
        if not steps:
            raise DataError(f"The loader yielded no batch in epoch {epoch}. Can it be read more than once?")
        if non_finite_tensors(self.route):
            raise self._diverged(
                epoch, f"The loss was finite until the last step. {diagnose(self.route, (), {})}"
            )
        seconds = time.perf_counter() - started
        record = {"epoch": float(epoch), "step": float(self.history.step)}
        record |= {
            name: _mean([row[name] for row in rows]) for name in rows[0] if name not in ("epoch", "step")
        }
        record |= {name: rows[-1][name] for name in ("kl_weight", "lr") if name in rows[-1]}
        record["seconds"] = seconds
        scale = self.route.posterior_scale()
        if scale is not None:
            record["posterior_scale"] = scale
        if self.validate is not None:
            if self.statistics is not None and self.statistics.each_epoch:
                self._recompute_batch_norm(self.statistics)
            metrics = validation_metrics(self.route, self.validate, self._target_device())
            record |= {f"validation_{name}": value for name, value in metrics.items()}
        self.history.epochs.append(**record)
        self.learning_rate.after_epoch(record.get("validation_loss", record["loss"]))
        self.last_good = Snapshot(self.route, epoch)
        return self._after_epoch(epoch)

    def _after_epoch(self, epoch: int) -> str | None:
        exhausted = False
        if self.early_stopping is not None:
            values = self.early_stopping.monitored(self.history)
            if self.early_stopping.best_epoch(values) == len(values):
                self.history.best_epoch, self.history.best_weights = epoch, copy_weights(self.route)
            exhausted = self.early_stopping.exhausted(values)
        state = TrainingState(epoch, self.history, self.route.model, self.route.guide, self.route.elbo)
        for callback in self.callbacks:
            callback(state)
        if self.checkpoint is not None and epoch % self.checkpoint.every == 0:
            self._save(self.checkpoint)
        return "early stopping" if exhausted else "callback" if state.stop else None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first step: make parameters exist, and remember where they start."""
        self.route.initialise(args, kwargs)
        for module in self.route.loose_modules:
            module.train()
        if self.checkpoint is not None:
            self._check_buffers(self.checkpoint)
        check_parameters(self.route)
        claim_parameters(self.route)
        self.last_good = Snapshot(self.route, self.history.epoch)
        size = dataset_size(self.loader)
        self.watch = None if size is None or hasattr(self.route.elbo, "num_data") else PlateCheck(size)

    def _step(self, epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
        try:
            with ExitStack() as stack:
                if self.watch is not None:
                    stack.enter_context(self.watch)
                loss = self.route.step(args, kwargs)
            self.watch = None
        except NonFiniteError as error:
            raise self._diverged(epoch, f"{_sentence(error)} {diagnose(self.route, args, kwargs)}") from error
        except Exception as error:
            # Pyro's validation, or a factorisation, meets a NaN before the loss does. An error of our own says what is
            # wrong with the data by itself, as long as nothing has spread.
            inputs = [] if isinstance(error, PyroDviError) else non_finite_inputs(args, kwargs)
            if not inputs and not non_finite_tensors(self.route):
                raise
            raise self._diverged(epoch, f"{_sentence(error)} {diagnose(self.route, args, kwargs)}") from error
        row = {"epoch": float(epoch), "step": float(self.history.step + 1), "loss": loss}
        terms = getattr(self.route.elbo, "terms", {})
        row |= {name: float(terms[name]) for name in _TERMS if name in terms}
        row["lr"] = self.route.learning_rate()
        self.history.steps.append(**row)
        self.learning_rate.after_step()
        self.bar.update()
        self.bar.set_postfix(epoch=epoch, loss=f"{loss:.5g}", refresh=False)
        return row

    def _diverged(self, epoch: int, finding: str) -> NonFiniteError:
        """Go back to the last good epoch and describe what happened."""
        step = self.history.step + 1
        kept = "as they were before training"
        if self.last_good is not None:
            self.last_good.restore(self.route)
            if self.last_good.epoch:
                kept = f"as they were after epoch {self.last_good.epoch}"
        self.history.stopped = "non-finite"
        error = NonFiniteError(
            f"Training diverged in epoch {epoch}, step {step}. {finding} Parameters, buffers and optimizer are "
            f"{kept}; the record until then is this error's .history."
        )
        error.history, error.epoch, error.step = self.history, epoch, step
        return error

    def _recompute_batch_norm(self, statistics: BatchNormStatistics) -> None:
        with preserve_random_state(self.loader):
            recompute_batch_norm(
                self.route.model,
                self.route.guide,
                self.loader,
                num_batches=statistics.num_batches,
                device=self._target_device(),
            )

    def _save(self, checkpoint: Checkpoint) -> None:
        scheduler = self.learning_rate.scheduler if isinstance(self.route, ModuleRoute) else None
        write(
            checkpoint.path,
            self.route,
            lr_schedule=scheduler,
            history=self.history,
            loader=self.loader,
            modules=checkpoint.modules,
        )

    def _check_buffers(self, checkpoint: Checkpoint) -> None:
        covered = {id(module) for part in checkpoint.modules.values() for module in part.modules()}
        for part in self.route.loose_modules:
            for module in part.modules():
                if id(module) not in covered and any(True for _ in module.buffers(recurse=False)):
                    raise ModelError(
                        f"The model is a function that calls {type(module).__name__}, whose buffers a checkpoint does "
                        "not see: pass Checkpoint(path, modules={'net': net})."
                    )

    def _target_device(self) -> torch.device | None:
        return self.device or self.route.device()


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _sentence(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
