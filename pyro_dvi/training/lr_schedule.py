# SPDX-License-Identifier: Apache-2.0
"""When the learning rate moves, whoever owns it."""

from dataclasses import dataclass
from typing import Any

from pyro.optim import PyroLRScheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.errors import ArgumentError
from pyro_dvi.training.routes import Route, SVIRoute


@dataclass(frozen=True)
class EveryStep:
    """A learning rate schedule that moves with every training step instead of every epoch (``OneCycleLR``).

    Args:
        scheduler: a torch scheduler, or the ``PyroLRScheduler`` that is the optimizer of the SVI.
    """

    scheduler: LRScheduler | PyroLRScheduler


class Schedule:
    """The scheduler of a torch optimizer, or the one inside an SVI's optimizer, stepped at the right time."""

    def __init__(self, route: Route, given: Any) -> None:
        self.every_step = isinstance(given, EveryStep)
        scheduler = given.scheduler if isinstance(given, EveryStep) else given
        if isinstance(route, SVIRoute):
            own = route.svi.optim if isinstance(route.svi.optim, PyroLRScheduler) else None
            if scheduler is not None and scheduler is not own:
                raise ArgumentError(
                    "lr_schedule: an SVI carries its schedule in its optimizer, for instance pyro_dvi.optim.Adam("
                    "learning_rates(1e-3), scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99)), "
                    "which fit steps after every epoch. Only EveryStep(svi.optim) can be given here."
                )
            scheduler = own
        elif scheduler is not None and not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            raise ArgumentError(
                f"lr_schedule must be a torch.optim.lr_scheduler of the optimizer, got {type(scheduler).__name__}."
            )
        self.scheduler: Any = scheduler
        # That of an SVI is saved with its optimizer.
        self.saved = None if isinstance(route, SVIRoute) else scheduler
        kind = getattr(scheduler, "pt_scheduler_constructor", type(scheduler))
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
