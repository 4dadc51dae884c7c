# SPDX-License-Identifier: Apache-2.0
"""The squared minibatch gradient: what stochastic gradient descent implicitly penalises."""

from collections.abc import Sequence

from torch import Tensor

from pyro_dvi.curvature.base import Curvature, half_weighted_squares, sum_of
from pyro_dvi.curvature.likelihood import Linearisation
from pyro_dvi.curvature.second_derivatives import FastSecondDerivatives

__all__ = ["MinibatchGradient"]


class MinibatchGradient(Curvature):
    r"""Square of the summed gradient of the observed labels.

    .. math:: c_\lambda = g_\lambda^2, \qquad g = \nabla_u \sum_s \sqrt{\mathrm{scale}_s}\,\log p_s(y_s \mid u)

    Status: not an estimate of the Hessian. Away from the optimum the summed gradient grows with the minibatch, so
    that :math:`c` grows with :math:`M^2`; averaged over minibatches the result differs from the full batch. With
    ``MeanFieldGuide(scale=SGDStepSize(lr, batch_size))`` it is the objective that links the step size of SGD to the
    variance of a fixed posterior. Deterministic: no labels are drawn.

    Source: Unlu & Aitchison (2021), Eq. 29 (arXiv), whose mean gradient is written there as a sum; Smith et al. (2021)
    for the implicit regulariser of SGD.

    Example:
        >>> MinibatchGradient()
        MinibatchGradient()
    """

    def recorder(self, used_values: Sequence[Tensor | None]) -> FastSecondDerivatives:
        return FastSecondDerivatives()

    def penalty(self, likelihood: Linearisation) -> Tensor:
        log_prob = sum_of(
            [
                (site.log_prob(site.value) * site.scale**0.5).sum()
                for site in (*likelihood.sites, *likelihood.factors)
            ]
        )
        return half_weighted_squares(likelihood.scales, likelihood.gradients(log_prob))

    def __repr__(self) -> str:
        return "MinibatchGradient()"
