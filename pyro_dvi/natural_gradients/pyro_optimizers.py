# SPDX-License-Identifier: Apache-2.0
"""The natural-gradient optimizers for ``pyro.infer.SVI``."""

from collections.abc import Callable
from typing import Any

import torch

from pyro_dvi.core.signatures import explained_calls
from pyro_dvi.natural_gradients.drawn_run import steps_of
from pyro_dvi.natural_gradients.optimizer import NaturalGradientOptimizer
from pyro_dvi.natural_gradients.updates import IVONOptimizer, OGNOptimizer, VOGNOptimizer
from pyro_dvi.optim.joint_optim import JointOptim, check_optim_args, in_a_dictionary

Options = dict[str, Any] | Callable[[str], dict[str, Any]]


class NaturalGradientOptim(JointOptim):
    """A :class:`JointOptim` that can be told how long training will be.

    Args:
        constructor: class of the torch optimizer.
        optim_args: its options, or a function of the parameter's name.
        clip_args: as for :class:`JointOptim`.

    Raises:
        ArgumentError: an unknown option, or one out of range.
    """

    total_steps: int | None = None

    def __init__(
        self, constructor: type[NaturalGradientOptimizer], optim_args: Options, clip_args: Any = None
    ) -> None:
        check_optim_args(optim_args, constructor)
        if isinstance(optim_args, dict):
            constructor([torch.zeros(())], **optim_args)  # mistakes show here and not in the first step
        super().__init__(constructor, optim_args, clip_args)

    def set_total_steps(self, total_steps: int) -> None:
        """Let the learning rate fall to zero over this many steps, where no option says otherwise.

        Args:
            total_steps: steps from the start of training, those already taken included.
        """
        self.total_steps = total_steps
        for optimizer in self.optim_objs.values():
            optimizer.set_total_steps(total_steps)

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Step the parameters, as Pyro's SVI asks.

        Gradients of precisions are squares or the like: they are not clipped.
        """
        params = list(params)
        precisions = {id(site.precision) for step in steps_of(params) for site in step.sites}
        super().__call__([p for p in params if id(p) not in precisions], *args, **kwargs)

    def _get_optim(self, param: Any) -> Any:
        optimizer = super()._get_optim(param)
        if self.total_steps is not None:
            optimizer.set_total_steps(self.total_steps)
        return optimizer


@explained_calls(in_a_dictionary(VOGNOptimizer))
def VOGN(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802 (Pyro's style)
    """VOGN for SVI: variational online Gauss-Newton, by one :class:`VOGNOptimizer` for all parameters.

    Args:
        optim_args: options of :class:`VOGNOptimizer`; or a function of the parameter's name. With ``{}``,
            the defaults, choose the temperature, ``NaturalGradientELBO(kl_weight=...)``: 0.01 to 0.1 for networks.
        clip_args: as for :class:`~pyro_dvi.optim.JointOptim`.

    Raises:
        ArgumentError: an unknown option, or one out of range; or this stands in place of torch's class, as in Pyro's
            schedulers.

    Example:
        >>> VOGN({}).pt_optim_constructor.__name__
        'VOGNOptimizer'
    """
    return NaturalGradientOptim(VOGNOptimizer, optim_args, clip_args)


@explained_calls(in_a_dictionary(OGNOptimizer))
def OGN(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802
    """OGN for SVI: online Gauss-Newton, by one :class:`OGNOptimizer`; arguments as :func:`VOGN`."""
    return NaturalGradientOptim(OGNOptimizer, optim_args, clip_args)


@explained_calls(in_a_dictionary(IVONOptimizer))
def IVON(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802
    """IVON for SVI: improved variational online Newton, by one :class:`IVONOptimizer`; arguments as :func:`VOGN`."""
    return NaturalGradientOptim(IVONOptimizer, optim_args, clip_args)
