# SPDX-License-Identifier: Apache-2.0
"""Mixtures over the points at which uncertain parameters are evaluated."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.gaussian import event_dim_of
from pyro_dvi.expectations.numerical import evaluation
from pyro_dvi.moments import GaussianMoments

__all__ = ["distribution_function", "mixture_over_points", "weighted_mixture"]


def weighted_mixture(weights: Tensor, components: Any) -> td.MixtureSameFamily:
    """Return the mixture over the last batch dimension of ``components``, with weights ``[S]``."""
    # Probs would be raised to the rounding error of the dtype.
    logits = weights.log().expand(components.batch_shape)
    return td.MixtureSameFamily(td.Categorical(logits=logits), components)


def mixture_over_points(family: type, parameters: Mapping[str, Any]) -> td.MixtureSameFamily:
    r"""Return :math:`\sum_s w_s\,p(y \mid \theta_s)`, for any family.

    Status: the points are those of :mod:`pyro_dvi.expectations.numerical`: up to two uncertain numbers per density by
    quadrature, exact to 1e-6 where the density varies on the scale of the Gaussian, to some hundredths of a nat where
    it is much narrower or has a kink; more by 512 Sobol points, with errors of a tenth in the log probability of
    rare events.

    Raises:
        UnsupportedError: a parameter leaves its domain.
    """
    plan = evaluation(family, parameters, num_points=512)
    values: dict[str, Any] = {}
    for name, p in parameters.items():
        if isinstance(p, Tensor) and not isinstance(p, GaussianMoments):
            values[name] = p.unsqueeze(p.dim() - min(event_dim_of(family, name) or 0, p.dim()))
        elif not isinstance(p, GaussianMoments):
            values[name] = p
    for name, p in plan.parameters_at(plan.points).items():
        values[name] = torch.movedim(p, 0, plan.rank)
    return weighted_mixture(plan.weights, family(**values))


def distribution_function(fn: Any, value: Tensor) -> Tensor:
    """Return the probability of less than ``value``, also where that lies outside the support of some components.

    Raises:
        NotImplementedError: the distribution has none in closed form.
    """
    if isinstance(fn, td.MixtureSameFamily):
        parts = distribution_function(fn.component_distribution, value.unsqueeze(-1))
        return (parts * fn.mixture_distribution.probs).sum(-1)
    lowest, highest = (getattr(fn.support, name, None) for name in ("lower_bound", "upper_bound"))
    value = value if lowest is None else value.clamp_min(lowest)
    found: Tensor = fn.cdf(value if highest is None else value.clamp_max(highest))
    return found
