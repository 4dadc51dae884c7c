# SPDX-License-Identifier: Apache-2.0
"""The natural-gradient optimizers for ``pyro.infer.SVI``."""

from collections.abc import Callable
from typing import Any

import torch

from pyro_dvi.core.arguments import explained_calls
from pyro_dvi.core.natural_step import Statistic, steps_of
from pyro_dvi.natural_gradients.ivon import IVONOptimizer
from pyro_dvi.natural_gradients.optimizer import NaturalGradientOptimizer
from pyro_dvi.natural_gradients.vogn import OGNOptimizer, VOGNOptimizer
from pyro_dvi.optim.joint import JointOptim, torch_optimizer
from pyro_dvi.optim.options import check_optim_args, in_a_dictionary

Options = dict[str, Any] | Callable[[str], dict[str, Any]]


class NaturalGradientOptim(JointOptim):
    """A :class:`JointOptim` that can be told how long training will be."""

    total_steps: int | None = None

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
        precisions = {id(site.precision) for step in steps_of(params) for site in step.sites.values()}
        super().__call__([p for p in params if id(p) not in precisions], *args, **kwargs)

    @property
    def wanted(self) -> Statistic:
        """What an objective has to measure for the next step."""
        constructor: Any = self.pt_optim_constructor
        if self.optim_objs:
            return torch_optimizer(next(iter(self.optim_objs.values()))).wanted  # type: ignore[attr-defined, no-any-return]
        if self._state_waiting_to_be_consumed:
            return constructor.statistic  # type: ignore[no-any-return]
        if callable(self.pt_optim_args):
            return constructor.first  # type: ignore[no-any-return]
        return constructor([torch.zeros(())], **self.pt_optim_args).wanted  # type: ignore[no-any-return]

    def _get_optim(self, param: Any) -> Any:
        optimizer = super()._get_optim(param)
        if self.total_steps is not None:
            optimizer.set_total_steps(self.total_steps)
        return optimizer


@explained_calls(in_a_dictionary(VOGNOptimizer))
def VOGN(  # noqa: N802 (Pyro's style)
    optim_args: Options, clip_args: Any = None
) -> NaturalGradientOptim:
    """VOGN for SVI: variational online Gauss-Newton, by one :class:`VOGNOptimizer` for all parameters.

    Args:
        optim_args: options of :class:`VOGNOptimizer`; or a function of the parameter's name. With ``{}``,
            what is left to choose is the temperature, ``NaturalGradientELBO(kl_weight=...)``: 0.01 to 0.1 for networks.
        clip_args: as for :class:`JointOptim`.

    Raises:
        ArgumentError: an option that the optimizer has not, or out of range; or this stands where torch's class should,
            as in Pyro's schedulers.

    Example:
        >>> VOGN({}).pt_optim_constructor.__name__
        'VOGNOptimizer'
    """
    return _wrapped(VOGNOptimizer, optim_args, clip_args)


@explained_calls(in_a_dictionary(OGNOptimizer))
def OGN(  # noqa: N802
    optim_args: Options, clip_args: Any = None
) -> NaturalGradientOptim:
    """OGN for SVI: online Gauss-Newton, by one :class:`OGNOptimizer`; arguments as :func:`VOGN`."""
    return _wrapped(OGNOptimizer, optim_args, clip_args)


@explained_calls(in_a_dictionary(IVONOptimizer))
def IVON(  # noqa: N802
    optim_args: Options, clip_args: Any = None
) -> NaturalGradientOptim:
    """IVON for SVI: improved variational online Newton, by one :class:`IVONOptimizer`; arguments as :func:`VOGN`."""
    return _wrapped(IVONOptimizer, optim_args, clip_args)


def _wrapped(
    constructor: type[NaturalGradientOptimizer], optim_args: Options, clip_args: Any
) -> NaturalGradientOptim:
    check_optim_args(optim_args, constructor)
    if isinstance(optim_args, dict):
        # So that what is wrong shows here and not in the first step.
        constructor([torch.zeros(())], **optim_args)
    return NaturalGradientOptim(constructor, optim_args, clip_args)
