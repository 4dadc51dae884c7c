# SPDX-License-Identifier: Apache-2.0
r"""Predictive distributions :math:`\int p(y \mid \theta)\,q(\theta)\,\mathrm d\theta` of uncertain parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.core.registry import registering
from pyro_dvi.expectations.bernoulli import is_gaussian_logit
from pyro_dvi.expectations.categorical import gaussian_logits
from pyro_dvi.expectations.gaussian import are_distinct, gaussian_of
from pyro_dvi.expectations.logistic import logit_of_expected_sigmoid
from pyro_dvi.expectations.numerical import evaluation, without_checks
from pyro_dvi.expectations.rules import find_rule
from pyro_dvi.links.classes import ClassLink, SobolSoftmax, average_logits
from pyro_dvi.links.joint import Joint
from pyro_dvi.links.mixture import PointMixture
from pyro_dvi.links.noise import MomentMatched, NoiseLink, Normal, correlated_normal
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import loc_of, variance_of

_RULES: dict[type, Callable] = {}
_LINK, _NOISE = SobolSoftmax(), MomentMatched()


def predictive_rule(*families: type) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the predictive distribution of distribution classes.

    The rule is called with the arguments that the distribution was made with, by name, and with ``family=``, ``link=``,
    ``noise=`` or ``joint=`` if it has parameters of these names. It may decline by returning ``NotImplemented``: a
    mixture over points follows, as for families without a rule.
    """
    return registering(_RULES, families)


def predictive_distribution(
    family: type,
    parameters: Mapping[str, Any],
    *,
    link: ClassLink = _LINK,
    noise: NoiseLink = _NOISE,
    joint: Joint | None = None,
) -> td.Distribution:
    """Return the predictive distribution, of the batch and event shape of the family.

    Status: exact for a Normal, LogNormal or MultivariateNormal whose mean only is uncertain, and for Bernoulli; class
    probabilities as exact as ``link``; an uncertain noise scale as ``noise`` says. Other families are mixtures over the
    points of :mod:`pyro_dvi.expectations.numerical`: up to two uncertain numbers per density by quadrature, exact to
    1e-6 where the density varies on the scale of the Gaussian, to some hundredths of a nat where it is much narrower or
    has a kink; more by Sobol points, with errors of a tenth in the log probability of rare events. So is a Normal whose
    mean and scale are functions of the very same Gaussian, unless moments are matched.

    Args:
        family: the distribution class.
        parameters: what the distribution is made with, by name: moments, tensors or numbers.
        link: from Gaussian logits to class probabilities.
        noise: from an uncertain scale of Gaussian noise to a distribution.
        joint: covariances of the Gaussians behind the uncertain parameters of each density; by default all numbers are
            independent, but for parameters that are functions of the very same Gaussian.

    Raises:
        ArgumentError: ``link`` or ``noise`` is no object of its kind.
        UnsupportedError: an uncertain parameter can leave its domain.

    Example:
        >>> f = GaussianMoments(torch.zeros(1), torch.full((1,), 3.0))
        >>> predictive_distribution(td.Normal, {"loc": f, "scale": 1.0})
        Normal(loc: tensor([0.]), scale: tensor([2.]))
    """
    check_choice("link", link, ClassLink, "SobolSoftmax() or Probit()")
    check_choice("noise", noise, NoiseLink, "MomentMatched() or GaussHermite(n)")
    given = {k: v for k, v in parameters.items() if k != "validate_args" and v is not None}
    if not any(isinstance(p, GaussianMoments) for p in given.values()):
        return family(**given)
    found = find_rule(_RULES, family)
    if found is not None and given.keys() <= found.names:
        options = {"family": family, "link": link, "noise": noise, "joint": joint}
        result: td.Distribution = found.rule(
            **given, **{k: v for k, v in options.items() if k in found.names}
        )
        if result is not NotImplemented:
            return result
    mixture = _over_points(family, given, joint)
    for plain in (td.Bernoulli, td.Categorical, td.OneHotCategorical):  # OrderedLogistic is a Categorical
        if issubclass(family, plain):
            return plain(logits=average_logits(mixture.components, mixture.weights))
    return mixture


def _over_points(family: type, parameters: Mapping[str, Any], joint: Joint | None = None) -> PointMixture:
    """Average the densities at points of the Gaussians behind the parameters."""
    if joint is None:
        plan = evaluation(family, parameters, num_points=512)
        return PointMixture(plan.at(plan.points), plan.weights)
    values, weights = joint.points(parameters)
    return PointMixture(family(**{**parameters, **values}, **without_checks(family)), weights)


@predictive_rule(td.Normal, td.LogNormal)
def normal(family: Any, loc: Any, scale: Any, noise: NoiseLink, joint: Joint | None = None) -> Any:
    r"""Predictive of (log-)normal noise: :math:`\mathcal N(\mu, v_\mu + s^2)`, or what ``noise`` makes of it."""

    def noisy(mean: Tensor, spread: Any, of_noise: Any) -> Any:
        if joint is not None and joint.event_shape:
            return correlated_normal(mean, spread, of_noise, joint.event_shape)
        if issubclass(family, td.Normal):
            return Normal(mean, spread, of_noise)
        return family(mean, (spread + of_noise).sqrt())

    mean, spread = loc_of(loc), variance_of(loc) if joint is None else joint.spread("loc")
    if not isinstance(scale, GaussianMoments):
        return noisy(mean, spread, scale**2)
    if isinstance(loc, GaussianMoments) and joint is None and not isinstance(noise, MomentMatched):
        if not are_distinct([loc, scale]):
            return NotImplemented  # mean and variance are the same as if independent, the density is not
    mean = torch.as_tensor(mean, dtype=scale.dtype, device=scale.device)
    return noise.predictive(noisy, mean, 0.0 if spread is None else spread, scale, joint)


@predictive_rule(td.MultivariateNormal)
def multivariate_normal(
    family: Any,
    loc: Any,
    covariance_matrix: Any = None,
    precision_matrix: Any = None,
    scale_tril: Any = None,
    joint: Joint | None = None,
) -> Any:
    """Predictive of correlated Gaussian noise: the covariance of the mean joins that of the noise."""
    noise = covariance_matrix, precision_matrix, scale_tril
    if any(isinstance(matrix, GaussianMoments) for matrix in noise):
        return NotImplemented
    own = torch.diag_embed(loc.variance) if joint is None else joint.between("loc", "loc")
    return family(loc.loc, covariance_matrix=family(loc.loc, *noise).covariance_matrix + own)


@predictive_rule(td.Categorical, td.OneHotCategorical)
def categorical(
    family: Any, link: ClassLink, probs: Any = None, logits: Any = None, joint: Joint | None = None
) -> Any:
    """Predictive of a class: the average probabilities."""
    f = gaussian_logits(logits, probs)
    if f is not None:
        name = "probs" if logits is None else "logits"
        spread = f.variance if joint is None else joint.between(name, name)
        return family(logits=link.log_probabilities(f.loc, spread))
    if isinstance(probs, GaussianMoments) and probs.link is None:
        return family(probs=probs.loc.clamp_min(0))  # the average is what the mean is
    return NotImplemented


@predictive_rule(td.Bernoulli)
def bernoulli(family: Any, probs: Any = None, logits: Any = None) -> Any:
    """Predictive of a yes or no: the average probability, exact to 1e-9 for a Gaussian logit."""
    if is_gaussian_logit(logits, probs):
        given = probs if logits is None else logits
        return family(logits=logit_of_expected_sigmoid(gaussian_of(given)))
    if isinstance(probs, GaussianMoments):
        return family(probs=probs.loc.clamp(0, 1))
    return NotImplemented
