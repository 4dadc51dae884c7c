# SPDX-License-Identifier: Apache-2.0
"""The Gaussian posterior whose precisions natural-gradient optimizers set from a curvature."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro.distributions as dist
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Factor
from pyro_dvi.natural_gradients.estimates import Estimate, NaturalStep, Squares
from pyro_dvi.runs.divergences import normal_in_unconstrained_space, refuse_not_normal
from pyro_dvi.runs.latents import unconstraining_transform


class NaturalGradientGuide(FactorisedGuide):
    r"""Independent Gaussians, stored as means and precisions, for natural-gradient optimizers.

    .. math:: q(u) = \prod_\lambda \mathcal N(u_\lambda; \mu_\lambda, \Lambda_\lambda^{-1}), \qquad
        \Lambda = \frac{N (s + \tilde\delta)}{\beta T}

    Means are parameters with gradients. Precisions are also parameters, which are saved and loaded like all others, but
    they have no gradient. Instead, :func:`~pyro_dvi.VOGN`, ``OGN`` and ``IVON`` set them in each step from the
    curvature s, the prior precision, the number of examples N, the KL weight and the temperature. A trained guide is a
    plain Gaussian; its predictions do not depend on the plate or the schedules.

    Args:
        model: a Pyro model whose latents have Normal priors (in unconstrained space).
        init_loc_fn: Pyro's initialisation strategy for the means; by default, the weights that a network had before
            :func:`~pyro_dvi.to_bayesian_`.
        initial_scale: initial standard deviation, as a fraction of the prior standard deviation; the first step
            replaces it.
        create_plates: function that returns the plates that the guide should subsample, as in Pyro's guides.

    Attributes:
        locs: module of means, ``guide.locs.<site>``.
        precisions: module of precisions, ``guide.precisions.<site>``.
        natural_step: the record of the last step, through which objective and optimizer communicate.
        trained_by: names of the optimizers that can train this guide.

    Raises:
        ModelError: in the first call, a latent is discrete, or its prior is not Normal in unconstrained space.
        ArgumentError: ``initial_scale`` is not positive.

    Source: Osawa et al. (2019), "Practical deep learning with Bayesian principles", Algorithm 1.
    """

    _constraints = {"precisions": constraints.real}  # noqa: RUF012 (positive by the optimizer's update)
    trained_by: ClassVar[str] = "VOGN, OGN or IVON"
    _first_estimate: ClassVar[Estimate] = Squares()

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_module,
        initial_scale: float = 0.05,
        create_plates: Callable | None = None,
    ) -> None:
        if not 0 < initial_scale <= 10:
            raise ArgumentError(
                f"initial_scale must be a positive fraction of the prior's standard deviation, got {initial_scale!r}"
            )
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.initial_scale = float(initial_scale)
        self.natural_step = NaturalStep(self._first_estimate)

    def precision_parameter(self, name: str) -> Tensor:
        """Return the parameter of the precisions of a site, which the optimizer sets."""
        parameter: Tensor = getattr(self._seen[name].spreads, name.rpartition(".")[2] + "_unconstrained")
        return parameter

    def check_objective(self, objective: Any) -> None:
        """Raise an error for objectives that do not train the precisions.

        Raises:
            GuideError: the objective is not a ``NaturalGradientELBO``.
        """
        if not getattr(objective, "moves_precisions", False):
            raise GuideError(
                f"{'a loss function' if objective is None else type(objective).__name__} cannot train a "
                f"{type(self).__name__}: train it with NaturalGradientELBO and {self.trained_by}, or use MeanFieldGuide"
            )

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        if normal_in_unconstrained_space(site["fn"], unconstraining_transform(site["fn"].support)) is None:
            refuse_not_normal(name, site["fn"])
        return Precision(self.initial_scale)


@dataclass(frozen=True)
class Precision(Factor):
    """Independent Gaussians, stored as precisions.

    Args:
        initial_scale: initial standard deviation, as a fraction of the prior standard deviation.
    """

    initial_scale: float
    store: ClassVar[str] = "precisions"

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return (self.initial_scale * prior_scale.expand_as(loc)).pow(-2).contiguous()

    def distribution(self, loc: Tensor, spread: Tensor | None) -> dist.Normal:
        assert spread is not None
        return dist.Normal(loc, spread.detach().rsqrt(), validate_args=False)
