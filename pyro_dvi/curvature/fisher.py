# SPDX-License-Identifier: Apache-2.0
"""Curvatures that square the gradient of a sum over examples.

That of labels drawn from the model is the sampled Fisher information, the default of Variational Laplace; that of the
observed labels is what stochastic gradient descent implicitly penalises.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.curvature.base import Curvature, half_weighted_squares, sum_of
from pyro_dvi.curvature.likelihood import Linearisation, ObservedSite, SliceArguments, private_random_state
from pyro_dvi.curvature.second_derivatives import FastSecondDerivatives
from pyro_dvi.errors import ArgumentError, UnsupportedError


class Fisher(Curvature):
    r"""Squared gradient of labels drawn from the model itself.

    .. math::
        c_\lambda = \tilde g_\lambda^2, \qquad
        \tilde g = \nabla_u \sum_s \sqrt{\mathrm{scale}_s}\, \log p_s(\tilde y_s \mid u), \quad
        \tilde y \sim p(\cdot \mid \mu)

    Status: unbiased for the diagonal of the summed expected Fisher information (cross terms of independent labels
    average out), hence for the generalised Gauss-Newton matrix of exponential-family likelihoods. Its noise
    per weight shrinks with the number of label draws, not with the size of the minibatch.

    Args:
        num_label_samples: label draws per step; each costs one more double backward.
        every: compute the penalty in every k-th training step only and multiply it by k: unbiased over steps.
        fraction: part of the minibatch, in (0, 1], on which the penalty is computed, drawn at random in every
            step; the plate's scale makes up for it. Unbiased, except that batch normalisation then sees
            statistics of the part.
        generator: random generator of the label draws (and of the drawn part); the global one by default.
        slice_args: ``(args, kwargs, rows) -> (args, kwargs)`` for ``fraction``; by default every tensor argument as
            long as the first one is indexed along its first dimension.

    Source: Unlu & Aitchison (2021), Eqs. 25-30; :math:`\tilde g` there is ``g`` with sampled labels.

    Example:
        >>> Fisher(num_label_samples=2, every=4)
        Fisher(num_label_samples=2, every=4)
    """

    def __init__(
        self,
        num_label_samples: int = 1,
        every: int = 1,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        slice_args: SliceArguments | None = None,
    ) -> None:
        check_count("num_label_samples", num_label_samples)
        check_count("every", every)
        if not 0 < fraction <= 1:
            raise ArgumentError(f"fraction must lie in (0, 1], got {fraction}")
        self.num_label_samples = num_label_samples
        self.every = every
        self.fraction = fraction
        self.generator = generator
        self.slice_args = slice_args

    def weight(self, step: int) -> float:
        return float(self.every) if step % self.every == 0 else 0.0

    def recorder(self, used_values: Sequence[Tensor | None]) -> FastSecondDerivatives:
        return FastSecondDerivatives()

    def penalty(self, likelihood: Linearisation) -> Tensor:
        likelihood.require_labels("Fisher")
        with private_random_state(self.generator, likelihood.device):
            if self.fraction < 1:
                if likelihood.subset is None:
                    raise UnsupportedError(
                        "Fisher(fraction) needs a model that can be run on part of a minibatch"
                    )
                likelihood = likelihood.subset(self.fraction, self.slice_args)
            draws = [
                [site.sample_labels() for site in likelihood.sites] for _ in range(self.num_label_samples)
            ]
        penalties = [_squared_gradient(likelihood, likelihood.sites, labels) for labels in draws]
        return sum_of(penalties) / self.num_label_samples

    def __repr__(self) -> str:
        defaults = {"num_label_samples": 1, "every": 1, "fraction": 1.0}
        changed = [f"{k}={getattr(self, k)}" for k, v in defaults.items() if getattr(self, k) != v]
        return f"Fisher({', '.join(changed)})"


class MinibatchGradient(Curvature):
    r"""Square of the summed gradient of the observed labels: the empirical Fisher with a term for each minibatch.

    .. math:: c_\lambda = g_\lambda^2, \qquad g = \nabla_u \sum_s \sqrt{\mathrm{scale}_s}\,\log p_s(y_s \mid u)

    Averaged over the minibatches j of an epoch, this is :math:`\sum_j g_{j\lambda}^2` with the unscaled gradient of
    each; :class:`EmpiricalFisher` has a term for each example instead.

    Status: not an estimate of the Hessian. Away from the optimum the summed gradient grows with the minibatch, so
    that :math:`c` grows with :math:`M^2`; the sum over minibatches differs from the square of the full batch. With
    ``MeanFieldGuide(scale=SGDStepSize(lr, batch_size))`` it is the objective that links the step size of SGD to the
    variance of a fixed posterior. Deterministic: no labels are drawn.

    Source: Unlu & Aitchison (2021), Eq. 27; Eq. 29 (arXiv) for the link with SGD, there with the mean gradient; Smith
    et al. (2021) for the implicit regulariser of SGD.

    Example:
        >>> MinibatchGradient()
        MinibatchGradient()
    """

    def recorder(self, used_values: Sequence[Tensor | None]) -> FastSecondDerivatives:
        return FastSecondDerivatives()

    def penalty(self, likelihood: Linearisation) -> Tensor:
        sites = [*likelihood.sites, *likelihood.factors]
        return _squared_gradient(likelihood, sites, [site.value for site in sites])


def _squared_gradient(
    likelihood: Linearisation, sites: Sequence[ObservedSite], labels: Sequence[Tensor]
) -> Tensor:
    """Half the sum of squares of the gradient of all log-likelihoods, each with the root of its scale.

    The root belongs inside the sum: with several sites, scaling the joint gradient afterwards would weigh their cross
    terms wrongly.
    """
    terms = [(site.log_prob(y) * site.scale**0.5).sum() for site, y in zip(sites, labels, strict=True)]
    return half_weighted_squares(likelihood.scales, likelihood.gradients(sum_of(terms)))
