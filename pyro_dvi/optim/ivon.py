# SPDX-License-Identifier: Apache-2.0
"""A natural-gradient step whose curvature needs no gradients of single examples."""

import torch
from torch import Tensor

from pyro_dvi.natural_state import Statistics
from pyro_dvi.optim.natural_gradient import NaturalGradientOptimizer, Step

__all__ = ["IVONOptimizer"]

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
        params: means, and any other parameters; see :class:`~pyro_dvi.optim.NaturalGradientOptimizer`.
        lr: :math:`\alpha`.
        betas: decay rates of momentum and curvature.
        damping: added to the denominator of the step.
        data_augmentation: :math:`\rho`, by how much augmentation multiplies the effective number of data.
        initial_curvature: :math:`h_0`; None takes the squared gradients of the first minibatch.
        clip_radius: longest :math:`|\Delta\mu / \alpha|` of a weight, in standard deviations of its prior; None sets no
            bound.
        warmup_steps: over which the learning rate and the temperature rise from 0, but at most a quarter of training; 0
            starts in full.
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

    wanted = Statistics(squares=False)

    def _move(self, step: Step) -> Tensor:
        measured, group, prior = step.measured, step.group, step.prior
        (beta1, beta2), count = group["betas"], step.memory["step"]
        momentum = step.memory["momentum"].lerp_(step.gradient / measured.num_data, 1 - beta1)
        curvature = step.memory["curvature"]
        torch.maximum(curvature, -(1 - _LEAST_PRECISION) * prior, out=curvature)
        # The first step has measured where h starts; one after another optimizer has measured for that.
        if (count > 1 or step.has_start) and measured.noise_products is not None:
            estimate = measured.noise_products / measured.num_data
            distance = estimate - curvature
            correction = distance.square().div_(curvature + prior).mul_(0.5 * (1 - beta2) ** 2)
            curvature.lerp_(estimate, 1 - beta2).add_(correction)
        direction = (momentum / (1 - beta1**count)).add_(prior * (step.loc - measured.prior_loc))
        precision = curvature + prior
        step.move_along(direction.div_(precision + group["damping"]))
        return precision.mul_(step.num_data / measured.temperature)
