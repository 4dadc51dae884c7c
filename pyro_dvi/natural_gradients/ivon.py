# SPDX-License-Identifier: Apache-2.0
"""A natural-gradient step whose curvature needs no gradients of single examples."""

from collections.abc import Iterable
from typing import Any

import torch

from pyro_dvi.core.natural_step import Statistic
from pyro_dvi.natural_gradients.optimizer import NaturalGradientOptimizer, Update

_LEAST_PRECISION = 0.1  # before an update, as a fraction of the prior's


class IVONOptimizer(NaturalGradientOptimizer):
    r"""Improved variational online Newton as a torch optimizer.

    With one draw :math:`w = \mu + \sigma\epsilon` and the mean gradient :math:`\hat g` there,

    .. math::
        \hat h = \hat g\,\frac{\epsilon}{\sigma}, \qquad
        h \leftarrow \beta_2 h + (1-\beta_2)\hat h
            + \frac{(1-\beta_2)^2}{2}\frac{(h - \hat h)^2}{h + \tilde\delta}, \qquad
        \mu \leftarrow \mu - \alpha\,\frac{\hat m + \tilde\delta(\mu - m_0)}{h + \tilde\delta}

    and :math:`\sigma^{-2} = \tfrac{N}{\beta}(h + \tilde\delta)`. The last term of h keeps it above
    :math:`-\tilde\delta` where that is constant. It is not where the temperature or a learned prior precision falls, so
    h is raised to :math:`-0.9\,\tilde\delta` before each update: the posterior variance of a weight is then less than
    some twenty times its prior's.

    Status: :math:`\hat h` is an unbiased estimate of the expected Hessian diagonal (Stein's lemma), noisier than
    squared gradients; so the precision tends to the optimum of the mean-field ELBO. A step costs about one of Adam.

    Args:
        params: means, and any other parameters; see :class:`~pyro_dvi.natural_gradients.NaturalGradientOptimizer`.
        lr: :math:`\alpha`. The default is long, because the curvature that starts as squared gradients of a network
            which has learned nothing is forgotten slowly; ``max_step`` bounds the steps.
        betas: decay rates of momentum and curvature.
        damping: added to the denominator of the step.
        data_augmentation: :math:`\rho`, by how much augmentation multiplies the effective number of data.
        initial_curvature: :math:`h_0`; None takes the squared gradients of the first minibatch.
        max_step: longest :math:`|\Delta\mu|` of a weight in a step, in standard deviations of its prior; it falls with
            the learning rate. None sets no bound.
        warmup_steps: over which the learning rate rises from 0, but at most a quarter of training; 0 starts in full.
            The temperature rises as a square over half of training, where its length is known.
        total_steps: length of a cosine decay of the learning rate. None: the length that ``fit`` announces, unless the
            optimizer has a scheduler, which then says alone how the rate falls; constant without either. A number
            and a scheduler multiply.
        deterministic_lr: learning rate of Adam for parameters that are no latents. The cosine and schedulers steer it
            too: it falls in proportion to ``lr``. It has no warm-up.

    Raises:
        ArgumentError: an option out of range.
        GuideError: in a step, if the loss was no ``NaturalGradientELBO``.

    Source: Shen et al. (2024), "Variational learning is effective for large deep networks", Algorithm 1; Lin et al.
    (2020) for the correction of h. Own code from the equations.
    """

    statistic, first = Statistic.NOISE_PRODUCTS, Statistic.SQUARES

    def __init__(self, params: Iterable[Any], *, lr: float = 100.0, **options: Any) -> None:
        super().__init__(params, lr=lr, **options)

    def _move(self, update: Update) -> None:
        beta1, beta2 = update.group["betas"]
        curvatures, measured = update.curvatures, update.measured
        torch._foreach_lerp_(update.momenta, update.gradients, 1 - beta1)
        torch._foreach_maximum_(curvatures, torch._foreach_mul(update.priors, _LEAST_PRECISION - 1))
        if update.step.measured is Statistic.NOISE_PRODUCTS and not update.is_start:
            torch._foreach_sub_(measured, curvatures)
            update.sum_into_precisions()
            torch._foreach_add_(curvatures, measured, alpha=1 - beta2)
            torch._foreach_mul_(measured, measured)
            torch._foreach_addcdiv_(curvatures, measured, update.precisions, value=0.5 * (1 - beta2) ** 2)
        correction = 1 - beta1**update.count
        torch._foreach_copy_(measured, update.momenta)
        update.add_priors(measured, correction)
        update.sum_into_precisions()
        torch._foreach_div_(measured, update.damped())
        update.move_along(measured, 1 / correction)
        torch._foreach_mul_(update.precisions, update.inverse_temperature)
