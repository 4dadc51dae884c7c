# SPDX-License-Identifier: Apache-2.0
"""What happens between epochs: validation, learning-rate schedules, early stopping, and interruption by a signal."""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro.optim import PyroLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.batches import arguments, with_rows
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.training.routes import Route
from pyro_dvi.training.targets import SVIRoute


def validation_metrics(
    route: Route, validate: Callable[[], Any] | Iterable[Any], device: torch.device | None
) -> dict[str, float]:
    """Return the metrics that a callable computes, or the mean loss over a loader, in evaluation mode.

    The mean loss estimates the loss on the complete data set: with a plate of N training examples, every validation
    batch of M examples is scaled by N/M. Batches are weighted by their size.

    Raises:
        DataError: if the loader is empty.
    """
    with _preserved_modes(route) as parts, preserve_random_state(validate):
        for part in parts:
            part.eval()
        if callable(validate):
            with in_turn.passed():
                result = validate()
            metrics = result if isinstance(result, Mapping) else {"loss": result}
            return {str(name): float(value) for name, value in metrics.items()}
        total = weight = 0.0
        for batch in in_turn.passed_for(validate):
            args, kwargs = arguments(batch, device)
            rows = with_rows((*args, *kwargs.values()))
            size = 1 if rows is None else len(rows)
            total, weight = total + size * route.evaluate(args, kwargs), weight + size
        if not weight:
            raise DataError("The loader passed as validate yielded no batch.")
        return {"loss": total / weight}


@contextmanager
def training_mode(route: Route) -> Iterator[None]:
    """Switch model and guide to training mode; if they are in it already, modules frozen inside them stay frozen."""
    with _preserved_modes(route) as parts:
        for part in parts:
            if not part.training:
                part.train()
        yield


@contextmanager
def _preserved_modes(route: Route) -> Iterator[list[nn.Module]]:
    """Yield model, guide and the modules that they call, and restore the mode of each module afterwards."""
    parts = list(route.all_modules().values())
    modes = [(module, module.training) for part in parts for module in part.modules()]
    try:
        yield parts
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class EveryStep:
    """A learning-rate schedule that is stepped after every training step, not every epoch, such as ``OneCycleLR``.

    Args:
        scheduler: a scheduler of the torch optimizer, or the ``PyroLRScheduler`` that the SVI has as its optimizer.
    """

    scheduler: LRScheduler | PyroLRScheduler


class Schedule:
    """A learning-rate scheduler of a torch optimizer or of an SVI, stepped after each epoch or step.

    Args:
        route: the training.
        given: a scheduler, a scheduler wrapped in :class:`EveryStep`, or None.

    Attributes:
        scheduler: the scheduler of the learning rate, or None.
        saved: the scheduler that checkpoints save separately, or None; the scheduler of an SVI is saved with its
            optimizer.

    Raises:
        ArgumentError: if ``given`` is not a scheduler of this optimizer.
    """

    def __init__(self, route: Route, given: Any) -> None:
        self.every_step = isinstance(given, EveryStep)
        self.scheduler: Any = given.scheduler if isinstance(given, EveryStep) else given
        self.saved = self.scheduler
        if isinstance(route, SVIRoute):
            own = route.svi.optim if isinstance(route.svi.optim, PyroLRScheduler) else None
            if self.scheduler not in (None, own):
                raise ArgumentError(
                    "For an SVI, pass the scheduler to its optimizer: pyro_dvi.optim.Adam({'lr': 1e-3}, "
                    "scheduler=partial(ExponentialLR, gamma=0.99)). lr_schedule can only be EveryStep(svi.optim)."
                )
            self.scheduler, self.saved = own, None
        elif self.scheduler is not None:
            check_choice(
                "lr_schedule", self.scheduler, (LRScheduler, ReduceLROnPlateau), "a torch.optim.lr_scheduler"
            )
        kind = getattr(self.scheduler, "pt_scheduler_constructor", type(self.scheduler))
        self.needs_metric = isinstance(kind, type) and issubclass(kind, ReduceLROnPlateau)

    def after_step(self) -> None:
        """Step the scheduler, if it is stepped after every step."""
        if self.every_step and self.scheduler is not None:
            self.scheduler.step()

    def after_epoch(self, metric: float) -> None:
        """Step the scheduler, if it is stepped after every epoch; ``ReduceLROnPlateau`` uses ``metric``."""
        if not self.every_step and self.scheduler is not None:
            self.scheduler.step(metric) if self.needs_metric else self.scheduler.step()


@dataclass(frozen=True)
class EarlyStopping:
    """Stop training when a validation metric has not improved for ``patience`` epochs; keep the best epoch's weights.

    Its only state is the history, so a resumed run stops at the same epoch as an uninterrupted one.

    Args:
        patience: number of epochs without improvement after which training stops.
        monitor: name of the metric: a key of the mapping that ``validate`` returns; ``"loss"`` if ``validate`` is a
            loader or returns a single number.
        maximise: True if larger values are better, as for accuracy.

    Raises:
        ArgumentError: if ``patience`` is not a positive integer.

    Example:
        >>> stopping = EarlyStopping(patience=2)
        >>> stopping.best_epoch([3.0, 1.0, 2.0, 1.5]), stopping.exhausted([3.0, 1.0, 2.0, 1.5])
        (2, True)
    """

    patience: int = 10
    monitor: str = "loss"
    maximise: bool = False

    def __post_init__(self) -> None:
        check_count("EarlyStopping: patience", self.patience)

    def best_epoch(self, values: Sequence[float]) -> int | None:
        """Return the epoch (counted from 1) in which the best value first occurs; None if all values are NaN."""
        costs = [math.inf if math.isnan(value) else -value if self.maximise else value for value in values]
        best = min(costs, default=math.inf)
        return costs.index(best) + 1 if best < math.inf else None

    def exhausted(self, values: Sequence[float]) -> bool:
        """Return True if the patience is exhausted."""
        return len(values) - (self.best_epoch(values) or 0) >= self.patience

    def monitored(self, history: History) -> list[float]:
        """Return the values of the monitored metric; empty before the first validation."""
        return history.epochs.get(f"validation_{self.monitor}", [])


@contextmanager
def delayed_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C and SIGTERM; yield a function that raises KeyboardInterrupt if a signal has arrived.

    A second signal takes effect immediately. If Python's own handlers are not active (in another thread, or in a
    host program with its own handlers), nothing is changed.
    """
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in usual.items() if main and signal.getsignal(number) == handler]
    signals: list[int] = []

    def check() -> None:
        if signals:
            raise KeyboardInterrupt

    def handle(number: int, _frame: object) -> None:
        check()
        signals.append(number)

    for number in ours:
        signal.signal(number, handle)
    try:
        yield check
    finally:
        for number in ours:
            signal.signal(number, usual[number])
