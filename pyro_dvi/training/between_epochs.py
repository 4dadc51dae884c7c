# SPDX-License-Identifier: Apache-2.0
"""Validation and learning-rate schedules: what happens between two epochs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro.optim import PyroLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.core.batches import batches, with_rows
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.training.routes import Route, SVIRoute


def validation_metrics(
    route: Route, validate: Callable[[], Any] | Iterable[Any], device: torch.device | None
) -> dict[str, float]:
    """Evaluate a callable's metrics, or the mean loss over a loader, in evaluation mode.

    A loss is that of the data set it is an estimate for: with a plate of N training examples, every validation batch
    of M examples is scaled by N/M, and batches count by their size.

    Raises:
        ArgumentError: if the callable returns neither a number nor a mapping of numbers.
        DataError: if the loader is empty.
    """
    with _preserved_modes(route) as parts, preserve_random_state(validate):
        for part in parts:
            part.eval()
        if callable(validate):
            return _as_metrics(validate())
        total = weight = 0.0
        for args, kwargs in batches(validate, device):
            rows = with_rows((*args, *kwargs.values()))
            size = 1 if rows is None else len(rows)
            total, weight = total + size * route.evaluate(args, kwargs), weight + size
        if not weight:
            raise DataError("validate: the loader yielded no batch.")
        return {"loss": total / weight}


@contextmanager
def training_mode(route: Route) -> Iterator[None]:
    """Train what is in evaluation mode as a whole; a module that is frozen within a training model stays frozen."""
    with _preserved_modes(route) as parts:
        for part in parts:
            if not part.training:
                part.train()
        yield


@contextmanager
def _preserved_modes(route: Route) -> Iterator[list[nn.Module]]:
    """Give model, guide and what they call, and put each of their modules back into its own mode afterwards."""
    parts = [*route.modules().values(), *route.loose_modules]
    modes = [(module, module.training) for part in parts for module in part.modules()]
    try:
        yield parts
    finally:
        for module, training in modes:
            module.training = training


def _as_metrics(result: Any) -> dict[str, float]:
    metrics = result if isinstance(result, Mapping) else {"loss": result}
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"validate must return a number or a mapping from names to numbers, got {type(result).__name__} ({error})."
        ) from error


@dataclass(frozen=True)
class EveryStep:
    """A learning-rate schedule that moves with every training step instead of every epoch (``OneCycleLR``).

    Args:
        scheduler: a torch scheduler, or the ``PyroLRScheduler`` that is the optimizer of the SVI.
    """

    scheduler: LRScheduler | PyroLRScheduler


class Schedule:
    """The scheduler of a torch optimizer, or the one inside an SVI's optimizer, stepped at the right time.

    Args:
        route: what is being trained.
        given: a scheduler, one in :class:`EveryStep`, or None.

    Attributes:
        scheduler: what moves the learning rate, or None.
        saved: what a checkpoint has to save of it: an SVI's is saved with its optimizer.

    Raises:
        ArgumentError: ``given`` is no scheduler of this optimizer.
    """

    def __init__(self, route: Route, given: Any) -> None:
        self.every_step = isinstance(given, EveryStep)
        self.scheduler: Any = given.scheduler if isinstance(given, EveryStep) else given
        self.saved = self.scheduler
        if isinstance(route, SVIRoute):
            own = route.svi.optim if isinstance(route.svi.optim, PyroLRScheduler) else None
            if self.scheduler not in (None, own):
                raise ArgumentError(
                    "lr_schedule: an SVI carries its schedule in its optimizer, for instance pyro_dvi.optim.Adam("
                    "learning_rates(1e-3), scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99)), "
                    "which fit steps after every epoch. Only EveryStep(svi.optim) can be given here."
                )
            self.scheduler, self.saved = own, None
        elif self.scheduler is not None:
            check_choice(
                "lr_schedule", self.scheduler, (LRScheduler, ReduceLROnPlateau), "a torch.optim.lr_scheduler"
            )
        kind = getattr(self.scheduler, "pt_scheduler_constructor", type(self.scheduler))
        self.needs_metric = isinstance(kind, type) and issubclass(kind, ReduceLROnPlateau)
        if self.needs_metric and self.every_step:
            raise ArgumentError("ReduceLROnPlateau follows the loss of epochs; do not wrap it in EveryStep.")

    def after_step(self) -> None:
        """Move, if the schedule counts steps."""
        if self.every_step and self.scheduler is not None:
            self.scheduler.step()

    def after_epoch(self, metric: float) -> None:
        """Move, if the schedule counts epochs; ``metric`` is for ``ReduceLROnPlateau``."""
        if not self.every_step and self.scheduler is not None:
            self.scheduler.step(metric) if self.needs_metric else self.scheduler.step()
