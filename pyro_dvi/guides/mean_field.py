# SPDX-License-Identifier: Apache-2.0
"""The factorised Gaussian posterior."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Factor, MeanField, ScaleFamily, exp_positive


class MeanFieldGuide(FactorisedGuide):
    r"""Independent Gaussians over all latents, in unconstrained space.

    .. math:: q(u) = \prod_\lambda \mathcal N(u_\lambda; \mu_\lambda, \sigma_\lambda^2), \qquad \theta = T(u)

    with Pyro's transform T to the support of each site (the identity for weights). The means start at the weights that
    a network had before :func:`~pyro_dvi.to_bayesian_`, and the scales start at :math:`\sigma = e^{-3} s` for a prior
    with standard deviation s. Initialising the guide does not change batch-norm statistics. Unconstrained sites are
    plain Normal sites of the same name, so Pyro's ``TraceMeanField_ELBO`` uses its analytic KL divergence.

    Args:
        model: a Pyro model whose latents are continuous.
        init_loc_fn: Pyro's initialisation strategy for the means.
        scale: the covariance family: ``PerWeight()``, ``PerSite()`` or ``SGDStepSize(lr, batch_size)``.
        create_plates: function that returns the plates that the guide should subsample, as in Pyro's guides.

    Attributes:
        locs: module of means, ``guide.locs.<site>``; ``MeanFieldGuide.locs.<site>`` in the parameter store.
        scales: module of standard deviations, likewise; the optimizer updates their logarithms.

    Raises:
        ModelError: a latent is discrete, or there are no latents.

    Example:
        >>> import torch
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(torch.nn.Linear(2, 1))
        >>> guide = MeanFieldGuide(net)
        >>> guide.initialize(torch.ones(1, 2))
        >>> guide.scales.weight.detach()
        tensor([[0.0498, 0.0498]])
    """

    _constraints = {"scales": exp_positive}  # noqa: RUF012

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_module,
        scale: ScaleFamily | None = None,
        create_plates: Callable | None = None,
    ) -> None:
        scale = MeanField().scale if scale is None else MeanField(scale).scale  # checks the type
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.scale_family = scale

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return MeanField(self.scale_family)
