# SPDX-License-Identifier: Apache-2.0
"""IVON: improved variational online Newton, as an optimizer for torch and for Pyro."""

from typing import Any, ClassVar

import torch

from pyro_dvi.natural_gradients.estimates import Estimate, NoiseProducts, Squares
from pyro_dvi.natural_gradients.natural_update import NaturalUpdate
from pyro_dvi.natural_gradients.optimizer import DEFAULTS, NaturalGradientOptimizer
from pyro_dvi.natural_gradients.site_update import SiteUpdate
from pyro_dvi.natural_gradients.updates import NaturalGradientOptim
from pyro_dvi.optim.joint_optim import Options, for_svi
from pyro_dvi.optim.launched_updates import FixedUpdate

_LEAST_PRECISION = 0.1  # least precision before an update, as a fraction of the prior precision


class IVONOptimizer(NaturalGradientOptimizer):
    r"""Improved variational online Newton as a torch optimizer.

    With one draw :math:`w = \mu + \sigma\epsilon` and the mean gradient :math:`\hat g` at w,

    .. math::
        \hat h &= \hat g\,\frac{\epsilon}{\sigma}, \qquad
        h \leftarrow \beta_2 h + (1-\beta_2)\hat h
            + \frac{(1-\beta_2)^2}{2}\frac{(h - \hat h)^2}{h + \tilde\delta}, \\
        \mu &\leftarrow \mu - \alpha\,\frac{\hat m + \tilde\delta(\mu - m_0)}{h + \tilde\delta}

    and :math:`\sigma^{-2} = \tfrac{N}{\beta T}(h + \tilde\delta)`. The last term of h keeps h above
    :math:`-\tilde\delta` if :math:`\tilde\delta` is constant. Because :math:`\tilde\delta` decreases with the KL weight
    or a learned prior precision, h is raised to at least :math:`-0.9\,\tilde\delta` before each update. The posterior
    variance of a weight is then less than about twenty times its prior variance.

    Status: :math:`\hat h` is an unbiased estimate of the expected diagonal of the Hessian (Stein's lemma), so the
    precision converges to the optimum of the mean-field ELBO. The estimate is noisier than squared gradients. A step
    costs about as much as a step of Adam. Curvature measured far from the optimum is forgotten over
    :math:`1/(1-\beta_2)` steps, and standard deviations are too small until then. In a regression with three weights,
    they were 0.04 to 0.3 of the exact ones after 1,600 steps with the default, and 0.9 to 1.2 with ``betas=(0.9,
    0.99)``, which suits short trainings of small models.

    Args:
        params: means, and any other parameters, which are updated with Adam.
        lr: :math:`\alpha`. The default, 100, is large, because the initial curvature (the squared gradients of an
            untrained network) is forgotten only slowly. ``max_step`` bounds the steps.
        **options: further options as in :class:`VOGNOptimizer`, except ``formulation`` and ``estimate``. ``damping`` is
            added to the denominator of the step, and ``initial_curvature`` is :math:`h_0`.

    Raises:
        ArgumentError: an option is out of range.
        GuideError: in a step, the loss was not a ``NaturalGradientELBO``.

    Source: Shen et al. (2024), "Variational learning is effective for large deep networks", Algorithm 1; Lin et al.
    (2020) for the correction of h. Implemented from the equations.
    """

    estimate = NoiseProducts()
    options: ClassVar[dict[str, Any]] = DEFAULTS | {"lr": 100.0}

    @property
    def wanted(self) -> Estimate:
        """The curvature to measure in the next step; squared gradients if they initialise the curvature."""
        starts = any(group["initial_curvature"] is None for group in self.param_groups)
        return Squares() if starts and not self.steps_done else self.estimate

    def fixed_update(self) -> FixedUpdate | None:
        return NaturalUpdate.fixed(self) if type(self) is IVONOptimizer else None

    def _rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        beta1, beta2 = update.group["betas"]
        return beta2, 1 - beta2, 1 - beta1**update.count

    def _move(self, update: SiteUpdate) -> None:
        beta1, beta2 = update.group["betas"]
        curvatures, measured = update.curvatures, update.measured
        torch._foreach_lerp_(update.momenta, update.gradients, 1 - beta1)
        torch._foreach_maximum_(curvatures, torch._foreach_mul(update.priors, _LEAST_PRECISION - 1))
        if update.is_new:
            torch._foreach_sub_(measured, curvatures)
            update.sum_into_precisions()
            torch._foreach_add_(curvatures, measured, alpha=1 - beta2)
            torch._foreach_mul_(measured, measured)
            torch._foreach_addcdiv_(curvatures, measured, update.precisions, value=0.5 * (1 - beta2) ** 2)
        torch._foreach_copy_(measured, update.momenta)
        update.add_priors(measured, update.numbers.correction)
        update.sum_into_precisions()
        torch._foreach_div_(measured, update.damped())
        update.move_along(measured)
        torch._foreach_mul_(update.precisions, update.numbers.inverse_temperature)


@for_svi(IVONOptimizer)
def IVON(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802
    """IVON for SVI: improved variational online Newton, with an :class:`IVONOptimizer`; arguments as in ``VOGN``."""
    return NaturalGradientOptim(IVONOptimizer, optim_args, clip_args)
