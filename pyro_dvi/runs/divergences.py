# SPDX-License-Identifier: Apache-2.0
r"""Kullback-Leibler divergence of factorised Gaussian posteriors from the priors of a model.

The divergence is conditional on the values of the prior's parents. In order of preference, it is computed

- in closed form, for Normal priors (also with an ``OptimalScale``), and for priors that are a transformed Normal under
  the posterior's own transform, such as LogNormal;
- with Gauss-Hermite quadrature, for priors that factorise over elements;
- with one reparameterised sample, for other priors, such as Dirichlet and MultivariateNormal.

Point masses contribute their negative log prior.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor, distributions as td

from pyro_dvi.core.densities import is_of
from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.curvature.linearisation import sum_of
from pyro_dvi.errors import DataError, ModelError, UnsupportedError
from pyro_dvi.gaussians.normal_divergence import (
    minus_log_density,
    multiplicative_divergence,
    normal_divergence,
)
from pyro_dvi.gaussians.normals import MatrixNormal, MultiplicativeNormal, total_correlation
from pyro_dvi.gaussians.optimal_scale import OptimalScaleNormal
from pyro_dvi.moments.quadrature import gauss_hermite
from pyro_dvi.runs.latents import GaussianSite, Latent, elementary, unconstraining_transform

_NODES = 32


def kl_to_priors(latents: Iterable[Latent]) -> Tensor:
    r"""Return the sum of KL(q || p) over all latent sites, each with the scale and mask of the model's site.

    The guide's site may have a different scale :math:`c_q`, for example if only the model uses ``poutine.scale``. Each
    density then has the scale of its own site, as in Pyro's ``Trace_ELBO``:
    :math:`\mathrm E_q[c_q \log q - c_p \log p]`.

    For a Normal prior :math:`\mathcal N(m, s^2)`,

    .. math:: \sum \tfrac12\Bigl(\frac{\sigma^2 + (\mu - m)^2}{s^2} - 1\Bigr) - \log\frac{\sigma}{s},

    where :math:`\sigma^2 = \alpha\mu^2 + \varepsilon` for multiplicative noise. Sites with such a prior are summed
    together in a few passes over the weights (:mod:`pyro_dvi.gaussians.normal_divergence`); all others are summed one
    by one.

    A Gaussian with covariances adds its :func:`~pyro_dvi.gaussians.normals.total_correlation`.

    Status: exact for Normal and transformed Normal priors. Other factorised priors use Gauss-Hermite quadrature with 32
    nodes; it is exact up to rounding for smooth densities, and has an error of about 1 % for densities with a kink,
    such as Laplace's. All other priors use an unbiased estimate from one sample.

    Args:
        latents: posterior marginals and priors of the sites.
    """
    latents = list(latents)
    sources = {id(a.source): a.source for a in latents if _has_covariances(a) and a.source is not None}
    terms = [_kl_of_covariances(s, [a for a in latents if a.source is s]) for s in sources.values()]
    together: dict[Any, list[tuple[Any, ...]]] = {}
    for latent in latents:
        summand = _summand(latent)
        if summand is None:
            terms.append(_kl_to_prior(latent))
        else:
            together.setdefault(summand[0], []).append(summand[1])
            if latent.loc is None and torch.is_tensor(latent.log_density):
                density = scale_and_mask(latent.log_density, latent.plate_scale, None)
                terms.append(density.sum() if density.dim() else density)
    for (divergence, plate_scale, *_), members in together.items():
        total = divergence(*zip(*members, strict=True))
        terms.append(total if plate_scale == 1.0 else total * plate_scale)
    return sum_of(terms) if terms else torch.zeros(())


def entropy(latents: Iterable[Latent]) -> Tensor:
    r"""Return the entropy of all latent sites' Gaussians in unconstrained space, with the guide's scales and masks.

    .. math:: \sum \log\sigma + \tfrac12\log 2\pi e

    minus the total correlation of each Gaussian that has covariances. Point masses contribute nothing.

    Status: exact.

    Args:
        latents: posterior marginals and priors of the sites.
    """
    latents = [latent for latent in latents if latent.loc is not None]
    for latent in latents:
        if elementary(latent.transform) != elementary(unconstraining_transform(latent.prior.support)):
            raise UnsupportedError(
                f"the posterior of site {latent.name!r} is not Normal in unconstrained space, so its entropy is "
                "unknown: use a Normal posterior in this space, or leave temperature at 1"
            )
    terms = [scale_and_mask(_entropy(latent), latent.guide_scale, latent.mask).sum() for latent in latents]
    sources = {id(a.source): a for a in latents if _has_covariances(a)}
    for latent in sources.values():
        assert latent.source is not None
        terms.append(-total_correlation(latent.source.base) * latent.guide_scale)
    return sum_of(terms) if terms else torch.zeros(())


def refuse_free_scales(latents: Iterable[Latent], drawn: bool = False) -> None:
    """Raise an error for priors whose scale is learned or latent; called at temperatures below 1.

    At such a temperature, the normaliser of the prior outweighs the entropy of the posterior, so that the scale and the
    weights shrink to zero together.

    Args:
        latents: posterior marginals and priors of the sites.
        drawn: True if the points are draws from a posterior, and not point masses.

    Raises:
        ModelError: if there is such a prior; the message names its site.
    """
    for latent in latents:
        if (drawn or latent.loc is not None) and any(map(_has_free_scale, _layers(latent.prior))):
            raise ModelError(
                f"the prior of site {latent.name!r} has a learned or latent scale, which would shrink to zero at a "
                "temperature below 1: use a prior with a fixed scale, or kl_weight instead of temperature"
            )


def _layers(prior: Any) -> Iterator[Any]:
    """Yield a distribution, its transforms, and the distributions inside it."""
    while prior is not None:
        yield prior
        yield from (part for each in getattr(prior, "transforms", ()) for part in elementary(each))
        prior = getattr(prior, "base_dist", None)


def _has_free_scale(part: Any) -> bool:
    """Return True if a distribution or transform has a parameter with a gradient, apart from location parameters."""
    own, parameters = vars(part).keys(), getattr(part, "arg_constraints", {}).keys()
    # The parameters of Beta, for example, are properties.
    names = own if own & parameters or not parameters else parameters
    values = [
        getattr(part, name) for name in names if name not in ("loc", "_unbroadcasted_loc", "probs", "logits")
    ]
    return any(torch.is_tensor(value) and value.requires_grad for value in values)


def _has_covariances(latent: Latent) -> bool:
    matrix = latent.source is not None and isinstance(latent.source.base, MatrixNormal)
    return latent.shared is not None or matrix


def _kl_of_covariances(source: GaussianSite, latents: list[Latent]) -> Tensor:
    """Return the total correlation of a joint Gaussian, which the divergences of the marginals do not include."""
    scales = {scale for latent in latents for scale in (latent.plate_scale, latent.guide_scale)}
    if len(scales) > 1 or any(latent.mask is not None for latent in latents):
        raise ModelError(
            f"sites {[latent.name for latent in latents]} have covariances, so they cannot be scaled or masked "
            "separately: move them out of subsampled plates, masks and poutine.scale, or use a MeanFieldGuide for them"
        )
    return total_correlation(source.base) * scales.pop()


def _summand(latent: Latent) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return a key (divergence, scale, dtypes) that groups sites with Normal priors, and the divergence's arguments.

    Return None for a site that is masked, has more than one scale, or has a prior that is not Normal.
    """
    scales, normal = {latent.plate_scale, latent.guide_scale}, normal_prior(latent)
    if latent.mask is not None or len(scales) > 1 or any(map(torch.is_tensor, scales)) or normal is None:
        return None
    m, s = _scalar(normal.loc), _scalar(normal.scale)
    base: Any = None if latent.source is None else latent.source.base
    divergence: Callable[..., Tensor]
    parts: list[Any]
    if latent.loc is None:
        divergence, parts = minus_log_density, [latent.value]
    elif isinstance(base, MultiplicativeNormal):
        divergence, parts = multiplicative_divergence, [latent.loc, base.alpha, base.eps]
    else:
        divergence, parts = normal_divergence, [*torch.broadcast_tensors(latent.loc, latent.scale)]
        if m.dim() or s.dim():  # convert to units of the prior, which becomes a standard Normal
            parts, m, s = [(parts[0] - m) / s, parts[1] / s], torch.zeros(()), torch.ones(())
    if normal.loc.shape != parts[0].shape or m.dim() or s.dim() or m.requires_grad:
        return None
    common = (parts[0].dtype, parts[0].device, s.dtype, s.device)
    return (divergence, latent.plate_scale, *common), (*parts, m, s)


def _kl_to_prior(latent: Latent) -> Tensor:
    """Return the KL divergence of one site, including the scales and the mask of the site."""
    divergence, c_p, c_q = _divergence_to_prior(latent), latent.plate_scale, latent.guide_scale
    if len({c_p, c_q}) == 1:
        return divergence
    return divergence + scale_and_mask(_expected_log_density(latent), c_q - c_p, latent.mask).sum()


def _divergence_to_prior(latent: Latent) -> Tensor:
    if latent.loc is None or latent.scale is None:
        return _scaled(latent, latent.log_density - _log_prior(latent, latent.value))
    normal = normal_prior(latent)
    if normal is not None:
        ratio, shift = latent.scale / normal.scale, (latent.loc - normal.loc) / normal.scale
        divergence = 0.5 * (ratio.square() + shift.square() - 1) - ratio.log()
        return _scaled(latent, _per_batch_element(latent, divergence))
    prior = strip_event_dims(latent.prior)
    if isinstance(prior, OptimalScaleNormal) and latent.transform is None:
        expected = _per_batch_element(latent, prior.expected_log_prob(latent.loc, latent.scale))
    else:
        expected = _expectation(latent, _log_density)
    return _scaled(latent, -_entropy(latent) - expected)


def _expected_log_density(latent: Latent) -> Tensor:
    """Return E_q[log q] over constrained values, per batch element."""
    if latent.loc is None:
        return torch.as_tensor(latent.log_density)
    jacobian = 0.0 if latent.transform is None else _expectation(latent, _log_jacobian)
    return -_entropy(latent) - jacobian


def _entropy(latent: Latent) -> Tensor:
    """Return the entropy of the unconstrained Gaussian, per batch element."""
    assert latent.loc is not None and latent.scale is not None
    entropy = latent.scale.log() + 0.5 * math.log(2 * math.pi * math.e)
    return _per_batch_element(latent, entropy.expand_as(latent.loc))


def prior_precision(latent: Latent) -> Tensor | None:
    """Return 1 / s² of a Normal prior in the posterior's unconstrained space; None for other priors."""
    normal = normal_prior(latent)
    return None if normal is None else _scalar(normal.scale).pow(-2)


def _scaled(latent: Latent, per_element: Tensor) -> Tensor:
    return scale_and_mask(per_element, latent.plate_scale, latent.mask).sum()


def _per_batch_element(latent: Latent, elements: Tensor) -> Tensor:
    """Sum over event dimensions; unconstrained and constrained values differ at most in these, not in batch shape."""
    return sum_rightmost(elements, elements.dim() - len(latent.prior.batch_shape))


def _log_prior(latent: Latent, value: Tensor) -> Tensor:
    try:
        return latent.prior.log_prob(value)
    except ValueError as error:
        raise DataError(
            f"the prior of site {latent.name!r} does not accept values drawn from the posterior: {error}"
        ) from error


def normal_prior(latent: Latent) -> td.Normal | None:
    """Return the prior in the posterior's unconstrained space, if it is Normal there; None for other priors."""
    return normal_in_unconstrained_space(latent.prior, latent.transform)


def normal_in_unconstrained_space(prior: Any, transform: Any) -> td.Normal | None:
    """Return the Normal that ``transform`` maps to a distribution; None if the distribution is not of this form.

    Args:
        prior: distribution over constrained values.
        transform: map from unconstrained to constrained values; None for the identity.
    """
    prior = strip_event_dims(prior)
    if is_of(prior, td.Normal):
        return prior if transform is None else None
    if isinstance(prior, td.TransformedDistribution) and transform is not None:
        base = strip_event_dims(prior.base_dist)
        own = [part for each in prior.transforms for part in elementary(each)]
        return base if is_of(base, td.Normal) and elementary(transform) == own else None
    return None


def refuse_not_normal(site: str, prior: Any) -> NoReturn:
    """Raise an error for a prior under which natural-gradient updates are not defined.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"the prior of site {site!r} is {type(strip_event_dims(prior)).__name__}, but natural-gradient updates need a "
        "Normal prior, or a LogNormal prior for a positive latent. Use one of these, or train MeanFieldGuide with "
        "TaylorELBO or MomentPropagationELBO"
    )


def _factorises(latent: Latent) -> bool:
    prior = strip_event_dims(latent.prior)
    elementwise = all(part.domain.event_dim == 0 for part in elementary(latent.transform))
    return isinstance(prior, td.Distribution) and not prior.event_shape and elementwise


def _expectation(latent: Latent, function: Callable[[Latent, Tensor], Tensor]) -> Tensor:
    """Return E_q of a function of u: with quadrature, in the memory of one weight tensor, or from one sample."""
    assert latent.loc is not None and latent.scale is not None
    if not _factorises(latent):
        return function(latent, latent.loc + latent.scale * torch.randn_like(latent.loc))
    total: Tensor | float = 0.0
    for (node,), (weight,) in zip(*gauss_hermite(_NODES), strict=True):
        total = total + weight * function(latent, latent.loc + node * latent.scale)
    return torch.as_tensor(total)


def _log_density(latent: Latent, u: Tensor) -> Tensor:
    """Return the log prior density of the unconstrained value u, per batch element."""
    if latent.transform is None:
        return _log_prior(latent, u)
    return _log_prior(latent, latent.transform(u)) + _log_jacobian(latent, u)


def _log_jacobian(latent: Latent, u: Tensor) -> Tensor:
    return _per_batch_element(latent, latent.transform.log_abs_det_jacobian(u, latent.transform(u)))


def _scalar(parameter: Tensor) -> Tensor:
    """Return an expanded scalar as a scalar, so that one value is read instead of one per weight."""
    base = parameter._base
    if base is not None and base.dim() == 0 and base.dtype == parameter.dtype:
        if base.requires_grad == parameter.requires_grad:
            return base  # without an operator call
    if parameter.dim() and not any(parameter.stride()):
        return parameter[(0,) * parameter.dim()]
    return parameter
