# SPDX-License-Identifier: Apache-2.0
"""Adam, AdamW and SGD for ``pyro.infer.SVI``, each one torch optimizer over all parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.core.arguments import explained_calls
from pyro_dvi.errors import ArgumentError
from pyro_dvi.optim.joint import JointOptim
from pyro_dvi.optim.learning_rates import SCALE_PATTERN, LearningRates
from pyro_dvi.optim.options import check_optim_args, in_a_dictionary
from pyro_dvi.optim.scheduled import ScheduledJointOptim

Options = dict[str, Any] | Callable[..., dict[str, Any]]
Scheduler = Callable[[Optimizer], Any] | None


@explained_calls(in_a_dictionary(torch.optim.Adam))
def Adam(  # noqa: N802 (Pyro's style)
    optim_args: Options, clip_args: Any = None, *, scheduler: Scheduler = None
) -> JointOptim:
    """Adam for SVI (Kingma & Ba, 2015), one :class:`torch.optim.Adam` over all parameters.

    The numbers are those of ``pyro.optim.Adam`` up to rounding, in fewer calls of the device; :class:`JointOptim` says
    how the two differ.

    Args:
        optim_args: options of the torch optimizer, :func:`learning_rates`, or any function of the parameter's name.
        clip_args: as for :class:`JointOptim`: ``{"clip_norm": 10.0}`` bounds the norm of each gradient by itself,
            ``{"max_norm": num_data, "norm_type": math.inf}`` divides all by the largest entry of any where that exceeds
            the number of examples. Losses are sums over the data; for their means that bound is one.
        scheduler: makes a torch scheduler of the learning rate: a class, or ``partial`` of it. ``fit`` moves it after
            each epoch, or after each step with ``lr_schedule=EveryStep(optimizer)``; in a loop of your own call
            ``optimizer.step()``. Schedules that multiply the rate keep the multiple of posterior scales; those that set
            it (``OneCycleLR(max_lr=...)``) give all parameters the same.

    Returns:
        The optimizer; with ``scheduler``, also a ``pyro.optim.PyroLRScheduler``.

    Raises:
        ArgumentError: an option that the optimizer does not have or that is out of range, or no such scheduler.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR
        >>> from pyro_dvi.optim import learning_rates
        >>> optimizer = Adam(learning_rates(1e-3), scheduler=partial(CosineAnnealingLR, T_max=100))
        >>> optimizer.pt_optim_constructor.__name__, optimizer.pt_scheduler_constructor.__name__
        ('Adam', 'CosineAnnealingLR')
    """
    return _joint(torch.optim.Adam, optim_args, clip_args, scheduler)


@explained_calls(in_a_dictionary(torch.optim.AdamW))
def AdamW(  # noqa: N802
    optim_args: Options, clip_args: Any = None, *, scheduler: Scheduler = None
) -> JointOptim:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), which leaves posterior scales as they are.

    Posterior means and parameters that belong to no latent decay; that of means comes on top of the pull of the prior.
    The optimizer sees the logarithm of a scale, whose decay would pull the scale towards one. Scales are found by
    ``SCALE_PATTERN``, or by the pattern of :func:`learning_rates`.

    Args:
        optim_args: as for :func:`Adam`, with ``weight_decay`` (0.01 by default); a function has one argument.
        clip_args: as for :func:`Adam`.
        scheduler: as for :func:`Adam`.

    Returns:
        As :func:`Adam`.

    Raises:
        ArgumentError: as for :func:`Adam`.

    Example:
        >>> from pyro_dvi.optim import learning_rates
        >>> optimizer = AdamW(learning_rates(1e-3, weight_decay=0.1))
        >>> optimizer.pt_optim_args("AutoNormal.scales.weight")
        {'weight_decay': 0.0, 'lr': 0.01}
    """
    return _joint(torch.optim.AdamW, optim_args, clip_args, scheduler)


@explained_calls(in_a_dictionary(torch.optim.SGD))
def SGD(  # noqa: N802
    optim_args: Options, clip_args: Any = None, *, scheduler: Scheduler = None
) -> JointOptim:
    """Stochastic gradient descent for SVI, one :class:`torch.optim.SGD`; arguments as :func:`Adam`.

    Example:
        >>> SGD({"lr": 0.1, "momentum": 0.9}).pt_optim_constructor.__name__
        'SGD'
    """
    return _joint(torch.optim.SGD, optim_args, clip_args, scheduler)


@dataclass(frozen=True)
class _UndecayedScales:
    """Options by name, without weight decay for posterior scales."""

    options: Options

    def __call__(self, param_name: str) -> dict[str, Any]:
        options = self.options(param_name) if callable(self.options) else self.options
        is_scale = re.search(getattr(self.options, "scale_pattern", SCALE_PATTERN), param_name)
        return {**options, "weight_decay": 0.0} if is_scale else options


def _joint(
    constructor: type[Optimizer], optim_args: Options, clip_args: Any, scheduler: Scheduler
) -> JointOptim:
    """Build the optimizer, after a look at what can be known to be wrong before the first step."""
    name = constructor.__name__
    check_optim_args(optim_args, constructor)
    known = optim_args("") if isinstance(optim_args, LearningRates) else optim_args
    try:
        optimizer = constructor([torch.zeros(())], **({} if callable(known) else known))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: {error}; see the arguments of torch.optim.{name}") from error
    if constructor is torch.optim.AdamW:
        optim_args = _UndecayedScales(optim_args)
    if scheduler is None:
        return JointOptim(constructor, optim_args, clip_args)
    try:
        made = scheduler(optimizer)
    except (TypeError, ValueError) as error:
        made = error
    if not isinstance(made, LRScheduler | ReduceLROnPlateau):
        raise ArgumentError(
            f"{name}: scheduler= must make a torch scheduler for a torch optimizer, as "
            f"partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99) does; {scheduler!r} makes {made!r}"
        )
    return ScheduledJointOptim(scheduler, constructor, optim_args, clip_args)
