# SPDX-License-Identifier: Apache-2.0
"""A joint optimizer whose learning rates follow a schedule."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from pyro.optim import PyroLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pyro_dvi.optim.joint import JointOptim, torch_optimizer


class ScheduledJointOptim(JointOptim, PyroLRScheduler):
    """A :class:`JointOptim` with a schedule for each set of options, moved by ``step`` as Pyro's schedulers are.

    A parameter that appears late has the learning rate that it would have if it had been there from the beginning.

    Args:
        scheduler: makes a torch scheduler for a torch optimizer: a class, or ``partial(CosineAnnealingLR, T_max=100)``.
        optim_constructor: as for :class:`JointOptim`.
        optim_args: likewise.
        clip_args: likewise.
    """

    def __init__(
        self,
        scheduler: Callable[[Optimizer], Any],
        optim_constructor: Callable[..., Optimizer],
        optim_args: dict[str, Any] | Callable[..., dict[str, Any]],
        clip_args: dict[str, Any] | Callable[..., dict[str, Any]] | None = None,
    ) -> None:
        JointOptim.__init__(self, optim_constructor, optim_args, clip_args)
        opened = scheduler if isinstance(scheduler, partial) else partial(scheduler)
        self.pt_scheduler_constructor, self.kwargs = opened.func, opened.keywords

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the learning rates.

        Args:
            *args: of the torch scheduler's ``step``: the loss, for ``ReduceLROnPlateau``.
            **kwargs: likewise.
        """
        for scheduler, _ in self._shared:
            scheduler.step(*args, **kwargs)

    def _share(self, made: Any, given: dict[str, Any], fresh: bool) -> None:
        if fresh and self._shared:
            other, given_before = self._shared[0]
            if isinstance(made, ReduceLROnPlateau):  # which losses have moved
                made.load_state_dict(other.state_dict())
                (group,), (present,) = torch_optimizer(made).param_groups, torch_optimizer(other).param_groups
                group["lr"] *= present["lr"] / given_before["lr"]
            else:
                chained = other if hasattr(other, "last_epoch") else other._schedulers[0]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the optimizer should have stepped before
                    for _ in range(chained.last_epoch):
                        made.step()
        super()._share(made, given, fresh)
