# SPDX-License-Identifier: Apache-2.0
r"""Kullback-Leibler divergence of factorised Gaussian posteriors to whatever prior the model has.

In order of preference: closed form (Normal priors, and priors that are a transformed Normal under the posterior's
own transform, such as LogNormal), Gauss-Hermite quadrature (any prior that factorises over elements), and one
reparameterised sample (the rest: Dirichlet, MultivariateNormal, ...). All are given the values of the prior's
own parents. Point masses contribute minus their log prior.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor
from torch import distributions as td
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.errors import DataError, ModelError
from pyro_dvi.handlers.distributions import strip_event_dims
from pyro_dvi.handlers.latents import Latent, elementary
from pyro_dvi.multiplicative_normal import MultiplicativeNormal, divergence_from_normal, squared_norm

__all__ = [
    "kl_to_prior",
    "normal_in_unconstrained_space",
    "normal_prior",
    "prior_precision",
    "refuse_not_normal",
]

_NODES = 32


def kl_to_prior(latent: Latent) -> Tensor:
    r"""KL(q || p) of one latent site, scaled and masked as the model's site is: a scalar.

    Where the guide's site has a scale :math:`c_q` of its own, as with ``poutine.scale`` in the model only, each density
    has that of its site, as in Pyro's ``Trace_ELBO``: :math:`\mathrm E_q[c_q \log q - c_p \log p]`.

    For a Normal prior :math:`\mathcal N(m, s^2)`,

    .. math:: \sum \tfrac12\Bigl(\frac{\sigma^2 + (\mu - m)^2}{s^2} - 1\Bigr) - \log\frac{\sigma}{s},

    where multiplicative noise has :math:`\sigma^2 = \alpha\mu^2 + \varepsilon`.

    Status: exact for Normal and transformed Normal priors; Gauss-Hermite with 32 nodes for other factorised priors
    (exact to rounding for smooth ones, about 1 % for kinks such as Laplace's); otherwise an unbiased sample.

    Args:
        latent: posterior marginal and prior of the site.
    """
    divergence, c_p, c_q = _divergence_to_prior(latent), latent.plate_scale, latent.guide_scale
    if c_q is c_p or not (torch.is_tensor(c_q) or torch.is_tensor(c_p) or c_q != c_p):
        return divergence
    return divergence + scale_and_mask(_expected_log_density(latent), c_q - c_p, latent.mask).sum()


def _divergence_to_prior(latent: Latent) -> Tensor:
    if latent.loc is None or latent.scale is None:
        return _scaled(latent, latent.log_density - _log_prior(latent, latent.value))
    normal = normal_prior(latent)
    if normal is not None:
        if latent.mask is None and not torch.is_tensor(latent.plate_scale):
            if not (normal.loc.requires_grad or normal.scale.requires_grad):
                total = _divergence(latent, _scalar(normal.loc), _scalar(normal.scale))
                return total if latent.plate_scale == 1.0 else total * latent.plate_scale
        ratio = latent.scale / normal.scale
        divergence = (
            0.5 * (ratio.square() + ((latent.loc - normal.loc) / normal.scale).square() - 1) - ratio.log()
        )
        return _scaled(latent, _per_batch_element(latent, divergence))
    return _scaled(latent, -_entropy(latent) - _expectation(latent, _log_density))


def _expected_log_density(latent: Latent) -> Tensor:
    """E_q[log q] over constrained values, per batch element."""
    if latent.loc is None:
        return torch.as_tensor(latent.log_density)
    jacobian = 0.0 if latent.transform is None else _expectation(latent, _log_jacobian)
    return -_entropy(latent) - jacobian


def _entropy(latent: Latent) -> Tensor:
    """Entropy of the unconstrained Gaussian, per batch element."""
    assert latent.loc is not None and latent.scale is not None
    entropy = latent.scale.log() + 0.5 * math.log(2 * math.pi * math.e)
    return _per_batch_element(latent, entropy.expand_as(latent.loc))


def prior_precision(latent: Latent) -> Tensor | None:
    """1 / s² of a Normal prior in the posterior's unconstrained space; None for other priors."""
    normal = normal_prior(latent)
    return None if normal is None else _scalar(normal.scale).pow(-2)


def _divergence(latent: Latent, prior_loc: Tensor, prior_scale: Tensor) -> Tensor:
    """Sum over all elements, in the fused form of the posterior's kind."""
    assert latent.loc is not None and latent.scale is not None
    base = None if latent.source is None else latent.source.base
    if isinstance(base, MultiplicativeNormal) and base.loc is latent.loc:
        return divergence_from_normal(base, prior_loc, prior_scale)
    loc, scale = torch.broadcast_tensors(latent.loc, latent.scale)
    total: Tensor = _NormalDivergence.apply(loc, scale, prior_loc, prior_scale)
    return total


def _scaled(latent: Latent, per_element: Tensor) -> Tensor:
    return scale_and_mask(per_element, latent.plate_scale, latent.mask).sum()


def _per_batch_element(latent: Latent, elements: Tensor) -> Tensor:
    """Sum over event dimensions; unconstrained and constrained events may differ in size, not in batch shape."""
    return sum_rightmost(elements, elements.dim() - len(latent.prior.batch_shape))


def _log_prior(latent: Latent, value: Tensor) -> Tensor:
    try:
        return latent.prior.log_prob(value)
    except ValueError as error:
        raise DataError(
            f"the prior of site {latent.name!r} does not admit its own posterior: {error}"
        ) from error


def normal_prior(latent: Latent) -> td.Normal | None:
    """Return the prior in the posterior's unconstrained space if it is a Normal there; None for other priors."""
    return normal_in_unconstrained_space(latent.prior, latent.transform)


def normal_in_unconstrained_space(prior: Any, transform: Any) -> td.Normal | None:
    """Return a distribution as the Normal that it is before ``transform``; None for others.

    Args:
        prior: over constrained values.
        transform: from unconstrained to constrained values; None for the identity.
    """
    prior = strip_event_dims(prior)
    if isinstance(prior, td.Normal):
        return prior if transform is None else None
    if isinstance(prior, td.TransformedDistribution) and transform is not None:
        base = strip_event_dims(prior.base_dist)
        own = [part for each in prior.transforms for part in elementary(each)]
        return base if isinstance(base, td.Normal) and elementary(transform) == own else None
    return None


def refuse_not_normal(site: str, prior: Any) -> NoReturn:
    """Refuse a prior under which natural-gradient updates are not defined.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"the prior of site {site!r} is {type(strip_event_dims(prior)).__name__}; natural-gradient updates need a "
        "Normal prior (in unconstrained space, as LogNormal's is). Use MeanFieldGuide with TaylorELBO or "
        "MomentPropagationELBO."
    )


def _factorises(latent: Latent) -> bool:
    prior = strip_event_dims(latent.prior)
    elementwise = all(part.domain.event_dim == 0 for part in elementary(latent.transform))
    return isinstance(prior, td.Distribution) and not prior.event_shape and elementwise


def _expectation(latent: Latent, function: Callable[[Latent, Tensor], Tensor]) -> Tensor:
    """E_q of a function of u, node by node so that memory stays that of one weight tensor; or of one sample."""
    assert latent.loc is not None and latent.scale is not None
    if not _factorises(latent):
        return function(latent, latent.loc + latent.scale * torch.randn_like(latent.loc))
    total: Tensor | float = 0.0
    for node, weight in _hermite_nodes():
        total = total + weight * function(latent, latent.loc + node * latent.scale)
    return torch.as_tensor(total)


def _log_density(latent: Latent, u: Tensor) -> Tensor:
    """Log prior density of the unconstrained value u, per batch element."""
    if latent.transform is None:
        return _log_prior(latent, u)
    return _log_prior(latent, latent.transform(u)) + _log_jacobian(latent, u)


def _log_jacobian(latent: Latent, u: Tensor) -> Tensor:
    return _per_batch_element(latent, latent.transform.log_abs_det_jacobian(u, latent.transform(u)))


@lru_cache
def _hermite_nodes() -> tuple[tuple[float, float], ...]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return tuple(zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True))


def _scalar(parameter: Tensor) -> Tensor:
    """An expanded scalar back as a scalar, so that kernels read one number instead of one per weight."""
    if parameter.dim() and not any(parameter.stride()):
        return parameter[(0,) * parameter.dim()]
    return parameter


class _NormalDivergence(Function):
    """Sum of Normal-to-Normal divergences, with its gradient written out to save passes over the weights."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, scale: Tensor, prior_loc: Tensor, prior_scale: Tensor) -> Tensor:
        ctx.save_for_backward(loc, scale, prior_loc, prior_scale)
        shift = loc - prior_loc
        logs = scale.log().sum()
        if prior_scale.dim() == 0:
            squares = (squared_norm(shift) + squared_norm(scale)) / prior_scale.square()
            return 0.5 * (squares - loc.numel()) - logs + loc.numel() * prior_scale.log()
        squares = squared_norm(shift / prior_scale) + squared_norm(scale / prior_scale)
        return 0.5 * (squares - loc.numel()) - logs + prior_scale.expand_as(loc).log().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        loc, scale, prior_loc, prior_scale = ctx.saved_tensors
        weight = out / prior_scale.square()
        d_loc = (loc - prior_loc).mul_(weight) if ctx.needs_input_grad[0] else None
        d_scale = (scale * weight).sub_(out / scale) if ctx.needs_input_grad[1] else None
        return d_loc, d_scale, None, None
